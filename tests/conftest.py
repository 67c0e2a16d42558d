"""Fixtures of several test files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fairseq_trained import Trained


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained fairseq models; the workers of pytest-xdist share what the first of them makes."""
    pytest.importorskip("fairseq")
    from fairseq_trained import train_once

    base = tmp_path_factory.getbasetemp()
    return train_once((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fairseq-trained")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """More threads only get in each other's way in models and sounds that are small."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
