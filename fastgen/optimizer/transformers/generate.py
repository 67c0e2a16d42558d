"""`GenerationMixin.generate`: one call, its report, and faster forwards on the modules of large models.

Tests: tests/optimizer/transformers/test_generate_models.py, tests/optimizer/transformers/test_generate_options.py,
tests/optimizer/transformers/test_returned_cache.py, tests/optimizer/decoding/test_faster_forwards.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from fastgen.ops.tracing import is_transformed, is_watched
from fastgen.optimizer.decoding.call import GenerateCall, generate_call
from fastgen.optimizer.decoding.faster_forwards import (
    Call,
    Forward,
    ModuleForward,
    faster_forwards,
    linears,
    multiply,
)
from fastgen.optimizer.decoding.model_facts import size_of
from fastgen.optimizer.decoding.reasons import KV_CACHE, PREFILL, Reason
from fastgen.optimizer.transformers import checks, verification
from fastgen.patching import disabled


def generate(original: Callable, self: checks.HostModel, *args: Any, **kwargs: Any) -> Any:
    with generate_call(type(self).__name__) as call:
        if reasons := verification.refused_reasons(self):
            call.report.add_reasons(PREFILL, reasons)
            with disabled():
                return original(self, *args, **kwargs)
        call.user_cache = kwargs.get("past_key_values") is not None
        call.user_code = not checks.is_known_class(self)
        call.to_verify = verification.call_to_verify(original, self, args, kwargs)
        if any(callable(value) for value in (kwargs.get("custom_generate"), *args[8:])):
            call.user_code, call.share = True, False
            text = "custom_generate may read the cache: plain layers, keys and values stored for each row"
            call.report.add_reasons(KV_CACHE, [Reason("CUSTOM_GENERATE", text)])
        try:
            with _faster_forwards(self, args, kwargs, call):
                result = original(self, *args, **kwargs)
        finally:
            call.to_verify = None  # it holds the model and all arguments
        if call.staged_seconds:
            call.end_stage("decoder")
        if not call.rows:
            call.report.add_reasons(PREFILL, [Reason("NO_PREFILL", "this decoding method does not call _prefill")])
    return result


def _faster_forwards(
    model: checks.HostModel, args: tuple, kwargs: dict[str, Any], call: GenerateCall
) -> AbstractContextManager[None]:
    """Products and activations inside this call, of models so large that it pays to look at all their modules."""
    if not call.costs.should_swap_forwards(size_of(model)):
        return nullcontext()
    if checks.compiled_reasons(call, model) or checks.compiling_reasons(model, args, kwargs):
        return nullcontext()
    modules = checks.facts_of(call, model).modules.values()
    return faster_forwards({model: modules}, forwards(), call.report.usages)


def forwards() -> dict[type[nn.Module], Forward]:
    """The forwards by the type of their module."""
    products = linears()
    if products and isinstance(torch.addmm, BuiltinFunctionType):
        products[Conv1D] = conv1d
    return {NewGELUActivation: new_gelu, **products}


def conv1d(forward: ModuleForward, rows: Tensor, call: Call) -> Tensor | None:
    """Of GPT-2's `Conv1D`, a linear layer whose weight is `[in_features, out_features]`."""
    return multiply(forward, rows, forward.module.weight.t(), forward.module.bias, call)


def new_gelu(forward: ModuleForward, input: Tensor, call: Call) -> Tensor | None:
    """Of GPT-2, GPT-J, T5 v1.1 and others: one pass over the tensor instead of eight.

    In half precision the original rounds after each of its steps, which this does not repeat.
    """
    if torch.is_grad_enabled() or type(input) is not Tensor or input.dtype != torch.float32:
        return None
    if is_transformed() or is_watched():
        return None
    call.usage["fused activation"] += 1
    return functional.gelu(input, approximate="tanh")
