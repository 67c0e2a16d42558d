"""RMS norm and layer norm as one kernel in captured steps on a CPU.

RMS norm, for models that compute it with six kernels, or eight in bf16 (T5, Llama):

    x ─ (to fp32) ─ pow 2 ─ mean ─ add ε ─ rsqrt ─┐
    └─ (to fp32) ──────────────────────────── mul ┴─ (to bf16) ─ mul weight

`fusion.fused` finds these among the calls of a step; on a GPU, liger.py has the kernel. Only the order of the sum
differs. AMD EPYC (family 25, model 17), 2 threads, 32 rows of 768 in fp32, µs, the six kernels and this one: within a
step of T5-base 123, 9; in a loop 20, 6.

Layer norm is one pass over the rows, with the sum with other rows that comes before it. In half precision the sums are
in fp32 and the output is rounded once, as torch does. In a decode step, torch's kernel meets caches that products have
evicted: BART-base shape, 4 rows, one thread of AMD EPYC (family 25, model 1), it takes 79 µs of a step's time, and 12
µs in a loop.

Tests: tests/ops/test_rms_norm.py, tests/ops/test_layer_norm.py
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastgen.ops import liger, simd
from fastgen.ops.fusion import Fusion, Name, Op, Values
from fastgen.ops.kernel import Kernel, first_supported
from fastgen.ops.tracing import TracedCall

RMS_ELEMENTS_OF_THREAD = 1 << 13
LAYER_ELEMENTS_OF_THREAD = 1 << 14
DEFAULT_EPSILON = 1e-5  # of torch's layer norm

_RMS_ARGUMENTS = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, ctypes.c_float, ctypes.c_int32)
_LAYER_ARGUMENTS = (*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 2, ctypes.c_float, ctypes.c_int32)


def _are_plain(*tensors: Any) -> bool:
    """Whether these are contiguous tensors on a CPU, of no other class, and of one of `simd.DTYPES`."""
    dtype = getattr(tensors[0], "dtype", None)
    if dtype not in simd.DTYPES or any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return False
    is_dense = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)
    return is_dense and all(tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)


def _sizes_of(rows: Tensor, elements_of_thread: int) -> tuple[int, int, int]:
    """Returns the number of rows, their width, and how many threads compute them."""
    width = rows.shape[-1]
    count = rows.numel() // width
    return count, width, min(count, simd.threads_for(rows.numel(), elements_of_thread))


# RMS norm.


def rms_norm_into(output: Tensor, rows: Tensor, weight: Tensor, epsilon: float) -> partial[None]:
    """Returns a call that writes `weight * (rows / sqrt(mean(rows ** 2) + epsilon))` into `output`.

    rows and output `[…, width]`, weight `[width]`, all contiguous and of one of `simd.DTYPES`, on a CPU; the weight may
    move between two replays, but not change.
    """
    function = simd.function("rms_norm", rows.dtype, _RMS_ARGUMENTS)
    count, width, threads = _sizes_of(rows, RMS_ELEMENTS_OF_THREAD)
    addresses = rows.data_ptr(), simd.Address(weight), output.data_ptr()
    return partial(function, *addresses, count, width, epsilon, threads)


_rms_norm = simd.operation("rms_norm(Tensor rows, Tensor weight, float epsilon)", rms_norm_into)


def _rms_norm_in_torch(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = rows.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(rows.dtype)


RMS_KERNELS = (
    Kernel("C++", simd.machine_reasons, _rms_norm, "cpu"),
    Kernel("Liger-Kernel in Triton", liger.unsupported_reasons, liger.rms_norm, "cuda"),
    Kernel("torch", list, _rms_norm_in_torch),
)


def _rms_replacement(values: Values, last: TracedCall) -> TracedCall | None:
    rows = values["rows"]
    weight = values["weight"]
    epsilon = values["epsilon"]
    output = last.outputs[0]
    if values["squares"].dtype != torch.float32 or type(epsilon) is not float:  # the kernel does not round in between
        return None
    if output.dtype == torch.float32 and "narrowed" in values:
        return None
    if not _are_plain(rows, weight, output) or rows.shape != output.shape or weight.shape != rows.shape[-1:]:
        return None
    operation = torch.ops.fastgen.rms_norm.default
    return TracedCall(operation, (rows, weight, epsilon), {}, last.result, [rows, weight], last.outputs)


def _rms_pattern() -> Op:
    aten = torch.ops.aten

    def converted(pattern: Op | Name, name: str = "") -> Op:
        return Op((aten.to.dtype, aten._to_copy.default), (pattern,), is_optional=True, name=name)

    rows = converted(Name("rows"))
    mean = Op((aten.mean.dim,), (Op((aten.pow.Tensor_Scalar,), (rows, 2), name="squares"), [-1], True))
    root = Op((aten.rsqrt.default,), (Op((aten.add.Tensor,), (mean, Name("epsilon"))),))
    scaled = Op((aten.mul.Tensor,), (rows, root), commutes=True)
    return Op((aten.mul.Tensor,), (converted(scaled, "narrowed"), Name("weight")), commutes=True)


def rms_fusions() -> list[Fusion]:
    """Returns how a norm's calls are replaced, with the factors in any order and any tensor as weight."""
    return [] if first_supported(RMS_KERNELS, "cpu") is RMS_KERNELS[-1] else [Fusion(_rms_pattern(), _rms_replacement)]


