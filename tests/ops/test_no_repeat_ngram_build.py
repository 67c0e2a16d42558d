"""How no-repeat-n-gram is built: what compilers say of the sources, and installations with and without a compiler."""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
import setuptools
from host_compiler import CSRC, compile_cpp, needs_compiler
from python_process import REPOSITORY, run_code

from fastgen.ops.no_repeat_ngram import kernels

NVCC = shutil.which("nvcc")
GPU_ARCHITECTURES = ("80", "90", "100")

# What an installed fastgen says of its kernels, and what it bans.
PROGRAM = """
import torch
from fastgen.ops import kernels, no_repeat_ngram
print(*kernels()["no-repeat n-gram"], sep="\\n")
print(no_repeat_ngram.__file__)
print(no_repeat_ngram.no_repeat_ngram(torch.tensor([[1, 2, 1]]), torch.zeros(1, 3), 2).tolist())
"""


@pytest.mark.skipif(NVCC is None, reason="no nvcc: the CUDA source was not compiled for a GPU")
@pytest.mark.parametrize("architecture", GPU_ARCHITECTURES)
def test_nvcc_compiles_the_source_without_warnings(architecture, tmp_path):
    options = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]
    if f"sm_{architecture}" not in subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True).stdout:
        pytest.skip(f"{NVCC} does not know sm_{architecture}")
    output = tmp_path / "kernel.o"
    command = [NVCC, "-c", *options, f"-arch=sm_{architecture}", "-o", output, CSRC / "no_repeat_ngram.cu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and output.stat().st_size


@pytest.mark.parametrize("architecture", GPU_ARCHITECTURES)
@pytest.mark.parametrize(("scores", "tokens"), [("*fp32", "*i64"), ("*fp16", "*i32"), ("*bf16", "*i64")])
def test_triton_compiles_its_kernel(architecture, scores, tokens, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", reason="triton is not installed: its kernel was not compiled")
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: kernels are not compiled")
    from fastgen.ops.no_repeat_ngram.triton_kernel import BLOCK, _ban_kernel

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else it warns
    is_own = tokens == "*i64"
    constants = {"HAS_LENGTHS": is_own, "IS_OWN": is_own, "BLOCK": BLOCK, "score_stride": 1, "token_stride": 1}
    pointers = {"scores": scores, "tokens": tokens, "source": tokens, "lengths": "*i64"}
    others = {name: "constexpr" if name in constants else "i32" for name in _ban_kernel.arg_names}
    source = triton.compiler.ASTSource(fn=_ban_kernel, signature=others | pointers, constexprs=constants)
    target = triton.backends.compiler.GPUTarget("cuda", int(architecture), 32)
    assert triton.compile(source, target=target).asm["cubin"]


@needs_compiler
def test_python_and_c_agree_on_the_problem(tmp_path):
    struct = kernels.NGramProblem
    fields = [name for name, _ in struct._fields_]
    prints = [f'std::printf("%zu %zu\\n", offsetof(NGramProblem, {name}), sizeof(p.{name}));' for name in fields]
    source = tmp_path / "layout.cpp"
    source.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "no_repeat_ngram.h"\n'
        f'int main() {{ NGramProblem p; {" ".join(prints)} std::printf("%zu\\n", sizeof p); }}'
    )
    done = subprocess.run([compile_cpp(tmp_path / "layout", source)], capture_output=True, text=True, check=True)
    *found, size = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert dict(zip(fields, found)) == {
        name: (getattr(struct, name).offset, getattr(struct, name).size) for name in fields
    }
    assert size == (ctypes.sizeof(struct),)


def test_nvcc_is_looked_for_where_installers_put_it(tmp_path, monkeypatch):
    of_pip, searched = tmp_path / "nvidia" / "cu13" / "bin", []
    of_pip.mkdir(parents=True)
    monkeypatch.setattr(setuptools, "setup", lambda **keywords: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name, path: searched.append(path.split(os.pathsep)))
    monkeypatch.setenv("PATH", "/first")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    runpy.run_path(str(REPOSITORY / "setup.py"))
    monkeypatch.setenv("CUDA_HOME", "/chosen")
    runpy.run_path(str(REPOSITORY / "setup.py"))
    assert searched == [["/first", "/usr/local/cuda/bin", str(of_pip)], ["/chosen/bin"]]


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_triton_kernel_is_compiled_once_while_texts_grow():
    """Numbers that are specialised are compiled anew, where they become divisible by 16, say."""
    code = """
from fastgen.ops.no_repeat_ngram.triton_kernel import GROWING, _ban_kernel
kept = {parameter.name for parameter in _ban_kernel.params if parameter.do_not_specialize}
assert kept == set(GROWING), kept
"""
    run_code(code, TRITON_INTERPRET="0")


@pytest.fixture
def sources(tmp_path) -> Path:
    """What an installation needs, without what earlier ones left behind."""
    copy = tmp_path / "sources"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, copy)
    for name in ("csrc", "fastgen"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    return copy


def run(command: list[str | Path], cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], env=os.environ | env, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def quick_compilers(tmp_path, monkeypatch):
    """The compilers of this machine under their names; they leave out optimisations, about which no build decides."""
    for name in ("cc", "gcc", "c++", "g++"):
        if found := shutil.which(name):
            script(tmp_path / "compilers" / name, f'exec {found} "$@" -O0')
    monkeypatch.setenv("PATH", str(tmp_path / "compilers"), prepend=os.pathsep)


@pytest.mark.skipif(os.name != "posix", reason="stand-ins for compilers are shell scripts")
@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilers")
class TestInstallation:
    def test_without_a_compiler_torch_does_the_work(self, sources, tmp_path):
        missing = script(tmp_path / "no-compiler", "echo no compiler here >&2; exit 1")
        site = tmp_path / "site"
        pip = ["-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation"]
        environment = {"CC": missing, "CXX": missing, "CUDA_HOME": str(tmp_path / "no-cuda")}
        run([sys.executable, *pip, "--target", site, sources], tmp_path, **environment)
        assert not list(site.rglob("*.so"))
        lines = run([sys.executable, "-c", PROGRAM], tmp_path, PYTHONPATH=str(site)).splitlines()
        assert "CUDA: not built" in lines
        assert "C++: not built" in lines
        assert "torch: usable" in lines
        assert lines[-2].startswith(str(site)) and lines[-1] == "[[0.0, 0.0, -inf]]"

    @needs_compiler
    @pytest.mark.parametrize("build", [["build"], ["build_ext", "--inplace"]], ids=["build", "inplace"])
    def test_kernels_of_an_earlier_build_do_not_outlive_one_without_a_compiler(self, build, sources, tmp_path):
        missing = script(tmp_path / "no-compiler", "exit 1")
        command, no_cuda = [sys.executable, "setup.py", "--quiet", *build], str(tmp_path / "no-cuda")
        run(command, sources, CUDA_HOME=no_cuda)
        assert list(sources.rglob("_cpu*.so"))
        run(command, sources, CUDA_HOME=no_cuda, CC=missing, CXX=missing)
        assert not list(sources.rglob("*.so"))

    @needs_compiler
    def test_a_cuda_compiler_that_fails_does_not_keep_the_rest_from_being_built(self, sources, tmp_path):
        script(tmp_path / "cuda" / "bin" / "nvcc", 'test "$1" = --list-gpu-code && echo sm_80 && exit; exit 1')
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        run(build, sources, CUDA_HOME=str(tmp_path / "cuda"))
        built = {library.name.split(".")[0] for library in (sources / "fastgen").rglob("*.so")}
        assert "_cpu" in built and "_cuda" not in built
        lines = run([sys.executable, "-c", PROGRAM], tmp_path, PYTHONPATH=str(sources)).splitlines()
        assert "CUDA: not built" in lines
        assert "C++: usable" in lines
        assert lines[-2].startswith(str(sources)) and lines[-1] == "[[0.0, 0.0, -inf]]"

    @needs_compiler
    def test_nvcc_is_asked_for_the_architectures_that_it_knows(self, sources, tmp_path):
        log = tmp_path / "calls"
        script(
            tmp_path / "cuda" / "bin" / "nvcc",
            f'test "$1" = --list-gpu-code && echo sm_80 sm_90 && exit; echo "$@" > {log}; exit 1',
        )
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        run(build, sources, CUDA_HOME=str(tmp_path / "cuda"))
        codes = [word.rpartition("code=")[2] for word in log.read_text().split() if "code=" in word]
        assert codes == ["compute_75", "sm_80", "sm_90"]
