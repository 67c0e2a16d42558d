"""The kernels of no-repeat-n-gram, and the choice between them.

The kernels in C++ and CUDA are the shared libraries `_cpu` and `_cuda` next to this file.

Tests: tests/ops/test_no_repeat_ngram.py, tests/ops/test_no_repeat_ngram_kernels.py,
tests/ops/test_no_repeat_ngram_build.py
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen.config import CONFIG
from fastgen.ops import load, load_reasons
from fastgen.ops.kernel import Kernel, first_supported, gpu_reasons, triton_reasons
from fastgen.ops.no_repeat_ngram import reference
from fastgen.ops.probes import probe

Ban = Callable[[Tensor, Tensor, int, "Tensor | None", "Tensor | None"], None]

CPU, CUDA = f"{__package__}._cpu", f"{__package__}._cuda"

# The size in bytes of each dtype of scores, and the bits of its -inf.
_MINUS_INFINITY = {torch.float32: (4, 0xFF800000), torch.float16: (2, 0xFC00), torch.bfloat16: (2, 0xFF80)}


class NGramProblem(ctypes.Structure):
    """`struct NGramProblem` of `csrc/no_repeat_ngram.h`."""

    _fields_ = [
        ("scores", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("vocabulary_size", ctypes.c_int64),
        ("score_row_stride", ctypes.c_int64),
        ("score_stride", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("token_row_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("source", ctypes.c_void_p),
        ("source_width", ctypes.c_int64),
        ("source_row_stride", ctypes.c_int64),
        ("source_stride", ctypes.c_int64),
        ("rows_per_source", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("lengths_stride", ctypes.c_int64),
        ("ngram_size", ctypes.c_int64),
        ("score_bytes", ctypes.c_int32),
        ("token_bytes", ctypes.c_int32),
        ("length_bytes", ctypes.c_int32),
        ("minus_infinity", ctypes.c_uint32),
    ]


def describe(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None, encoder_tokens: Tensor | None
) -> NGramProblem:
    """Returns the struct for these tensors, which must outlive it."""
    source = (None, 0, 0, 0, 1)
    if encoder_tokens is not None:
        beams = tokens.shape[0] // encoder_tokens.shape[0]
        source = (encoder_tokens.data_ptr(), encoder_tokens.shape[1], *encoder_tokens.stride(), beams)
    valid: tuple[int | None, int] = (None, 0)
    if lengths is not None:
        valid = (lengths.data_ptr(), lengths.stride(0) if lengths.dim() else 0)
    score_bytes, minus_infinity = _MINUS_INFINITY[scores.dtype]
    return NGramProblem(
        *(scores.data_ptr(), *scores.shape, *scores.stride()),
        *(tokens.data_ptr(), tokens.shape[1], *tokens.stride()),
        *source,
        *valid,
        ngram_size,
        *(score_bytes, tokens.element_size(), lengths.element_size() if lengths is not None else 8, minus_infinity),
    )


@functools.cache
def _cpu() -> Callable[..., Any]:
    function = load(CPU).fastgen_no_repeat_ngram_cpu
    function.argtypes = (ctypes.POINTER(NGramProblem), ctypes.c_int32)
    function.restype = None
    return function


@functools.cache
def _cuda() -> Callable[..., Any]:
    function = load(CUDA).fastgen_no_repeat_ngram_cuda
    function.argtypes = (ctypes.POINTER(NGramProblem), ctypes.c_int32, ctypes.c_void_p)
    function.restype = ctypes.c_char_p
    return function


def ban_on_cpu(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None, encoder_tokens: Tensor | None
) -> None:
    """Does the same as `reference.ban`, on at most `torch.get_num_threads()` threads."""
    problem = describe(tokens, scores, ngram_size, lengths, encoder_tokens)
    _cpu()(ctypes.byref(problem), torch.get_num_threads())


def ban_on_cuda(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None, encoder_tokens: Tensor | None
) -> None:
    """Does the same as `reference.ban`, on the current stream. Raises RuntimeError if the launch fails."""
    problem = describe(tokens, scores, ngram_size, lengths, encoder_tokens)
    stream = torch.cuda.current_stream(scores.device).cuda_stream
    error = _cuda()(ctypes.byref(problem), scores.get_device(), stream)
    if error:
        raise RuntimeError(f"CUDA kernel of no-repeat-n-gram: {error.decode()}")


def _ban_with_triton(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None, encoder_tokens: Tensor | None
) -> None:
    from fastgen.ops.no_repeat_ngram import triton_kernel  # importing triton takes half a second

    triton_kernel.ban(tokens, scores, ngram_size, lengths, encoder_tokens)


@probe("differs from torch on a CPU")
def bans_as_torch(ban: Ban, device_type: str) -> bool:
    """Whether a form gives the results of torch on a CPU in a small case on such a device."""
    tokens = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]])
    expected = torch.zeros(2, 8)
    reference.ban(tokens, expected, 3, None, None)
    scores = torch.zeros(2, 8, device=device_type)
    ban(tokens.to(device_type), scores, 3, None, None)
    return bool(torch.equal(scores.cpu(), expected))


def kernel_of(name: str, device_type: str, machine_reasons: Callable[[], list[str]], ban: Ban) -> Kernel:
    """Returns a kernel that is used if its results are torch's. machine_reasons: returns why it cannot run."""

    def unsupported_reasons() -> list[str]:
        return machine_reasons() or bans_as_torch.reasons(ban, device_type)

    task = f"n-gram blocking on {device_type}"
    counted_as = (f"no_repeat_ngram ({name})",)
    return Kernel(name, unsupported_reasons, ban, device_type, task=task, counted_as=counted_as)


KERNELS = (
    kernel_of("CUDA", "cuda", lambda: load_reasons(CUDA) or gpu_reasons(), ban_on_cuda),
    kernel_of("Triton", "cuda", triton_reasons, _ban_with_triton),
    kernel_of("C++", "cpu", lambda: load_reasons(CPU), ban_on_cpu),
    Kernel("torch", list, reference.ban, task="n-gram blocking", counted_as=("no_repeat_ngram (torch)",)),
)


def kernel_for(device_type: str) -> Kernel:
    """Returns the first kernel that runs on such a device, chosen once; not to be called while a graph is captured."""
    return _kernel_for(device_type, CONFIG.cuda_kernels)


@functools.cache
def _kernel_for(device_type: str, cuda_kernels: bool) -> Kernel:
    return first_supported(KERNELS, device_type)
