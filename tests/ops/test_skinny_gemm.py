"""`csrc/skinny_gemm.cpp`: the numbers of torch, with the same bits for any number of rows and threads."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_kernels import needs_library, torch_threads
from torch.nn import functional

from fastgen.ops import cpu_linear, simd

ROWS = st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 24, 25, 63, 64, 65, 130))
IN = st.sampled_from((1, 3, 7, 8, 9, 16, 17, 33, 64, 255, 256, 257, 300, 700))
OUT = st.sampled_from((1, 2, 5, 12, 13, 16, 24, 31, 32, 33, 96, 97, 193, 511, 513, 1003))
HALVES = (torch.bfloat16, torch.float16)


@needs_library
@settings(max_examples=200, deadline=None)
@given(ROWS, IN, OUT, st.booleans(), st.booleans(), st.integers(1, 3), st.sampled_from(simd.DTYPES))
def test_products_of_few_rows_are_those_of_torch(
    rows, in_features, out_features, is_transposed, with_bias, threads, dtype
):
    check(rows, in_features, out_features, is_transposed, with_bias, threads, dtype)


@needs_library
@pytest.mark.parametrize("is_transposed", [False, True])
def test_bf16_is_widened_if_the_cpu_has_no_bf16_products(is_transposed, monkeypatch):
    """The library that other CPUs with these instructions load; an odd number of inputs is widened everywhere."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    monkeypatch.setattr(simd, "function", simd.function.__wrapped__)
    for rows in (1, 4, 12, 25, 65):
        for in_features, out_features in ((700, 97), (257, 193)):
            check(rows, in_features, out_features, is_transposed, True, 2, torch.bfloat16)


@needs_library
@settings(max_examples=50, deadline=None)
@given(ROWS, IN, OUT, st.booleans(), st.sampled_from(HALVES))
def test_sums_of_half_the_bytes_are_rounded_once(rows, in_features, out_features, is_transposed, dtype):
    """Rounding goes to the nearest of 128 (bf16) or 1024 (fp16) numbers between two powers of two."""
    weight = torch.randn(in_features, out_features).t() if is_transposed else torch.randn(out_features, in_features)
    weight, states = weight.to(dtype), torch.randn(rows, in_features).to(dtype)
    expected = states.double() @ weight.double().t()
    output = cpu_linear.skinny_linear(states, weight).double()
    of_sums = 1e-6 * (states.double().abs() @ weight.double().abs().t())
    of_rounding = (expected.abs() + torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps / 2
    assert ((output - expected).abs() <= of_rounding + of_sums).all()


@needs_library
@pytest.mark.parametrize("dtype", HALVES)
def test_nan_and_infinite_weights_give_what_torch_gives(dtype):
    states = torch.ones(2, 64).to(dtype)
    weight = torch.ones(3, 64).to(dtype)
    weight[0, 5], weight[1, 7] = float("nan"), float("inf")
    output = cpu_linear.skinny_linear(states, weight)
    assert output[:, 0].isnan().all() and output[:, 1].isposinf().all() and (output[:, 2] == 64).all()


@needs_library
def test_without_the_openmp_of_torch_it_runs_in_one_thread(monkeypatch):
    monkeypatch.setattr(simd, "_OPENMP", ("no_such_function",) * 3)
    assert simd._openmp() == [None] * 3
    monkeypatch.setattr(simd, "function", simd.function.__wrapped__)
    try:
        check(16, 256, 513, False, True, 2)
    finally:
        monkeypatch.undo()
        simd.function.__wrapped__(
            "skinny_gemm", torch.float32, cpu_linear._ARGUMENTS
        )  # gives the library torch's threads again


@needs_library
def test_inside_another_team_of_threads_nothing_is_left_out():
    """Inside a parallel region OpenMP gives fewer threads than are asked for."""
    states, weight = torch.randn(16, 256), torch.randn(513, 256)
    expected, outputs = cpu_linear.skinny_linear(states, weight), []
    openmp = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: outputs.append(cpu_linear.skinny_linear(states, weight)))
    openmp.GOMP_parallel(run, None, 2, 0)
    assert len(outputs) == 2 and all(torch.equal(output, expected) for output in outputs)


def test_other_processors_and_missing_builds_have_reasons(monkeypatch):
    simd.machine_reasons.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    (reason,) = simd.machine_reasons()
    assert reason.startswith("the CPU's instructions are DEFAULT (supported: AVX2, AVX512, ")
    simd.machine_reasons.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(simd, "load_reasons", lambda name: [f"{name}: not built"])
    assert simd.machine_reasons() == ["fastgen.ops._x86_avx2: not built"]
    simd.machine_reasons.cache_clear()


def check(rows, in_features, out_features, is_transposed, with_bias, threads, dtype=torch.float32) -> None:
    weight = torch.randn(in_features, out_features).t() if is_transposed else torch.randn(out_features, in_features)
    bias = torch.randn(out_features).to(dtype) if with_bias else None
    states, weight = torch.randn(rows, in_features).to(dtype), weight.to(dtype)
    with torch_threads(threads):
        output = cpu_linear.skinny_linear(states, weight, bias)
        last = cpu_linear.skinny_linear(states[-1:], weight, bias)
    assert output.dtype == dtype
    expected = functional.linear(*(None if each is None else each.double() for each in (states, weight, bias)))
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.004, torch.float16: 0.0005}[dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=max(1e-4, in_features * 1e-6))
    assert torch.equal(last, output[-1:])
