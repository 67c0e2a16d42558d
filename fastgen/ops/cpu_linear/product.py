"""What oneDNN can multiply as BLAS does, and the product."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.ops.transforms import is_transformed

# oneDNN takes some 10 microseconds to be called; a single row gains with a very large weight only.
MIN_ELEMENTS = 1 << 19
MIN_ELEMENTS_OF_ONE_ROW = 1 << 23


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
    elements = weight.numel()
    if weight.dim() != 2 or elements < MIN_ELEMENTS:
        return False
    if elements < MIN_ELEMENTS_OF_ONE_ROW and rows.numel() < 2 * weight.shape[1]:
        return False
    fits = rows.dim() > 1 and rows.is_contiguous() and rows.shape[-1] == weight.shape[1] and rows.numel() > 0
    fits = fits and (weight.is_contiguous() or weight.t().is_contiguous())  # oneDNN refuses overlapping strides
    fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))  # it reads no strides
    return fits and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def _is_plain(tensor: object, dtype: torch.dtype) -> bool:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    return tensor.is_cpu and tensor.dtype == dtype and dtype in dtypes()


def cpu_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`: rows `[…, in_features]`, weight `[out_features, in_features]`, which may be packed."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
