"""Liger-Kernel's kernels in Triton, one launch each for what models on a GPU compute with several small kernels.

    RMS norm                          6 kernels, or 8 in half precision
    rotary positions                  10, for queries and keys together
    SiLU of a gate times a product    2

They are used if the extra `gpu` is installed. Sums have another order, and in half precision a product and a sum may be
rounded once instead of twice. Not yet run on a GPU.

Tests: tests/optimizer/transformers/test_small_kernels.py
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from fastgen.ops.kernel import triton_reasons

# How RMS norms differ, for `rms_norm`: the offset of the weight, and where Liger rounds.
NORMS = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"))

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def unsupported_reasons() -> list[str]:
    """Returns why these kernels cannot be used; empty if they can."""
    return triton_reasons() or ([] if find_spec("liger_kernel") else ["liger-kernel is not installed"])


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0, rounds: str = "llama") -> Tensor:
    """Returns `(offset + weight) * rows / sqrt(mean(rows ** 2) + epsilon)`; rows `[…, width]`, weight `[width]`.

    rounds: "llama": to the dtype before the product with the weight; "gemma": after it.
    """
    from liger_kernel.ops import LigerRMSNormFunction

    output: Tensor = LigerRMSNormFunction.apply(rows, weight, epsilon, offset, rounds)
    return output


def rotated(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries and keys `[rows, heads, length, width]` turned by their positions, as Llama's are; may overwrite.

    cosines, sines: `[rows or 1, length, width]`, whose halves are equal.
    """
    from liger_kernel.ops import LigerRopeFunction

    output: tuple[Tensor, Tensor] = LigerRopeFunction.apply(queries, keys, cosines, sines)
    return output


def gated(gate: Tensor, product: Tensor) -> Tensor:
    """Returns `silu(gate) * product`, of equal shapes."""
    from liger_kernel.ops import LigerSiLUMulFunction

    output: Tensor = LigerSiLUMulFunction.apply(gate, product)
    return output
