"""Callbacks after the import of a host's module, without making `import fastgen` slower.

wrapt's post-import hooks do the work. Importing wrapt takes longer than the rest of `import fastgen`, so it waits until
the host, whose import takes seconds anyway, is first looked up.

Tests: tests/patching/test_patching.py, tests/patching/test_patching_conflicts.py
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False  # as in fastgen/__init__.py
if TYPE_CHECKING:
    from typing import Any

# The only lock of the patch layer; it is free in forked workers. Never held while a host is imported or a host's
# function runs, because a hook takes it while its thread holds an import lock.
LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)

Hook = Callable[[ModuleType], None]


def call_after_import(module: str, hook: Hook) -> None:
    """Calls `hook` with the module after its import, or immediately if it is imported already."""
    host = module.partition(".")[0]
    with LOCK:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        if host not in sys.modules and host not in _finder.looked_for:
            _finder.waiting.setdefault(host, []).append((module, hook))
            return
    _register(module, hook)


def explain_failure(host: str, explain: Callable[[Exception], str]) -> None:
    """Logs what `explain` returns, if anything, when the import of `host` fails; the error is raised unchanged."""
    _finder.explanations[host] = explain


def _register(module: str, hook: Hook) -> None:
    from wrapt import register_post_import_hook

    register_post_import_hook(hook, module)


class _HostFinder:
    """Registers the hooks of a host with wrapt when the host is first looked up.

    It stays in `sys.meta_path` afterwards, without effect: another thread may be iterating over that list.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[tuple[str, Hook]]] = {}
        self.looked_for: set[str] = set()
        self.explanations: dict[str, Callable[[Exception], str]] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        with LOCK:
            hooks = self.waiting.pop(fullname, [])
            self.looked_for.add(fullname)
        try:
            for module, hook in hooks:
                _register(module, hook)
        except Exception:
            logging.getLogger("fastgen").warning("fastgen cannot follow the import of %s", fullname, exc_info=True)
        from importlib.util import find_spec

        spec = find_spec(fullname)  # again, through the finder that wrapt has put first
        if spec is not None and spec.loader is not None and fullname in self.explanations:
            spec.loader = _ExplainingLoader(  # type: ignore[assignment]  # it forwards attributes
                spec.loader, self.explanations[fullname]
            )
        return spec


class _ExplainingLoader:
    """Wraps a loader, and logs an explanation of an import error before it is raised."""

    def __init__(self, loader: Any, explain: Callable[[Exception], str]) -> None:
        self._loader = loader
        self._explain = explain

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except Exception as error:
            if explanation := self._explain(error):
                logging.getLogger("fastgen").warning("%s", explanation)
            raise

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


_finder = _HostFinder()
