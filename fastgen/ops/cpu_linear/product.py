"""What can be multiplied in other ways than through BLAS, and the ways.

Tests: tests/ops/test_cpu_linear.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops.cpu_linear import few_rows
from fastgen.ops.tracing import is_transformed

# Finding the fastest way and calling it take some 10 microseconds.
MIN_ELEMENTS = 1 << 19

# torch itself multiplies bf16 through oneDNN, where the CPU has instructions for it: that is no other way.
DTYPES = (torch.float32,)

BLAS, ONEDNN, FEW_ROWS = "BLAS", "oneDNN", "few rows"


@functools.cache
def machine_reasons() -> list[str]:
    """Why this machine has no use for it; empty if it has."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return ["this build of torch has no oneDNN"]
    try:
        is_transformed()
    except AttributeError as error:
        return [f"this version of torch does not tell whether products are recorded ({error})"]
    return []


def can_multiply(rows: Any, weight: Any, bias: Any) -> bool:
    """Whether `cpu_linear` takes these: rows `[…, in_features]`, weight `[out_features, in_features]` or its view.

    Asked for each product of a step that is not captured.
    """
    for tensor in (rows, weight) if bias is None else (rows, weight, bias):
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
            return False
        if not tensor.is_cpu or tensor.dtype != rows.dtype or tensor.dtype not in DTYPES:
            return False
    # oneDNN's product has no derivative, no batching rule, no form in TorchScript, and another name. Asked before the
    # sizes, because torch.jit.trace warns of every comparison of them.
    if is_transformed():
        return False
    if weight.dim() != 2 or weight.numel() < MIN_ELEMENTS:
        return False
    fits = rows.dim() > 1 and rows.is_contiguous() and rows.shape[-1] == weight.shape[1] and rows.numel() > 0
    fits = fits and (weight.is_contiguous() or weight.t().is_contiguous())  # oneDNN refuses overlapping strides
    fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))  # it reads no strides
    return fits and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`: rows `[…, in_features]`, weight `[out_features, in_features]`."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


@functools.cache
def ways() -> dict[str, Callable[..., Tensor]]:
    """The ways to multiply rows on this machine, by name; all give `rows @ weight.T + bias`."""
    found = {BLAS: functional.linear, ONEDNN: onednn_linear}
    if not few_rows.machine_reasons():
        found[FEW_ROWS] = few_rows.few_rows_linear
    return found
