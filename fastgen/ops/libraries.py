"""The shared libraries of `csrc/`, bound with ctypes.

They hold no torch header, so that they are built wherever there is a compiler, whichever torch is installed later.

Tests: tests/ops/test_no_repeat_ngram.py, tests/ops/test_no_repeat_ngram_build.py
"""

from __future__ import annotations

import ctypes
import functools
from importlib.util import find_spec


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """The library with this name of a module. Raises OSError if there is none or it cannot be loaded."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise OSError("not built")
    return ctypes.CDLL(spec.origin)


def load_reasons(name: str) -> list[str]:
    """Why a library cannot be used; empty if it can."""
    try:
        load(name)
    except OSError as error:
        return [str(error)]
    return []
