"""Liger-Kernel's kernels in Triton, one launch each for what models on a GPU compute with several small kernels.

    RMS norm                          6 kernels, or 8 in half precision
    rotary positions                  10, for queries and keys together
    SiLU of a gate times a product    2

They are used if the extra `gpu` is installed. Sums have another order, and in half precision a product and a sum may be
rounded once instead of twice. Not yet run on a GPU.

Tests: tests/optimizer/transformers/test_small_kernels.py
"""

from __future__ import annotations

from contextlib import nullcontext
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

    cosines, sines: `[rows or 1, length, width]`, whose halves are equal. Liger compiles a kernel for each number of
    rows, so it gets one row with the positions of all.
    """
    from liger_kernel.ops import LigerRopeFunction

    rows, width = queries.shape[0], queries.shape[3]
    with torch.cuda.device(queries.device) if queries.is_cuda else nullcontext():  # Liger does not set it
        states = [
            states.transpose(1, 2).reshape(1, -1, *states.shape[1::2]).transpose(1, 2) for states in (queries, keys)
        ]
        angles = [angles.expand(rows, -1, -1).reshape(1, -1, width) for angles in (cosines, sines)]
        turned = LigerRopeFunction.apply(*states, *angles)
    turned_queries, turned_keys = (
        states.transpose(1, 2).unflatten(1, (rows, -1)).squeeze(0).transpose(1, 2) for states in turned
    )
    return turned_queries, turned_keys


def gated(gate: Tensor, product: Tensor) -> Tensor:
    """Returns `silu(gate) * product`, of equal shapes."""
    from liger_kernel.ops import LigerSiLUMulFunction

    output: Tensor = LigerSiLUMulFunction.apply(gate, product)
    return output
