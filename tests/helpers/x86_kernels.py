"""Marks and contexts for tests of the C++ kernels for x86: machine, threads and registers."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from host_compiler import CSRC, compile_library
from made_once import made_once

from fastgen.ops import x86

needs_library = pytest.mark.skipif(bool(x86.machine_reasons()), reason=f"x86 kernels: {x86.machine_reasons()}")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Gives torch so many threads inside this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_wide_registers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernels in the width of AVX-512, with instructions of AVX2; folder: the test's `tmp_path`."""
    library = ctypes.CDLL(str(made_once(folder.parent, "wide-registers", _compile_wide) / WIDE))
    monkeypatch.setattr(x86, "load", lambda name: library)
    monkeypatch.setattr(x86, "function", x86.function.__wrapped__)


WIDE = "wide.so"
WIDE_KERNELS = ("skinny_gemm", "few_queries", "flash_attention", "beam_top_k")


def _compile_wide(folder: Path) -> None:
    """Compiles the kernels without debug information, which nobody reads here."""
    flags = ("-mavx2", "-mfma", "-mf16c", "-DWIDTH=16", "-ffp-contract=fast", "-Wno-psabi", "-g0")
    compile_library(folder / WIDE, *flags, *(CSRC / f"{kernel}.cpp" for kernel in WIDE_KERNELS))