# Layer norm.


def can_normalize(rows: Tensor, weight: Any, bias: Any) -> bool:
    """Whether `layer_norm` supports rows `[…, width]`, weight and bias `[width]`."""
    if not _are_plain(rows, weight, bias):
        return False
    return bool(rows.numel() > 0 and weight.shape == bias.shape == rows.shape[-1:])


def layer_norm_into(
    output: Tensor, rows: Tensor, weight: Tensor, bias: Tensor, epsilon: float, added: Tensor | None = None
) -> partial[None]:
    """Returns a call that writes the norm of `rows`, or of `rows + added`, into `output`.

    rows, added and output `[…, width]`, weight and bias `[width]`, all contiguous and of one of `simd.DTYPES`, on a
    CPU; weight and bias may move between two replays, but not change.
    """
    function = simd.function("layer_norm", rows.dtype, _LAYER_ARGUMENTS)
    count, width, threads = _sizes_of(rows, LAYER_ELEMENTS_OF_THREAD)
    added_address = None if added is None else added.data_ptr()
    addresses = rows.data_ptr(), added_address, simd.Address(weight), simd.Address(bias), output.data_ptr()
    return partial(function, *addresses, count, width, epsilon, threads)


_layer_norm = simd.operation(
    "layer_norm(Tensor rows, Tensor weight, Tensor bias, float epsilon, Tensor? added=None)", layer_norm_into
)


def _layer_norm_in_torch(rows: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return functional.layer_norm(rows, rows.shape[-1:], weight, bias, epsilon)


LAYER_KERNELS = (Kernel("C++", simd.machine_reasons, _layer_norm, "cpu"), Kernel("torch", list, _layer_norm_in_torch))


def _layer_replacement(values: Values, last: TracedCall) -> TracedCall | None:
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


def layer_fusions() -> list[Fusion]:
    """Returns how a norm of torch is replaced, with the sum before it if nothing else uses the sum."""
    if first_supported(LAYER_KERNELS, "cpu") is LAYER_KERNELS[-1]:
        return []
    in_inference_mode = (torch.ops.aten.layer_norm.default,)  # without an epsilon that is the default
    norms = torch.ops.aten.native_layer_norm.default, *in_inference_mode
    total = Op((torch.ops.aten.add.Tensor,), (Name("rows"), Name("added")))
    parameters = (Name("shape"), Name("weight"), Name("bias"))
    ways = [(norms, (*parameters, Name("epsilon"))), (in_inference_mode, parameters)]
    return [
        Fusion(Op(operations, (rows, *names)), _layer_replacement)
        for operations, names in ways
        for rows in (total, Name("rows"))
    ]
