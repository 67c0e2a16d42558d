"""GELU of fp32 numbers on a CPU: one pass on all threads, or the end of the product that computes the numbers.

Both forms are of the same bits (`csrc/gelu.h`): `cpu_linear.fusions` makes the second of a product and the GELU after
it. The results differ from torch's by rounding: both are within 4e-7 of the exact function, relative to the number.
In half precision GELU is left to torch, or to a table (lookup.py).

Tests: tests/ops/test_gelu.py
"""

from __future__ import annotations

import ctypes
import functools
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops import simd
from fastgen.ops.kernel import Kernel

# What a kernel may do with its results at the end, in the order of `Activation` in csrc/gelu.h.
RELU, GELU, GELU_TANH = "relu", "gelu", "gelu_tanh"
ACTIVATIONS = ("", RELU, GELU, GELU_TANH)

MIN_ELEMENTS_OF_THREAD = 1 << 14

_ARGUMENTS = (*[ctypes.c_void_p] * 2, ctypes.c_int64, *[ctypes.c_int32] * 2)


def can_compute(numbers: Tensor) -> bool:
    """Whether `gelu` supports this tensor: fp32, contiguous, on a CPU."""
    is_plain = numbers.layout == torch.strided and not numbers.is_nested and numbers.numel() > 0
    return bool(is_plain and numbers.dtype == torch.float32 and numbers.is_cpu and numbers.is_contiguous())


def call_into(results: Tensor, numbers: Tensor, activation: str) -> partial[None]:
    """Returns a call that writes GELU or GELU_TANH of the numbers into `results`, which may be the same tensor."""
    function = simd.function("gelu", torch.float32, _ARGUMENTS)
    threads = simd.threads_for(numbers.numel(), MIN_ELEMENTS_OF_THREAD)
    addresses = numbers.data_ptr(), results.data_ptr()
    return partial(function, *addresses, numbers.numel(), ACTIVATIONS.index(activation), threads)


def gelu(numbers: Tensor, activation: str) -> Tensor:
    """Returns GELU or GELU_TANH of numbers for which `can_compute` is true."""
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.fastgen.gelu(numbers, activation)
    return _gelu(numbers, activation)


_gelu = simd.operation("gelu(Tensor numbers, str activation)", call_into)


def _gelu_in_torch(numbers: Tensor, activation: str) -> Tensor:
    return functional.gelu(numbers, approximate="tanh" if activation == GELU_TANH else "none")


_kernel = functools.partial(Kernel, task="NewGELUActivation in large models, in fp32", counted_as=("fused activation",))
KERNELS = (_kernel("C++", simd.machine_reasons, gelu, "cpu", can_compute), _kernel("torch", list, _gelu_in_torch))
