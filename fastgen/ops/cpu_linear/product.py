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
from fastgen.ops.transforms import is_transformed

# Finding the fastest way and calling it take some 10 microseconds.
MIN_ELEMENTS = 1 << 19

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


@functools.cache
def dtypes() -> tuple[torch.dtype, ...]:
    """What oneDNN multiplies on this machine: bf16 where the CPU has instructions for it."""
    bf16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return (torch.float32, torch.bfloat16) if bf16 is not None and bf16() else (torch.float32,)


def can_multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `cpu_linear` takes these: rows `[…, in_features]`, weight `[out_features, in_features]` or its view."""
    if not all(_is_plain(tensor, rows.dtype) for tensor in (rows, weight) + (() if bias is None else (bias,))):
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


def _is_plain(tensor: Any, dtype: torch.dtype) -> bool:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    return tensor.is_cpu and tensor.dtype == dtype and dtype in dtypes()


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`: rows `[…, in_features]`, weight `[out_features, in_features]`."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


@functools.cache
def ways(dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """The ways to multiply rows of this type on this machine, by name; all give `rows @ weight.T + bias`."""
    found = {BLAS: functional.linear, ONEDNN: onednn_linear}
    if dtype == torch.float32 and not few_rows.machine_reasons():
        found[FEW_ROWS] = few_rows.few_rows_linear
    return found
