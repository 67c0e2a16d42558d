"""Modules of transformers that have faster forwards inside `generate`.

Tests: tests/optimizer/decoding/test_faster_forwards.py
"""

from __future__ import annotations

from types import BuiltinFunctionType

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from fastgen.ops.transforms import is_transformed, is_watched
from fastgen.optimizer.decoding.faster_forwards import Call, Forward, ModuleForward, linears, multiply


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
