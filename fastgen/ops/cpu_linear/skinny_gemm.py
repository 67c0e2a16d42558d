"""Products of a few rows in fp32 or bf16 that read each weight once, as it lies in memory: `csrc/skinny_gemm.cpp`.

In bf16 sums are in fp32 and rounded once: with AVX512_BF16 by its dot products of pairs (VDPBF16PS), elsewhere weights
are widened in registers, which halves the bytes that a row waits for.

AMD EPYC (family 25, AVX2), two threads, weights not in a cache, ms, BLAS, oneDNN, oneDNN with a packed weight, these:
1 × [768 → 3072] 0.72, 0.52, 0.52, 0.47; 4 × 1.65, 0.98, 0.60, 0.45; 16 × 1.57, 1.33, 0.96, 0.81; 32 × 1.84, 1.52, 1.29,
1.18; 16 × [768 → 50265] 33, 17, 13, 10. As GPT-2 keeps it: 2 × [768 → 3072] 0.98, 0.65, 0.45, 0.38; 16 × 1.69, 1.58,
0.97, 0.89; 256 × 11.6, 17.0, 9.3, 13.8. Another one (model 17, AVX-512), GFLOP/s of BLAS, oneDNN and these: of
[768 → 3072] 4 × 17, 35, 67; 16 × 66, 93, 183; 32 × 96, 131, 203; in bf16 54, 55, 136; 159, 161, 344; 196, 203, 367; of
[384 → 51865] 40 × 76, 131, 184; in bf16 234, 249, 340.

Tests: tests/ops/test_skinny_gemm.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from fastgen.ops import x86

# Of more rows a weight is read several times.
MOST_ROWS = 64

# The same as an operation of torch, for those who note what is called.
OPERATION = "fastgen::skinny_linear"

_ARGUMENTS = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, *[ctypes.c_int32] * 2)


def skinny_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`, on at most `torch.get_num_threads()` threads.

    rows `[…, in_features]`, bias `[out_features]`, both contiguous; weight `[out_features, in_features]`, contiguous or
    a transposed view; all of one of `x86.DTYPES`, on a CPU. The bits do not depend on the number of rows or threads.
    """
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.fastgen.skinny_linear(rows, weight, bias)
    return _skinny_linear(rows, weight, bias)


def _skinny_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = rows.new_empty((*rows.shape[:-1], weight.shape[0]))
    call_into(output, rows, weight, bias)()
    return output


def call_into(output: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], None]:
    """A function that computes the output, `[…, out_features]`, where it is; weight and bias may move, not change."""
    out_features, in_features = weight.shape
    function = x86.function("skinny_gemm", rows.dtype, _ARGUMENTS)
    inputs, outputs = rows.data_ptr(), output.data_ptr()
    sizes = rows.numel() // in_features, in_features, out_features, not weight.is_contiguous(), torch.get_num_threads()

    def call() -> None:
        function(inputs, weight.data_ptr(), None if bias is None else bias.data_ptr(), outputs, *sizes)

    return call


_LIBRARY = torch.library.Library("fastgen", "FRAGMENT")
_LIBRARY.define("skinny_linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("skinny_linear", _skinny_linear, "CPU")


@torch.library.register_fake(OPERATION, lib=_LIBRARY)
def _fake(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))
