"""Products of a few rows in fp32 or bf16 that read each weight once, as it lies in memory: `csrc/few_rows.cpp`.

In bf16 sums are in fp32 and rounded once: with AVX512_BF16 by its dot products of pairs (VDPBF16PS), elsewhere weights
are widened in registers, which halves the bytes that a row waits for.

AMD EPYC (family 25), two threads, weights not in a cache, ms, BLAS, oneDNN, oneDNN with a packed weight, and these:
1 × [768 → 3072] 0.72, 0.52, 0.52, 0.47; 4 × 1.65, 0.98, 0.60, 0.45; 16 × 1.57, 1.33, 0.96, 0.81; 32 × 1.84, 1.52, 1.29,
1.18; 16 × [768 → 50265] 33, 17, 13, 10. As GPT-2 keeps it: 2 × [768 → 3072] 0.98, 0.65, 0.45, 0.38; 16 × 1.69, 1.58,
0.97, 0.89; 256 × 11.6, 17.0, 9.3, 13.8. Not yet run with AVX-512.

Tests: tests/ops/test_few_rows.py
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgen.ops import load, load_reasons

# Of more rows a weight is read several times.
MOST_ROWS = 64

# The same as an operation of torch, for those who note what is called.
OPERATION = "fastgen::few_rows_linear"

# Built for the instructions that torch calls so; with AVX-512 and bf16's, for both.
_LIBRARIES = {"AVX2": f"{__package__}._few_rows_avx2", "AVX512": f"{__package__}._few_rows_avx512"}
_FUNCTIONS = {torch.float32: "fastgen_few_rows", torch.bfloat16: "fastgen_few_rows_bf16"}
DTYPES = tuple(_FUNCTIONS)
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@functools.cache
def machine_reasons() -> list[str]:
    """Why this machine cannot use it; empty if it can."""
    instructions = torch.backends.cpu.get_cpu_capability()
    if instructions not in _LIBRARIES:
        return [f"the CPU's instructions are {instructions} (supported: {', '.join(_LIBRARIES)})"]
    return load_reasons(_library_name())


def _library_name() -> str:
    instructions = torch.backends.cpu.get_cpu_capability()
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()  # torch before 2.6 does not tell
    return _LIBRARIES[instructions] + ("_bf16" if instructions == "AVX512" and has_bf16 else "")


@functools.cache
def _function(dtype: torch.dtype) -> Callable[..., Any]:
    library = load(_library_name())
    library.fastgen_few_rows_threads.argtypes = [ctypes.c_void_p] * 3
    library.fastgen_few_rows_threads(*_openmp())
    function = getattr(library, _FUNCTIONS[dtype])
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int32] * 2
    function.restype = None
    return function


def _openmp() -> list[ctypes.c_void_p | None]:
    """The functions of the OpenMP on which torch runs, or None where that has others."""
    try:
        torch_cpu = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
        return [ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p) for name in _OPENMP]
    except (StopIteration, OSError, AttributeError):
        return [None] * len(_OPENMP)


def few_rows_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`, on at most `torch.get_num_threads()` threads.

    rows `[…, in_features]`, bias `[out_features]`, both contiguous; weight `[out_features, in_features]`, contiguous or
    a transposed view; all of one of `DTYPES`, on a CPU. The bits do not depend on the number of rows or threads.
    """
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.fastgen.few_rows_linear(rows, weight, bias)
    return _few_rows_linear(rows, weight, bias)


def _few_rows_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = rows.new_empty((*rows.shape[:-1], weight.shape[0]))
    call_into(output, rows, weight, bias)()
    return output


def call_into(output: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], None]:
    """A function that computes the output, `[…, out_features]`, where it is; weight and bias may move, not change."""
    out_features, in_features = weight.shape
    function, inputs, outputs = _function(rows.dtype), rows.data_ptr(), output.data_ptr()
    sizes = rows.numel() // in_features, in_features, out_features, not weight.is_contiguous(), torch.get_num_threads()

    def call() -> None:
        function(inputs, weight.data_ptr(), None if bias is None else bias.data_ptr(), outputs, *sizes)

    return call


_LIBRARY = torch.library.Library("fastgen", "FRAGMENT")
_LIBRARY.define("few_rows_linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("few_rows_linear", _few_rows_linear, "CPU")


@torch.library.register_fake(OPERATION, lib=_LIBRARY)
def _fake(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))
