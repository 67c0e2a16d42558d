"""Every implementation of no-repeat-n-gram against the definition.

Triton's kernel runs in its interpreter, the CUDA kernel compiled for the host; `tests/gpu` runs both where they belong.
"""

import ctypes
import os
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from unittest import mock

import ngram_definition as definition
import pytest
import torch
from host_compiler import CSRC, SHIM, compile_library, cuda_on_host, needs_compiler
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy
from ngram_definition import Case, wrapped

from fastgen.ops.no_repeat_ngram import kernels, reference

# Before C++ sources: counts the threads that they ask for, and grants no more than `granted`.
COUNTED_THREADS = """
#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

extern "C" { int asked = 0, granted = 0; }
namespace std {
struct counted_thread : thread {
    template <typename... T>
    explicit counted_thread(T&&... values) {
        if (asked++ >= granted) throw system_error(make_error_code(errc::resource_unavailable_try_again));
        thread::operator=(thread(std::forward<T>(values)...));
    }
};
}
#define thread counted_thread
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    output = tmp_path_factory.mktemp("shim") / "kernel.so"
    return compile_library(output, CSRC / "no_repeat_ngram.cu", SHIM / "cuda_runtime.cpp")


@pytest.fixture(scope="module")
def cpp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpp")
    folder.joinpath("counted_threads.h").write_text(COUNTED_THREADS)
    source = CSRC / "no_repeat_ngram.cpp"
    library = compile_library(folder / "cpp.so", "-include", folder / "counted_threads.h", source)
    library.fastgen_no_repeat_ngram_cpu.argtypes = (ctypes.POINTER(kernels.NGramProblem), ctypes.c_int32)
    library.fastgen_no_repeat_ngram_cpu.restype = None
    return library


def cpp_ban(library: ctypes.CDLL, max_threads: int = 1) -> Callable:
    def ban(*arguments) -> None:
        library.fastgen_no_repeat_ngram_cpu(ctypes.byref(kernels.describe(*arguments)), max_threads)

    return ban


def write_per_window(*arguments) -> None:
    """`reference.ban` as it is on a GPU."""
    with mock.patch.object(reference, "_write_few", reference._write_all):
        reference.ban(*arguments)


def interpreted_triton() -> Callable:
    """Returns the function of a copy of the module: whether kernels are interpreted is decided when it runs.

    Triton itself is imported before: parts of it that it imports later must find the rest as they are.
    """
    pytest.importorskip("triton", reason="triton is not installed: its kernel was not compared")
    spec = find_spec("fastgen.ops.no_repeat_ngram.triton_kernel")
    module = module_from_spec(spec)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        spec.loader.exec_module(module)
    return module.ban


IMPLEMENTATIONS = {
    "torch, a write per match": lambda request: reference.ban,
    "torch, a write per window": lambda request: write_per_window,
    "C++": lambda request: cpp_ban(request.getfixturevalue("cpp")),
    "Triton, interpreted": lambda request: interpreted_triton(),
    "CUDA, on the host": lambda request: cuda_on_host(request.getfixturevalue("shim")),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[needs_compiler] if name.startswith("C") else []) for name in IMPLEMENTATIONS],
)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def ban(name, request):
    return IMPLEMENTATIONS[name](request)


def check(name: str, ban: Callable, cases: SearchStrategy[Case], max_examples: int) -> None:
    share = 3 if name == "Triton, interpreted" else 1  # of the examples: each takes tens of milliseconds

    @settings(definition.SETTINGS, max_examples=max_examples // share)
    @given(case=cases)
    def holds(case: Case) -> None:
        definition.check(ban, case)

    holds()


def few_or_many(few: int, many: int) -> list:
    return [pytest.param(few, marks=pytest.mark.covered_by_slow), pytest.param(many, marks=pytest.mark.slow)]


@pytest.mark.parametrize("examples", few_or_many(60, 300))
def test_small_problems_are_banned_as_defined(name, ban, examples):
    check(name, ban, definition.cases(), examples)


@pytest.mark.parametrize("examples", few_or_many(30, 90))
def test_ngrams_of_several_chunks_and_tiles_are_banned(name, ban, examples):
    check(name, ban, definition.wide_cases(), examples)


@pytest.mark.parametrize("ngram_size", [1, 3])
def test_rows_of_32768_tokens_are_banned_as_defined(ban, ngram_size):
    tokens = wrapped([3, 1, 4, 1, 5, 9, 2, 6], 2, 1 << 15, torch.int32, shift=3)
    tokens[1, 20_000:20_003] = torch.tensor([*tokens[1, -2:], 8])
    definition.check(ban, Case(tokens, torch.zeros(2, 9), ngram_size))


@needs_compiler
@pytest.mark.parametrize("ngram_size", range(1, 11))
@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(4096, 40, 30), (2, 1 << 15, 250_000)])
def test_extreme_shapes_in_cuda_on_the_host(shim, rows, width, vocabulary, ngram_size):
    tokens = torch.randint(0, 3, (rows, width), generator=torch.Generator().manual_seed(ngram_size))
    tokens[:, ::7] += vocabulary - 3
    definition.check(cuda_on_host(shim), Case(tokens, torch.zeros(rows, vocabulary), ngram_size))


@pytest.mark.parametrize("ngram_size", [299, 300, 301])
def test_an_ngram_may_be_as_long_as_the_row(ban, ngram_size):
    definition.check(ban, Case(torch.zeros(1, 300, dtype=torch.int64), torch.zeros(1, 2), ngram_size))


@needs_compiler
@pytest.mark.parametrize("ngram_size", [33, 1 << 14, (1 << 15) - 1, 1 << 15, (1 << 15) + 1])
def test_cpp_takes_ngrams_as_long_as_32768_tokens(cpp, ngram_size):
    tokens = wrapped(range(1 << 10), 1, 1 << 15, torch.int64)
    definition.check(cpp_ban(cpp), Case(tokens, torch.zeros(1, 1 << 10), ngram_size))


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "width", "most", "granted", "asked"),
    [
        (13, 1 << 15, 3, 9, 2),
        (2, 1 << 18, 16, 9, 1),  # no more than rows
        (13, 1 << 15, 1, 9, 0),
        (7, 1 << 15, 16, 9, 0),  # little work
        (13, 1 << 15, 3, 0, 1),  # runs without the threads that the system refuses
        (13, 1 << 15, 3, 1, 2),
    ],
)
def test_the_code_in_cpp_shares_many_rows_among_threads(cpp, rows, width, most, granted, asked):
    ctypes.c_int.in_dll(cpp, "asked").value, ctypes.c_int.in_dll(cpp, "granted").value = 0, granted
    tokens = wrapped([0, 1, 2, 1, 3], rows, width, torch.int32, shift=1)
    definition.check(cpp_ban(cpp, most), Case(tokens, torch.zeros(rows, 5), 3))
    assert ctypes.c_int.in_dll(cpp, "asked").value == asked


@needs_compiler
class TestCudaSourceOnTheHost:
    def test_more_rows_than_a_grid_has_share_its_blocks(self, shim):
        """Only the first two and the last two rows have tokens."""
        rows, width = 65535 + 2, 40
        tokens = wrapped([0, 1, 2], rows, width, torch.int32, shift=1)
        lengths = torch.zeros(rows, dtype=torch.int32)
        lengths[:2], lengths[-2:] = width, width - 1
        scores = torch.zeros(rows, 3)
        cuda_on_host(shim)(tokens, scores, 36, lengths, None)
        banned = scores[[0, 1, -2, -1]].isinf().nonzero().tolist()
        expected = [definition.banned(tokens[row, : lengths[row]].tolist(), 36) for row in (0, 1, -2, -1)]
        assert banned == [[row, token] for row, tokens in enumerate(expected) for token in tokens]
        assert len(banned) == scores.isinf().sum()

    def test_the_kernel_runs_on_its_device_and_stream(self, shim):
        device = ctypes.c_int()
        arguments = torch.tensor([[1, 1]]), torch.zeros(1, 3), 2, None, None
        for current in (0, 1):
            shim.cudaSetDevice(current)
            cuda_on_host(shim)(*arguments, device=1 - current, stream=40 + current)
            assert ctypes.c_int.in_dll(shim, "cuda_shim_last_device").value == 1 - current
            assert ctypes.c_void_p.in_dll(shim, "cuda_shim_last_stream").value == 40 + current
            shim.cudaGetDevice(ctypes.byref(device))
            assert device.value == current
        shim.cudaSetDevice(0)

    def test_errors_of_cuda_are_raised_and_leave_none_behind(self, shim):
        scores = torch.zeros(1, 3)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            cuda_on_host(shim)(torch.tensor([[1, 1]]), scores, 2, None, None, device=9)
        assert shim.cudaGetLastError() == 0 and not scores.isinf().any()
