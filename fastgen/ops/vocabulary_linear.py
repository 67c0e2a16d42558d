"""The projection of few rows to a large vocabulary on a CPU, through oneDNN instead of BLAS.

`torch.nn.functional.linear` goes through MKL, which on AMD processors takes 1.3 to 2 times as long as oneDNN for these
shapes (one thread, `[16, 768] x [768, 50265]`: 37 and 23 ms; `[64, 768]`: 106 and 56 ms). In beam search with a small
model this one product is a third of a decoding step.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

MIN_WEIGHT_ELEMENTS = 1 << 23
MAX_ROWS = 256


def unsupported_reasons(weight: Tensor) -> list[str]:
    """Why products with this weight `[out_features, in_features]` are left to torch; empty if they are not."""
    reasons = []
    if weight.device.type != "cpu":
        reasons.append(f"device {weight.device.type} (supported: cpu)")
    if weight.dtype != torch.float32:
        reasons.append(f"dtype {weight.dtype} (supported: torch.float32)")
    if weight.dim() != 2 or weight.numel() < MIN_WEIGHT_ELEMENTS:
        reasons.append(f"weight of {weight.numel()} elements (gains from {MIN_WEIGHT_ELEMENTS})")
    return reasons or machine_reasons()


@functools.cache
def machine_reasons() -> list[str]:
    """Why this machine has no use for it."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return ["this build of torch has no oneDNN"]
    if not torch.backends.mkl.is_available():
        return ["this build of torch has no MKL, with which it was compared"]
    vendor = _cpu_vendor()
    return [] if vendor == "AuthenticAMD" else [f"CPU {vendor or 'unknown'} (measured: AuthenticAMD)"]


def can_multiply(rows: Tensor, weight: Tensor) -> bool:
    """Whether these rows `[…, in_features]` can be given to `vocabulary_linear`."""
    fits = rows.dtype == weight.dtype and rows.is_contiguous() and 0 < rows.numel() <= MAX_ROWS * weight.shape[1]
    return fits and type(rows) is Tensor and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def vocabulary_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`: rows `[…, in_features]`, weight `[out_features, in_features]`, all fp32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def _cpu_vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
