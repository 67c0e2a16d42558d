"""What waits for these tests is off by default on a GPU: captured steps, CUDA and Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from fastgen.config import CONFIG


@pytest.fixture(autouse=True, scope="module")
def switched_on() -> Iterator[None]:
    with mock.patch.object(CONFIG, "cuda_graphs", "on"), mock.patch.object(CONFIG, "cuda_kernels", True):
        yield
