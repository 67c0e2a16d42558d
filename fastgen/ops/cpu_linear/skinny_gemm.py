"""Products of a few rows in fp32, bf16 or fp16 that read each weight once, unpacked: `csrc/skinny_gemm.cpp`.

In bf16 and fp16 sums are in fp32 and rounded once. bf16 has dot products of pairs where there is AVX512_BF16
(VDPBF16PS); elsewhere, as in fp16, weights are widened in registers, which halves the bytes that a row waits for.

AMD EPYC (family 25, AVX2), two threads, weights not in a cache, ms, BLAS, oneDNN, oneDNN with a packed weight, these:
1 × [768 → 3072] 0.72, 0.52, 0.52, 0.47; 4 × 1.65, 0.98, 0.60, 0.45; 16 × 1.57, 1.33, 0.96, 0.81; 32 × 1.84, 1.52, 1.29,
1.18; 16 × [768 → 50265] 33, 17, 13, 10. Transposed, as in GPT-2: 2 × [768 → 3072] 0.98, 0.65, 0.45, 0.38; 16 × 1.69,
1.58, 0.97, 0.89; 256 × 11.6, 17.0, 9.3, 13.8. AMD EPYC (model 17, AVX-512), GFLOP/s of BLAS, oneDNN and these:
[768 → 3072] 4 × 17, 35, 67; 16 × 66, 93, 183; 32 × 96, 131, 203; in bf16 54, 55, 136; 159, 161, 344; 196, 203, 367;
[384 → 51865] 40 × 76, 131, 184; in bf16 234, 249, 340. AMD EPYC (family 26, model 2), µs of BLAS and these in fp16:
[1024 → 4096] 1 × 161, 115; 4 × 631, 113; 16 × 2,700, 332; 64 × 9,991, 1,286; 1024 × 156,082, 20,581.

Tests: tests/ops/test_skinny_gemm.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.ops import simd
from fastgen.ops.fusion import Fusion, Name, Op, Values
from fastgen.ops.tracing import TracedCall

# With more rows, a weight is read several times.
MOST_ROWS = 64

# The product registered with torch, which dispatch modes can record.
OPERATION = "fastgen::skinny_linear"

_ARGUMENTS = (*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 3, *[ctypes.c_int32] * 3)


def skinny_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `rows @ weight.T + bias` on at most `torch.get_num_threads()` threads.

    rows `[…, in_features]`, bias `[out_features]`, both contiguous; weight `[out_features, in_features]`, contiguous or
    a transposed view; all of one of `simd.DTYPES`, on a CPU. The bits do not depend on the number of rows or threads.
    """
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.fastgen.skinny_linear(rows, weight, bias)
    output = rows.new_empty((*rows.shape[:-1], weight.shape[0]))
    call_into(output, rows, weight, bias, address_of=Tensor.data_ptr)()
    return output


def _skinny_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None, is_rectified: bool = False
) -> Tensor:
    output = rows.new_empty((*rows.shape[:-1], weight.shape[0]))
    call_into(output, rows, weight, bias, added, is_rectified, Tensor.data_ptr)()
    return output


def call_into(
    output: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: Tensor | None = None,
    is_rectified: bool = False,
    address_of: Callable[[Tensor], Any] = simd.Address,
) -> partial[None]:
    """Returns a call that writes the product into `output`, `[…, out_features]`.

    is_rectified: applies relu to the output. added: a contiguous tensor of the output's shape, added to it at the end.
    address_of: returns the address of weight or bias, which may move between two replays, but not change.
    """
    out_features, in_features = weight.shape
    function = simd.function("skinny_gemm", rows.dtype, _ARGUMENTS)
    parameters = address_of(weight), None if bias is None else address_of(bias)
    others = None if added is None else added.data_ptr()
    outputs = output.data_ptr()
    sizes = rows.numel() // in_features, in_features, out_features
    options = not weight.is_contiguous(), is_rectified, torch.get_num_threads()
    return partial(function, rows.data_ptr(), *parameters, others, outputs, *sizes, *options)


_LIBRARY = torch.library.Library("fastgen", "FRAGMENT")
_LIBRARY.define(
    "skinny_linear(Tensor rows, Tensor weight, Tensor? bias, Tensor? added=None, bool is_rectified=False) -> Tensor"
)
_LIBRARY.impl("skinny_linear", _skinny_linear, "CPU")


def _fake(
    rows: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None, is_rectified: bool = False
) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


torch.library.register_fake(OPERATION, _fake, lib=_LIBRARY)


def _replacement(values: Values, last: TracedCall) -> TracedCall | None:
    """Returns a product with the relu, or the sum with other rows, that follows it."""
    product = values["product"]
    added = values.get("added")
    if added is not None:
        is_tensor = isinstance(added, Tensor) and added.shape == product.shape
        if not (is_tensor and added.dtype == product.dtype and added.is_contiguous()):
            return None
    rows, weight, bias = values["rows"], values["weight"], values["bias"]
    read = [tensor for tensor in (rows, weight, bias, added) if tensor is not None]
    arguments = rows, weight, bias, added, added is None
    return TracedCall(torch.ops.fastgen.skinny_linear.default, arguments, {}, last.result, read, last.outputs)


def fusions() -> list[Fusion]:
    """Returns how products are fused with the relu, or the sum with other rows, that follows them."""
    aten = torch.ops.aten
    inputs = (Name("rows"), Name("weight"), Name("bias"))
    product = Op((torch.ops.fastgen.skinny_linear.default,), inputs, name="product")
    rectified = Op((aten.relu.default,), (product,))
    added = Op((aten.add.Tensor,), (Name("added"), product), commutes=True)
    return [Fusion(rectified, _replacement), Fusion(added, _replacement)]
