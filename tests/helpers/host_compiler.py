"""Compiles C++ for tests; `csrc/*.cu` too, with the stand-in for CUDA in `cuda_shim/`."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from python_process import REPOSITORY

from fastgen.ops.no_repeat_ngram import kernels

CSRC = REPOSITORY / "csrc"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
SHIM = REPOSITORY / "tests" / "helpers" / "cuda_shim"

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="no g++ on Linux: nothing was compiled for the host"
)


def compile_cpp(output: Path, *arguments: str | Path) -> Path:
    """Runs `g++ arguments... -o output`; warnings are errors, and `.cu` files are C++."""
    includes = [f"-I{SHIM}", f"-I{CSRC}"]
    command = ["g++", "-std=c++17", "-g", "-O1", *WARNINGS, "-pthread", *includes, "-x", "c++"]
    done = subprocess.run([*command, *arguments, "-o", output], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr)
    return output


def compile_library(output: Path, *arguments: str | Path) -> ctypes.CDLL:
    """Compiles and loads a library; its functions hide those of the real CUDA that a GPU build of torch loads."""
    return ctypes.CDLL(str(compile_cpp(output, "-shared", "-fPIC", "-Wl,-Bsymbolic", *arguments)))


def cuda_on_host(library: ctypes.CDLL) -> Callable:
    """Returns `kernels.ban_on_cuda`, compiled for the host with the shim."""
    function = library.fastgen_no_repeat_ngram_cuda
    function.argtypes = (ctypes.POINTER(kernels.NGramProblem), ctypes.c_int32, ctypes.c_void_p)
    function.restype = ctypes.c_char_p

    def ban(*arguments, device: int = 0, stream: int | None = None) -> None:
        error = function(ctypes.byref(kernels.describe(*arguments)), device, stream)
        if error:
            raise RuntimeError(error.decode())

    return ban
