"""Layer norm on a CPU as one pass over the rows on all threads, with the sum with other rows that comes before it.

In half precision the sums are in fp32 and the output is rounded once, as torch does. In a decode step, torch's kernel
meets caches that products have evicted: BART-base shape, 4 rows, one thread of AMD EPYC (family 25, model 1), it takes
79 µs of a step's time, and 12 µs in a loop.

Tests: tests/ops/test_layer_norm.py
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops import simd
from fastgen.ops.fusion import Fusion, Name, Op, Values
from fastgen.ops.kernel import Kernel
from fastgen.ops.tracing import TracedCall

OPERATION = "fastgen::layer_norm"

MIN_ELEMENTS_OF_THREAD = 1 << 14

_ARGUMENTS = (*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 2, ctypes.c_float, ctypes.c_int32)


def can_normalize(rows: Any, weight: Any, bias: Any) -> bool:
    """Whether `layer_norm` supports rows `[…, width]`, weight and bias `[width]`."""
    for tensor in (rows, weight, bias):
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
            return False
        if not tensor.is_cpu or tensor.dtype != rows.dtype or not tensor.is_contiguous():
            return False
    sizes = rows.shape[-1:]
    return rows.dtype in simd.DTYPES and rows.numel() > 0 and weight.shape == sizes and bias.shape == sizes


def call_into(
    output: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    added: Tensor | None = None,
    address_of: Callable[[Tensor], Any] = simd.Address,
) -> partial[None]:
    """Returns a call that writes the norm of `rows`, or of `rows + added`, into `output`.

    rows, added and output `[…, width]`, weight and bias `[width]`, all contiguous and of one of `simd.DTYPES`, on a
    CPU; weight and bias may move between two replays, but not change (address_of).
    """
    function = simd.function("layer_norm", rows.dtype, _ARGUMENTS)
    width = rows.shape[-1]
    count = rows.numel() // width
    threads = min(count, simd.threads_for(rows.numel(), MIN_ELEMENTS_OF_THREAD))
    others = None if added is None else added.data_ptr()
    addresses = rows.data_ptr(), others, address_of(weight), address_of(bias), output.data_ptr()
    return partial(function, *addresses, count, width, epsilon, threads)


def layer_norm(rows: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Returns the norm of rows for which `can_normalize` is true."""
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.fastgen.layer_norm(rows, weight, bias, epsilon)
    return _layer_norm(rows, weight, bias, epsilon)


def _layer_norm(rows: Tensor, weight: Tensor, bias: Tensor, epsilon: float, added: Tensor | None = None) -> Tensor:
    output = torch.empty_like(rows)
    call_into(output, rows, weight, bias, epsilon, added, Tensor.data_ptr)()
    return output


def _layer_norm_in_torch(rows: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return functional.layer_norm(rows, rows.shape[-1:], weight, bias, epsilon)


_kernel = functools.partial(Kernel, task="layer norms of large models", counted_as=("layer norm",))
KERNELS = (
    _kernel("C++", simd.machine_reasons, layer_norm, "cpu", can_normalize),
    _kernel("torch", list, _layer_norm_in_torch),
)

_LIBRARY = torch.library.Library("fastgen", "FRAGMENT")
_LIBRARY.define("layer_norm(Tensor rows, Tensor weight, Tensor bias, float epsilon, Tensor? added=None) -> Tensor")
_LIBRARY.impl("layer_norm", _layer_norm, "CPU")


def _replacement(values: Values, last: TracedCall) -> TracedCall | None:
    """Returns a norm with the sum before it."""
    rows, added = values["rows"], values["added"]
    output = last.outputs[0]
    for tensor in (rows, added):
        if not isinstance(tensor, Tensor) or tensor.dtype != output.dtype or not tensor.is_contiguous():
            return None
        if tensor.shape != output.shape:
            return None
    weight, bias = values["weight"], values["bias"]
    arguments = rows, weight, bias, values["epsilon"], added
    return TracedCall(last.operation, arguments, {}, last.result, [rows, weight, bias, added], last.outputs)


def fusions() -> list[Fusion]:
    """Returns how a norm is fused with the sum before it, if nothing else uses the sum."""
    total = Op((torch.ops.aten.add.Tensor,), (Name("rows"), Name("added")))
    operation = torch.ops.fastgen.layer_norm.default
    pattern = Op((operation,), (total, Name("weight"), Name("bias"), Name("epsilon")))
    return [Fusion(pattern, _replacement)]
