"""RMS norm as one kernel on a CPU, for models that compute it with six kernels, or eight in bf16 (T5, Llama).

    x ─ (to fp32) ─ pow 2 ─ mean ─ add ε ─ rsqrt ─┐
    └─ (to fp32) ──────────────────────────── mul ┴─ (to bf16) ─ mul weight

`fused` finds these among the calls of a decode step, if nothing else uses the intermediate results. Only the order of
the sum differs. AMD EPYC (family 25, model 17), 2 threads, 32 rows of 768 in fp32, µs, the six kernels and this one:
within a step of T5-base 123, 9; in a loop 20, 6.

Tests: tests/ops/test_rms_norm.py
"""

from __future__ import annotations

import ctypes
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen.ops import simd
from fastgen.ops.kernel import Kernel, first_supported
from fastgen.ops.tracing import TracedCall, uses_of

OPERATION = "fastgen::rms_norm"

MIN_ELEMENTS_OF_THREAD = 1 << 13

_ARGUMENTS = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, ctypes.c_float, ctypes.c_int32)


def call_into(output: Tensor, rows: Tensor, weight: Tensor, epsilon: float) -> partial[None]:
    """Returns a call that writes `weight * (rows / sqrt(mean(rows ** 2) + epsilon))` into `output`.

    rows and output `[…, width]`, weight `[width]`, all contiguous and of one of `simd.DTYPES`, on a CPU; the weight may
    move between two replays, but not change.
    """
    function = simd.function("rms_norm", rows.dtype, _ARGUMENTS)
    count, width = rows.numel() // rows.shape[-1], rows.shape[-1]
    threads = min(count, simd.threads_for(rows.numel(), MIN_ELEMENTS_OF_THREAD))
    addresses = rows.data_ptr(), simd.Address(weight), output.data_ptr()
    return partial(function, *addresses, count, width, epsilon, threads)


def _rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    output = torch.empty_like(rows)
    call_into(output, rows, weight, epsilon)()
    return output


def _rms_norm_in_torch(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = rows.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(rows.dtype)


KERNELS = (Kernel("C++", simd.machine_reasons, _rms_norm, "cpu"), Kernel("torch", list, _rms_norm_in_torch))

_LIBRARY = torch.library.Library("fastgen", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor rows, Tensor weight, float epsilon) -> Tensor")
_LIBRARY.impl("rms_norm", _rms_norm, "CPU")


def fused(calls: list[TracedCall], output: Any) -> list[TracedCall]:
    """Returns the calls with each norm replaced by one call; output: the return value of the recorded function."""
    if first_supported(KERNELS, "cpu") is KERNELS[-1]:
        return calls
    numbered = [(number, call) for number, call in enumerate(calls) if not call.returns_argument]
    producer_of = {id(tensor): number for number, call in numbered for tensor in call.outputs}
    uses = uses_of(calls, output)
    norms: dict[int, TracedCall] = {}
    replaced: set[int] = set()
    for number, call in enumerate(calls):
        match = _norm_that_ends_with(number, calls, producer_of, uses)
        if match is not None:
            rows, weight, epsilon, parts = match
            operation, arguments = torch.ops.fastgen.rms_norm.default, (rows, weight, epsilon)
            norms[number] = TracedCall(operation, arguments, {}, call.result, [rows, weight], call.outputs)
            replaced |= parts
    return [norms.get(number, call) for number, call in enumerate(calls) if number not in replaced]


def _norm_that_ends_with(
    number: int, calls: list[TracedCall], producer_of: dict[int, int], uses: Counter[int]
) -> tuple[Tensor, Tensor, float, set[int]] | None:
    """Returns rows, weight and epsilon of the norm that ends with this call, and its other calls; None if none does."""

    def producer(tensor: Any, *operations: torch._ops.OpOverload) -> tuple[int, tuple[Any, ...]]:
        """Returns the call of one of these operations that computed a tensor, and its arguments; -1 if none did."""
        place = producer_of.get(id(tensor), -1)
        return (place, calls[place].args) if place >= 0 and calls[place].operation in operations else (-1, (None,) * 4)

    aten, last = torch.ops.aten, calls[number]
    if last.operation is not aten.mul.Tensor or len(last.read) != 2:
        return None
    conversions = () if last.outputs[0].dtype == torch.float32 else (aten.to.dtype, aten._to_copy.default)
    for scaled, weight in (last.read, last.read[::-1]):
        narrowing, (wide, *_) = producer(scaled, *conversions)
        scaling, factors = producer(scaled if narrowing < 0 else wide, aten.mul.Tensor)
        for factor, inverse in (factors[:2], factors[1::-1]) if scaling >= 0 else ():
            root, (radicand, *_) = producer(inverse, aten.rsqrt.default)
            adding, (mean, epsilon, *_) = producer(radicand, aten.add.Tensor)
            averaging, (squares, *dims) = producer(mean, aten.mean.dim)
            squaring, (squared, exponent, *_) = producer(squares, aten.pow.Tensor_Scalar)
            if squaring < 0 or exponent != 2 or dims != [[-1], True] or type(epsilon) is not float:
                continue
            if squared.dtype != torch.float32:  # the model rounds in between, the kernel does not
                continue
            sources = [producer(tensor, *conversions) for tensor in (factor, squared)]
            rows, other = (x if place < 0 else args[0] for x, (place, args) in zip((factor, squared), sources))
            parts = {narrowing, scaling, root, adding, averaging, squaring, *(place for place, _ in sources)} - {-1}
            inside = Counter(id(tensor) for part in (*parts, number) for tensor in calls[part].read)
            is_alone = all(inside[id(tensor)] == uses[id(tensor)] for part in parts for tensor in calls[part].outputs)
            is_written = any(call.writes for call in calls[min(parts) : number])
            if rows is other and is_alone and not is_written and _fit(rows, weight, last.outputs[0]):
                return rows, weight, epsilon, parts
    return None


def _fit(rows: Tensor, weight: Tensor, output: Tensor) -> bool:
    shapes_fit = rows.shape == output.shape and weight.shape == rows.shape[-1:]
    tensors, dtype = (rows, weight, output), output.dtype
    return (
        shapes_fit
        and dtype in simd.DTYPES
        and all(tensor.is_cpu and tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
    )
