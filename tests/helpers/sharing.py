"""Sharing that does not ask whether it pays: the models of the tests are too small for that."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from fastgen.optimizer.decoding import gain


@contextmanager
def sharing(share: str) -> Iterator[None]:
    """As under FASTGEN_SHARE: auto, always or never."""
    before = gain.CONFIG
    gain.CONFIG = dataclasses.replace(before, share=share)
    try:
        yield
    finally:
        gain.CONFIG = before
