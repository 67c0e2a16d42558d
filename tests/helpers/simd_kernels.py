"""For tests of the C++ kernels: where they run, and on how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fastgen.ops import simd

needs_library = pytest.mark.skipif(bool(simd.machine_reasons()), reason=f"C++ kernels: {simd.machine_reasons()}")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside this context torch has so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
