"""Sharing that does not ask whether it pays: the models of the tests are too small for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastgen.testing import configured


@contextmanager
def sharing(share: str) -> Iterator[None]:
    """As under FASTGEN_SHARE: auto, always or never."""
    with configured(share=share):
        yield
