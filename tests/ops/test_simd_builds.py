"""Each build of the C++ kernels computes what torch computes: for other CPUs in an emulator, and under sanitizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from host_compiler import needs_compiler
from kernel_builds import BUILDS, NATIVE, SOURCES, Build, runnable
from kernel_cases import KernelCase, all_cases, run_cases

from fastgen.ops import simd

SLOW = ("AVX2", "AVX512", "AVX512_BF16", "NEON_BF16")  # the first three are installed, and tested through fastgen
SANITIZED = dict.fromkeys((*NATIVE[:1], *NATIVE[-1:]))  # the narrowest and the widest registers
PLAIN = [name for name in BUILDS if name not in SLOW or name not in SANITIZED]  # slow tests of both would be the same
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")

pytestmark = needs_compiler


def check_build(build: Build, folder: Path, *options: str) -> list[KernelCase]:
    cases = all_cases()
    run_cases(build.driver(folder, *options), cases, folder)
    for case in cases:
        case.check()
    return cases


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PLAIN])
def test_each_build_computes_what_torch_computes(name, tmp_path):
    check_build(runnable(name), tmp_path, "-O1")


def test_outputs_are_wrong_before_a_kernel_has_run():
    for case in all_cases():
        with pytest.raises(AssertionError):
            case.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizers_find_nothing_in_the_kernels(name, tmp_path):
    """And the results are right. That sanitizers find something is shown with a table that is too short."""
    cases = check_build(runnable(name), tmp_path, "-O1", *SANITIZERS)
    case = next(case for case in cases if case.kernel == "fastgen_lookup")
    numbers, table, *others = case.tensors
    table = table[:-1].clone()
    arguments = case.arguments[0], table.data_ptr(), *case.arguments[2:]
    short = replace(case, tensors=[numbers, table, *others], arguments=arguments)
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        run_cases([tmp_path / "driver"], [short], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("AVX2", "AVX512_BF16", "NEON_BF16"))
def test_clang_compiles_all_kernels_without_a_warning(name, tmp_path):
    """Compilers are asked for warnings in the other tests as well; this one only compiles."""
    options = BUILDS[name].flags
    target = ["--target=aarch64-linux-gnu"] if name.startswith("NEON") else []
    build = Build("clang++", tuple(flag for flag in options if flag != "-static"))
    if build.missing:
        pytest.skip("no clang++")
    for source in SOURCES[1:]:
        build.compile(source, tmp_path / "nothing", "-fsyntax-only", *target)


def test_the_build_follows_the_cpu(monkeypatch):
    """Which library is loaded is told by what torch and, on aarch64, Linux say of the CPU."""
    monkeypatch.setattr(simd.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(simd, "_hardware_capabilities", lambda: 1 << 14)
    assert simd.instructions() == "NEON_BF16" and simd._library_name() == "fastgen.ops._aarch64_neon_bf16"
    monkeypatch.setattr(simd, "_hardware_capabilities", lambda: 0)
    assert simd.instructions() == "NEON" and simd._library_name() == "fastgen.ops._aarch64_neon"
    monkeypatch.setattr(simd.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert simd.instructions() == "AVX512_BF16"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert simd.instructions() == "AVX512"
