"""Faster forwards on modules of transformers: products of `nn.Linear` and GPT-2's `Conv1D`, and its GELU.

Tests: tests/optimizer/decoding/test_faster_forwards.py, tests/ops/test_cpu_linear.py
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from fastgen.ops import lookup
from fastgen.ops.tracing import is_transformed
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.cost_model import size_of
from fastgen.optimizer.decoding.faster_forwards import FasterForward, Forward, faster_forwards, linears, multiply
from fastgen.optimizer.transformers import checks, kv_layers

# Values of cache_implementation for which no version of transformers compiles.
_NEVER_COMPILED = (None, "dynamic", "dynamic_full", "offloaded", "quantized")


def swap_forwards(
    model: checks.HostModel, args: tuple, kwargs: dict[str, Any], call: GenerateCall
) -> AbstractContextManager[None]:
    """Puts faster forwards on the model's modules while this call runs, if the model is so large that this pays.

    It puts none on where the call may compile the model, as the library does for caches that have a static shape.
    """
    if not call.costs.should_swap_forwards(size_of(model, checks.KNOWN), kwargs.get("max_new_tokens")):
        return nullcontext()
    facts, asked = call.facts_of(model, checks.KNOWN), [kwargs.get("cache_implementation")]
    for config in (kwargs.get("generation_config"), *args, getattr(model, "generation_config", None)):
        asked.append(getattr(config, "cache_implementation", None))
    is_static = getattr(kv_layers.cache_of(kwargs), "is_compileable", False)
    if facts.compiled or is_static or not all(map(_NEVER_COMPILED.__contains__, asked)):
        return nullcontext()
    return faster_forwards(call, {model: facts.modules.values()}, forwards())


def forwards() -> dict[type[nn.Module], Forward]:
    """The faster forwards by the type of their module."""
    products = linears()
    if products and isinstance(torch.addmm, BuiltinFunctionType):
        products[Conv1D] = partial(multiply, is_transposed=True)  # GPT-2's
    return {NewGELUActivation: new_gelu, **products}


def new_gelu(forward: FasterForward, input: Tensor, call: GenerateCall) -> Tensor | None:
    """The GELU of GPT-2, GPT-J, T5 v1.1 and others, in one pass over the tensor instead of eight.

    In half precision the original rounds after each of its steps, which a table repeats.
    """
    if torch.is_grad_enabled() or type(input) is not Tensor or is_transformed():
        return None
    if input.dtype == torch.float32:
        output = functional.gelu(input, approximate="tanh")
    elif lookup.can_look_up(input):
        output = lookup.look_up(input, _table_of_new_gelu(input.dtype))
    else:
        return None
    call.report.kernels["fused activation"] += 1
    return output


@functools.cache
def _table_of_new_gelu(dtype: torch.dtype) -> Tensor:
    return lookup.table_of(NewGELUActivation(), dtype)
