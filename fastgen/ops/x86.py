"""The C++ kernels for x86 CPUs, built together for each instruction set.

They are in `csrc/skinny_gemm.cpp`, `few_queries.cpp`, `flash_attention.cpp`, `rms_norm.cpp`, `lookup.cpp`,
`beam_top_k.cpp` and `move_rows.cpp`.

Tests: tests/ops/test_skinny_gemm.py, tests/ops/test_attention_kernels.py,
tests/ops/test_rms_norm.py, tests/ops/test_lookup.py, tests/ops/test_beam_top_k.py,
tests/ops/test_move_rows.py
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.ops import load, load_reasons

# The libraries by torch's names of instruction sets; with AVX-512 and its bf16 extension, the name ends in "_bf16".
_LIBRARIES = {"AVX2": f"{__package__}._x86_avx2", "AVX512": f"{__package__}._x86_avx512"}
VERSION = 7  # changes with the kernels, and invalidates measurements of earlier ones
_SUFFIXES = {torch.float32: "", torch.bfloat16: "_bf16", torch.float16: "_fp16"}  # of function names
DTYPES = tuple(_SUFFIXES)
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@functools.cache
def machine_reasons() -> list[str]:
    """Returns why this machine cannot run these kernels; empty if it can."""
    instructions = torch.backends.cpu.get_cpu_capability()
    if instructions not in _LIBRARIES:
        return [f"the CPU's instructions are {instructions} (supported: {', '.join(_LIBRARIES)})"]
    return load_reasons(_library_name())


def _library_name() -> str:
    instructions = torch.backends.cpu.get_cpu_capability()
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()  # torch before 2.6 does not tell
    return _LIBRARIES[instructions] + ("_bf16" if instructions == "AVX512" and has_bf16 else "")


@functools.cache
def function(name: str, dtype: torch.dtype, argument_types: tuple[Any, ...]) -> Callable[..., None]:
    """Returns the kernel `fastgen_NAME` for one of `DTYPES`."""
    library = load(_library_name())
    library.fastgen_threads.argtypes = [ctypes.c_void_p] * 3
    library.fastgen_threads(*_openmp())
    kernel = getattr(library, f"fastgen_{name}{_SUFFIXES[dtype]}")
    kernel.argtypes, kernel.restype = argument_types, None
    return cast(Callable[..., None], kernel)


class Address(ctypes.c_void_p):
    """The address of a tensor that may move between two calls of a kernel, see `cpu_graph`."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.data_ptr())
        self.tensor = tensor


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
