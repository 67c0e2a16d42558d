"""No-repeat-n-gram under the compiler's sanitizers: the C++ source, and the CUDA source compiled for the host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from host_compiler import CSRC, SHIM, compile_cpp, needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]


def run(program: Path) -> subprocess.CompletedProcess:
    return subprocess.run([program], capture_output=True, text=True)


def skip_unless_starts(sanitizer: str, folder: Path) -> None:
    """Not every compiler has every sanitizer, and not every kernel lets each of them map its memory."""
    source = folder / "nothing.cpp"
    source.write_text("int main() {}")
    try:
        done = run(compile_cpp(folder / "nothing", f"-fsanitize={sanitizer}", source))
    except AssertionError as error:
        pytest.skip(f"no {sanitizer} sanitizer: {error}")
    if done.returncode:
        pytest.skip(f"the {sanitizer} sanitizer does not start: {done.stderr}")


@pytest.fixture(scope="module")
def compile_for_races(tmp_path_factory) -> Callable[[Path], Path]:
    """Makes a program of a kernel under ThreadSanitizer, to which each CUDA thread is a thread."""
    folder = tmp_path_factory.mktemp("races")
    skip_unless_starts("thread", folder)
    fibers = compile_cpp(folder / "fibers.o", "-c", "-DCUDA_SHIM_TSAN", SHIM / "cuda_runtime.cpp")
    sources = [CSRC / "no_repeat_ngram.cpp", SHIM / "check_no_repeat_ngram.cpp"]
    rest = [
        compile_cpp(folder / f"{source.stem}{i}.o", "-c", "-fsanitize=thread", source)
        for i, source in enumerate(sources)
    ]
    return lambda kernel: compile_cpp(folder / "races", "-fsanitize=thread", kernel, "-x", "none", fibers, *rest)


def test_buffers_are_never_left_and_nothing_is_undefined(tmp_path):
    sources = [*CSRC.glob("no_repeat_ngram.c*"), SHIM / "check_no_repeat_ngram.cpp", SHIM / "cuda_runtime.cpp"]
    skip_unless_starts("address,undefined", tmp_path)
    options = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    done = run(compile_cpp(tmp_path / "bounds", *options, *sources))
    assert (done.returncode, done.stdout) == (0, "all equal\n"), done.stdout + done.stderr


def test_threads_do_not_race(compile_for_races):
    done = run(compile_for_races(CSRC / "no_repeat_ngram.cu"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "all equal\n", "")


@pytest.mark.parametrize(
    ("barrier", "instead"),
    [("        __syncthreads();\n", ""), ("if (!__syncthreads_or(equal)) return false;", "")],
    ids=["after staging", "before staging again"],
)
def test_a_missing_barrier_is_a_race(barrier, instead, compile_for_races, tmp_path):
    source = CSRC.joinpath("no_repeat_ngram.cu").read_text()
    assert source.count(barrier) == 1
    tmp_path.joinpath("kernel.cu").write_text(source.replace(barrier, instead))
    done = run(compile_for_races(tmp_path / "kernel.cu"))
    assert done.returncode and "ThreadSanitizer: data race" in done.stderr and "equals_prefix" in done.stderr
