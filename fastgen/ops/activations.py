"""Activations on a CPU in one pass on all threads: GELU of fp32 numbers, and any function of 16-bit numbers as a table.

GELU in fp32 is also the end of the product that computes the numbers: `cpu_linear.fusions` makes this of a product and
the GELU after it, with the same bits (`csrc/gelu.h`). The results differ from torch's by rounding: both are within 4e-7
of the exact function, relative to the number.

A function of bf16 or fp16 that torch computes with several kernels rounds after each of them. The table holds exactly
these results for all 65,536 numbers of the dtype. It takes 128 KiB, and the activations of a layer use a few KiB of it.
AMD EPYC (family 25, model 17), 2 threads, NewGELUActivation, the library's eight kernels and the table: 2048 × 3072
numbers 32.4 and 3.4 ms, 16 × 3072 numbers 132 and 28 µs. Without the C++ kernel, torch reads the table in 0.23 of the
time of the eight.

Tests: tests/ops/test_gelu.py, tests/ops/test_lookup.py
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fastgen.ops import simd
from fastgen.ops.kernel import Kernel

# What a kernel may do with its results at the end, in the order of `Activation` in csrc/gelu.h.
RELU, GELU, GELU_TANH = "relu", "gelu", "gelu_tanh"
ACTIVATIONS = ("", RELU, GELU, GELU_TANH)

DTYPES = (torch.bfloat16, torch.float16)  # of numbers that a table is for

GELU_ELEMENTS_OF_THREAD = 1 << 14
LOOKUP_ELEMENTS_OF_THREAD = 1 << 16

_GELU_ARGUMENTS = (*[ctypes.c_void_p] * 2, ctypes.c_int64, *[ctypes.c_int32] * 2)
_LOOKUP_ARGUMENTS = (*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int32)


# GELU.


def can_compute(numbers: Tensor) -> bool:
    """Whether `gelu` supports this tensor: fp32, contiguous, on a CPU."""
    is_plain = numbers.layout == torch.strided and not numbers.is_nested and numbers.numel() > 0
    return bool(is_plain and numbers.dtype == torch.float32 and numbers.is_cpu and numbers.is_contiguous())


def gelu_into(results: Tensor, numbers: Tensor, activation: str) -> partial[None]:
    """Returns a call that writes GELU or GELU_TANH of the numbers into `results`, which may be the same tensor."""
    function = simd.function("gelu", torch.float32, _GELU_ARGUMENTS)
    threads = simd.threads_for(numbers.numel(), GELU_ELEMENTS_OF_THREAD)
    addresses = numbers.data_ptr(), results.data_ptr()
    return partial(function, *addresses, numbers.numel(), ACTIVATIONS.index(activation), threads)


def gelu(numbers: Tensor, activation: str) -> Tensor:
    """Returns GELU or GELU_TANH of numbers for which `can_compute` is true."""
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.fastgen.gelu(numbers, activation)
    return _gelu(numbers, activation)


_gelu = simd.operation("gelu(Tensor numbers, str activation)", gelu_into)


def _gelu_in_torch(numbers: Tensor, activation: str) -> Tensor:
    return functional.gelu(numbers, approximate="tanh" if activation == GELU_TANH else "none")


_GELU = functools.partial(Kernel, task="NewGELUActivation in large models, in fp32", counted_as=("fused activation",))
GELU_KERNELS = (_GELU("C++", simd.machine_reasons, gelu, "cpu", can_compute), _GELU("torch", list, _gelu_in_torch))


# Tables.


def table_of(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the results `[65536]` for all numbers of one of `DTYPES`, in the order of their bits as unsigned ints."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        return function(torch.arange(1 << 16, device="cpu").to(torch.int16).view(dtype)).contiguous()


def can_look_up(numbers: Tensor) -> bool:
    """Whether a table can be applied to this tensor: contiguous, of one of `DTYPES`, on a CPU."""
    return numbers.dtype in DTYPES and numbers.is_cpu and numbers.is_contiguous()


def lookup_into(results: Tensor, numbers: Tensor, table: Tensor) -> partial[None]:
    """Returns a call that writes `table[numbers]` into `results`; both are contiguous and of one shape."""
    function = simd.function("lookup", torch.float32, _LOOKUP_ARGUMENTS)  # for any type of 16 bits
    threads = simd.threads_for(numbers.numel(), LOOKUP_ELEMENTS_OF_THREAD)
    addresses = numbers.data_ptr(), table.data_ptr(), results.data_ptr()
    return partial(function, *addresses, numbers.numel(), threads)


_lookup = simd.operation("lookup(Tensor numbers, Tensor table)", lookup_into)


def _look_up_in_torch(numbers: Tensor, table: Tensor) -> Tensor:
    indices = numbers.view(torch.int16).flatten().int().bitwise_and_(0xFFFF)
    return table.index_select(0, indices).view(numbers.shape)


_TABLE = functools.partial(Kernel, task="NewGELUActivation in large models", counted_as=("fused activation",))
LOOKUP_KERNELS = (
    _TABLE("C++", simd.machine_reasons, torch.ops.fastgen.lookup.default, "cpu"),
    _TABLE("torch", list, _look_up_in_torch),
)
