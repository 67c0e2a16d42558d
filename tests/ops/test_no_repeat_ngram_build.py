"""How no-repeat-n-gram is built: what compilers say of the sources, and installations with and without a compiler."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import setuptools
import torch
from host_compiler import CSRC, needs_compiler
from python_process import REPOSITORY, run_functions
from versions import needs_triton

NVCC = shutil.which("nvcc")
GPU_ARCHITECTURES = ("80", "90", "100")

# Prints the states of an installed fastgen's kernels, and the scores after a token was banned.
PROGRAM = """
import torch
from fastgen.ops import kernels, no_repeat_ngram
print(*kernels()["no-repeat n-gram"], sep="\\n")
print(no_repeat_ngram.__file__)
print(no_repeat_ngram.no_repeat_ngram(torch.tensor([[1, 2, 1]]), torch.zeros(1, 3), 2).tolist())
"""


@pytest.mark.skipif(NVCC is None, reason="no nvcc: the CUDA source was not compiled for a GPU")
def test_nvcc_compiles_the_source_without_warnings(tmp_path):
    options = ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]
    listed = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    codes = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in GPU_ARCHITECTURES if f"sm_{name}" in listed]
    output = tmp_path / "kernel.o"
    command = [NVCC, "-c", *options, *codes, "-o", output, CSRC / "no_repeat_ngram.cu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and output.stat().st_size
    if len(codes) < len(GPU_ARCHITECTURES):
        pytest.skip(f"{NVCC} compiled the source without warnings, but not for all of {GPU_ARCHITECTURES}: {codes}")


def compile_in_triton() -> None:
    from triton_compile import MOST_SPILLED, compile_kernel

    from fastgen.ops.no_repeat_ngram.triton_kernel import BLOCK, _ban_kernel

    for scores, tokens, is_own in (("*fp32", "*i64", True), ("*fp16", "*i32", False), ("*bf16", "*i64", True)):
        constants = {"HAS_LENGTHS": is_own, "IS_OWN": is_own, "BLOCK": BLOCK, "score_stride": 1, "token_stride": 1}
        types = {"scores": scores, "tokens": tokens, "source": tokens, "lengths": "*i64"}
        for architecture in MOST_SPILLED:
            compile_kernel(_ban_kernel, architecture, types, constants)


def ban_in_growing_texts() -> None:
    """Bans with texts and sources of all lengths; a length that is a multiple of 16 would be a case of its own.

    From here on nothing is compiled in this process.
    """
    from triton_compile import versions_of

    from fastgen.ops.no_repeat_ngram import triton_kernel

    def ban(tokens: torch.Tensor, source: torch.Tensor | None) -> None:
        triton_kernel.ban(tokens, torch.zeros(4, 50), 3, None, source)

    def texts(rows: int) -> list[torch.Tensor]:
        return [torch.zeros(rows, length, dtype=torch.int64) for length in range(3, 35)]

    assert len(versions_of(lambda: [ban(text, None) for text in texts(4)])) == 1
    assert len(versions_of(lambda: [ban(texts(4)[0], source) for source in texts(2)])) == 1


@needs_triton
def test_triton_compiles_without_spills_and_once_for_all_lengths(tmp_path):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run_functions(__file__, "compile_in_triton", "ban_in_growing_texts", **environment)


def test_nvcc_is_searched_where_installers_put_it(tmp_path, monkeypatch):
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


@pytest.fixture
def sources(tmp_path):
    """A copy of the files that an installation needs, without the outputs of earlier ones.

    All C++ kernels but that of n-gram blocking, whose states the tests read, are built of empty files.
    """
    copy = tmp_path / "sources"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, copy)
    for name in ("csrc", "fastgen"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    for source in (copy / "csrc").glob("*.cpp"):
        if source.stem != "no_repeat_ngram":
            source.write_text("")
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


@pytest.mark.skipif(os.name != "posix", reason="stand-ins for compilers are shell scripts")
@needs_compiler
@pytest.mark.slow
class TestInstallation:
    def test_a_failing_compiler_leaves_the_other_kernels(self, sources, tmp_path):
        """nvcc is asked for the architectures that it knows, and fails; then no compiler works."""
        calls, cuda = tmp_path / "calls", tmp_path / "cuda"
        knows = 'test "$1" = --list-gpu-code && echo sm_80 sm_90 && exit'
        script(cuda / "bin" / "nvcc", f'{knows}; echo "$@" > {calls}; exit 1')
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        run(build, sources, CUDA_HOME=str(cuda))
        codes = [word.rpartition("code=")[2] for word in calls.read_text().split() if "code=" in word]
        assert codes == ["compute_75", "sm_80", "sm_90"]
        assert states_of(sources, tmp_path) == {"CUDA: not built", "C++: usable", "torch: usable"}
        run(build, sources, **self.no_compiler(tmp_path))
        assert not list(sources.rglob("*.so"))

    def test_kernels_of_an_earlier_build_are_not_installed(self, sources, tmp_path):
        run([sys.executable, "setup.py", "--quiet", "build"], sources, CUDA_HOME=str(tmp_path / "no-cuda"))
        assert list(sources.rglob("_cpu*.so"))
        site = tmp_path / "site"
        pip = ["-m", "pip", "--disable-pip-version-check", "install"]
        options = ["--no-compile", "--no-deps", "--no-build-isolation", "--target", site, sources]
        run([sys.executable, *pip, *options], tmp_path, **self.no_compiler(tmp_path))
        assert not list(site.rglob("*.so"))
        assert states_of(site, tmp_path) == {"CUDA: not built", "C++: not built", "torch: usable"}

    def no_compiler(self, folder: Path) -> dict[str, str]:
        missing = script(folder / "no-compiler", "echo no compiler here >&2; exit 1")
        return {"CC": missing, "CXX": missing, "CUDA_HOME": str(folder / "no-cuda")}


def states_of(installed: Path, cwd: Path) -> set[str]:
    """Returns the states of the kernels of the fastgen in this folder but Triton's, after it has banned a token."""
    *states, file, scores = run([sys.executable, "-c", PROGRAM], cwd, PYTHONPATH=str(installed)).splitlines()
    assert file.startswith(str(installed)) and scores == "[[0.0, 0.0, -inf]]"
    return {state for state in states if not state.startswith("Triton")}
