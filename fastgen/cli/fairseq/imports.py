"""Importing fairseq: what to install where that fails, and without garbage collections."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from fastgen.cli.errors import InputError
from fastgen.optimizer.fairseq.installation import INSTALL, import_hint


def import_fairseq() -> None:
    """Imports fairseq; raises InputError with what to install where there is none, or none that this Python imports."""
    if find_spec("fairseq") is None:
        raise InputError(f"needs the package fairseq: {INSTALL}")
    try:
        importlib.import_module("fairseq")
    except ValueError as error:
        hint = import_hint(error)
        if not hint:
            raise
        raise InputError(hint) from error


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collections: of what an import makes nothing is garbage, and looking takes a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
