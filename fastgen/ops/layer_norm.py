"""Layer norm in captured steps on a CPU: one pass over the rows, with the sum with other rows that comes before it.

In half precision the sums are in fp32 and the output is rounded once, as torch does. In a decode step, torch's kernel
meets caches that products have evicted: BART-base shape, 4 rows, one thread of AMD EPYC (family 25, model 1), it takes
79 µs of a step's time, and 12 µs in a loop.

Tests: tests/ops/test_layer_norm.py
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops import simd
from fastgen.ops.fusion import Fusion, Name, Op, Values
from fastgen.ops.kernel import Kernel, first_supported
from fastgen.ops.tracing import TracedCall

MIN_ELEMENTS_OF_THREAD = 1 << 14
DEFAULT_EPSILON = 1e-5  # of torch

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
) -> partial[None]:
    """Returns a call that writes the norm of `rows`, or of `rows + added`, into `output`.

    rows, added and output `[…, width]`, weight and bias `[width]`, all contiguous and of one of `simd.DTYPES`, on a
    CPU; weight and bias may move between two replays, but not change.
    """
    function = simd.function("layer_norm", rows.dtype, _ARGUMENTS)
    width = rows.shape[-1]
    count = rows.numel() // width
    threads = min(count, simd.threads_for(rows.numel(), MIN_ELEMENTS_OF_THREAD))
    added_address = None if added is None else added.data_ptr()
    addresses = rows.data_ptr(), added_address, simd.Address(weight), simd.Address(bias), output.data_ptr()
    return partial(function, *addresses, count, width, epsilon, threads)


_layer_norm = simd.operation(
    "layer_norm(Tensor rows, Tensor weight, Tensor bias, float epsilon, Tensor? added=None)", call_into
)


def _layer_norm_in_torch(rows: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return functional.layer_norm(rows, rows.shape[-1:], weight, bias, epsilon)


KERNELS = (Kernel("C++", simd.machine_reasons, _layer_norm, "cpu"), Kernel("torch", list, _layer_norm_in_torch))


def _replacement(values: Values, last: TracedCall) -> TracedCall | None:
    """Returns the kernel in place of torch's norm, with the sum before it if there is one."""
    output = last.outputs[0]
    rows, weight, bias, added = values["rows"], values["weight"], values["bias"], values.get("added")
    if not can_normalize(rows, weight, bias) or tuple(values["shape"]) != weight.shape or rows.shape != output.shape:
        return None
    if added is not None:
        is_like_rows = isinstance(added, Tensor) and added.dtype == rows.dtype and added.shape == rows.shape
        if not is_like_rows or not added.is_contiguous():
            return None
    arguments = rows, weight, bias, values.get("epsilon", DEFAULT_EPSILON), added
    read = [tensor for tensor in (rows, weight, bias, added) if tensor is not None]
    return TracedCall(torch.ops.fastgen.layer_norm.default, arguments, {}, output, read, [output])


def fusions() -> list[Fusion]:
    """Returns how a norm of torch is replaced, with the sum before it if nothing else uses the sum."""
    if first_supported(KERNELS, "cpu") is KERNELS[-1]:
        return []
    in_inference_mode = (torch.ops.aten.layer_norm.default,)  # without an epsilon that is the default
    norms = torch.ops.aten.native_layer_norm.default, *in_inference_mode
    total = Op((torch.ops.aten.add.Tensor,), (Name("rows"), Name("added")))
    parameters = (Name("shape"), Name("weight"), Name("bias"))
    ways = [(norms, (*parameters, Name("epsilon"))), (in_inference_mode, parameters)]
    return [
        Fusion(Op(operations, (rows, *names)), _replacement)
        for operations, names in ways
        for rows in (total, Name("rows"))
    ]
