"""Elementwise functions of bf16 or fp16 as a table of their results for all 65,536 numbers of the dtype.

A function that torch computes with several kernels rounds after each of them. The table holds exactly these results,
and applies them in one pass. It takes 128 KiB, and the activations of a layer use a few KiB of it. AMD EPYC (family 25,
model 17), 2 threads, NewGELUActivation, the library's eight kernels and the table: 2048 × 3072 numbers 32.4 and 3.4 ms,
16 × 3072 numbers 132 and 28 µs. Without the C++ kernel, torch reads the table in 0.23 of the time of the eight.

Tests: tests/ops/test_lookup.py
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastgen.ops import simd
from fastgen.ops.kernel import Kernel, first_supported

DTYPES = (torch.bfloat16, torch.float16)

MIN_ELEMENTS_OF_THREAD = 1 << 16

_ARGUMENTS = (*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int32)


def table_of(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the results `[65536]` for all numbers of one of `DTYPES`, in the order of their bits as unsigned ints."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        return function(torch.arange(1 << 16, device="cpu").to(torch.int16).view(dtype)).contiguous()


def can_look_up(numbers: Tensor) -> bool:
    """Whether `look_up` supports this tensor: contiguous, of one of `DTYPES`, on a CPU."""
    return numbers.dtype in DTYPES and numbers.is_cpu and numbers.is_contiguous()


def look_up(numbers: Tensor, table: Tensor) -> Tensor:
    """Returns `table[numbers]`, see `table_of` and `can_look_up`."""
    return first_supported(KERNELS, "cpu").run(numbers, table)


def call_into(results: Tensor, numbers: Tensor, table: Tensor) -> functools.partial[None]:
    """Returns a call that writes `table[numbers]` into `results`; both are contiguous and of one shape."""
    function = simd.function("lookup", torch.float32, _ARGUMENTS)  # for any type of 16 bits
    threads = simd.threads_for(numbers.numel(), MIN_ELEMENTS_OF_THREAD)
    addresses = numbers.data_ptr(), table.data_ptr(), results.data_ptr()
    return functools.partial(function, *addresses, numbers.numel(), threads)


_lookup = simd.operation("lookup(Tensor numbers, Tensor table)", call_into)


def _look_up_in_torch(numbers: Tensor, table: Tensor) -> Tensor:
    indices = numbers.view(torch.int16).flatten().int().bitwise_and_(0xFFFF)
    return table.index_select(0, indices).view(numbers.shape)


_kernel = functools.partial(Kernel, task="NewGELUActivation in large models", counted_as=("fused activation",))
KERNELS = (
    _kernel("C++", simd.machine_reasons, torch.ops.fastgen.lookup.default, "cpu"),
    _kernel("torch", list, _look_up_in_torch),
)
