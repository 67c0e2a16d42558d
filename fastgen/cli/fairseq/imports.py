"""Importing fairseq: what to install where that fails, and without a second of libraries that only training needs."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fastgen.cli.errors import InputError
from fastgen.optimizer.fairseq.installation import INSTALL, import_hint

# fairseq imports functions from these for two metrics of training (sentence_prediction, audio_classification), and
# scipy's statistics alone take as long to import as all of fairseq.
DEFERRED = ("sklearn", "sklearn.metrics", "scipy.stats")


def import_fairseq() -> None:
    """Imports fairseq; raises InputError with what to install where there is none, or none that this Python imports."""
    if find_spec("fairseq") is None:
        raise InputError(f"needs the package fairseq: {INSTALL}")
    try:
        with _deferred(DEFERRED):
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


@contextmanager
def _deferred(names: tuple[str, ...]) -> Iterator[None]:
    """Functions that are imported from these modules inside the block import them when they are first called.

    Only while fairseq is imported: whoever imports one of them afterwards gets the real one.
    """
    modules = {
        name: _DeferredModule(name) for name in names if name not in sys.modules and find_spec(name.split(".")[0])
    }
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


class _DeferredModule(ModuleType):
    """Stands in for a module; its attributes are functions that call the module's own."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        full_name = f"{self.__name__}.{name}"
        return sys.modules[full_name] if full_name in sys.modules else _deferred_function(self.__name__, name)


def _deferred_function(module: str, name: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    return function
