"""The C++ kernels of `csrc/` that compute in registers, built together for each instruction set.

They are in `csrc/skinny_gemm.cpp`, `few_queries.cpp`, `flash_attention.cpp`, `layer_norm.cpp`, `rms_norm.cpp`,
`gelu.cpp`, `lookup.cpp`, `beam_top_k.cpp` and `move_rows.cpp`.

Builds for aarch64 were tested in an emulator, never timed.

Tests: tests/ops/test_simd_builds.py, tests/ops/test_skinny_gemm.py, tests/ops/test_attention_kernels.py,
tests/ops/test_layer_norm.py, tests/ops/test_rms_norm.py, tests/ops/test_gelu.py, tests/ops/test_lookup.py,
tests/ops/test_beam_top_k.py, tests/ops/test_move_rows.py
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.ops import load, load_reasons

# The library built for each instruction set; BF16: with its dot products of bf16, too.
_LIBRARIES = {
    "AVX2": "_x86_avx2",
    "AVX512": "_x86_avx512",
    "AVX512_BF16": "_x86_avx512_bf16",
    "NEON": "_aarch64_neon",
    "NEON_BF16": "_aarch64_neon_bf16",
}
VERSION = 8  # changes with the kernels, and invalidates measurements of earlier ones
_SUFFIXES = {torch.float32: "", torch.bfloat16: "_bf16", torch.float16: "_fp16"}  # of function names
DTYPES = tuple(_SUFFIXES)
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_AT_HWCAP2, _HWCAP2_BF16 = 26, 1 << 14  # of Linux on aarch64


@functools.cache
def machine_reasons() -> list[str]:
    """Returns why this machine cannot run these kernels; empty if it can."""
    if instructions() not in _LIBRARIES:
        return [f"the CPU's instructions are {instructions()} (supported: {', '.join(_LIBRARIES)})"]
    return load_reasons(_library_name())


def instructions() -> str:
    """Returns the name of the instruction set whose build is used; any other name if there is no build for this CPU."""
    if platform.machine() == "aarch64":
        return "NEON_BF16" if _hardware_capabilities() & _HWCAP2_BF16 else "NEON"
    capability = str(torch.backends.cpu.get_cpu_capability())
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()  # torch before 2.6 does not tell
    return "AVX512_BF16" if capability == "AVX512" and has_bf16 else capability


def _hardware_capabilities() -> int:
    """Returns the second word of bits in which Linux tells what the CPU has."""
    read = ctypes.CDLL(None).getauxval
    read.argtypes = (ctypes.c_ulong,)
    read.restype = ctypes.c_ulong
    return int(read(_AT_HWCAP2))


def _library_name() -> str:
    return f"{__package__}.{_LIBRARIES[instructions()]}"


@functools.cache
def function(name: str, dtype: torch.dtype, argument_types: tuple[Any, ...]) -> Callable[..., None]:
    """Returns the kernel `fastgen_NAME` for one of `DTYPES`."""
    library = load(_library_name())
    library.fastgen_threads.argtypes = [ctypes.c_void_p] * 3
    library.fastgen_threads(*_openmp())
    kernel = getattr(library, f"fastgen_{name}{_SUFFIXES[dtype]}")
    kernel.argtypes = argument_types
    kernel.restype = None
    return cast(Callable[..., None], kernel)


class Address(ctypes.c_void_p):
    """The address of a tensor that may move between two calls of a kernel, see `cpu_graph`."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.data_ptr())
        self.tensor = tensor


CallInto = Callable[..., partial[None]]

_LIBRARY = torch.library.Library("fastgen", "FRAGMENT")
CALLS_INTO: dict[str, CallInto] = {}  # by the name of an operation, such as "fastgen::gelu"


def operation(
    schema: str, call_into: CallInto, output_of: Callable[..., Tensor] = lambda first, *rest: torch.empty_like(first)
) -> Callable[..., Tensor]:
    """Registers an operation of torch, which dispatch modes can record, for kernels on a CPU; returns its function.

    schema: the name and the arguments. call_into: returns a call that writes the result into a tensor; takes this
    tensor, then the arguments. output_of: returns such a tensor for the arguments; by default like the first one.
    """
    name, _, _ = schema.partition("(")

    def run(*args: Any) -> Tensor:
        output = output_of(*args)
        call_into(output, *args)()
        return output

    _LIBRARY.define(f"{schema} -> Tensor")
    _LIBRARY.impl(name, run, "CPU")
    torch.library.register_fake(f"fastgen::{name}", output_of, lib=_LIBRARY)
    CALLS_INTO[f"fastgen::{name}"] = call_into
    return run


def threads_for(work: int, least: int) -> int:
    """Returns how many of torch's threads to use: each must have at least `least` of the work to be worth starting."""
    return min(int(torch.get_num_threads()), 1 + work // least)


def _openmp() -> list[ctypes.c_void_p | None]:
    """Returns the functions of the OpenMP runtime that torch uses, or None for each if it has other functions."""
    try:
        torch_cpu = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
        return [ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p) for name in _OPENMP]
    except (StopIteration, OSError, AttributeError):
        return [None] * len(_OPENMP)
