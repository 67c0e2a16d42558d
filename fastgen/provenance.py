"""Provenance: tells whether a function or class is the host library's or user code.

It reads a function's globals, because `functools.wraps` copies `__module__` from the wrapped function.

Tests: tests/test_provenance.py
"""

from __future__ import annotations

import functools
import sys
import types

TYPE_CHECKING = False  # as in fastgen/__init__.py
if TYPE_CHECKING:
    from typing import Any

# Python's own packages, whose wrappers do not change what they wrap. Not mocks: those are user code.
PYTHON = (sys.stdlib_module_names | {"typing_extensions"}) - {"unittest"}


def packages_of(code: object) -> set[str]:
    """Returns the packages of a class, or of all functions and objects that a call runs through; none for None."""
    packages = set()
    for module in _modules_of(code):
        packages.add(module.partition(".")[0])
    return packages


def comes_with(method: object, kind: type) -> bool:
    """Whether this method is from the module of this class, and is not wrapped."""
    return _modules_of(method) == {kind.__module__}


def _modules_of(code: Any) -> set[str]:
    modules = set()
    while code is not None:
        while type(code) is types.MethodType:  # not isinstance, which is true for wrapt's proxies
            code = code.__func__
        kind = type(code)
        if kind is types.FunctionType:
            module = code.__globals__.get("__name__")
            code = vars(code).get("__wrapped__")
        elif issubclass(kind, (type, types.BuiltinFunctionType)):
            module = code.__module__
            code = None
        elif issubclass(kind, (functools.partial, functools.partialmethod, functools.cached_property)):
            module, code = kind.__module__, code.func
        elif issubclass(kind, property):
            module, code = kind.__module__, code.fget
        else:
            module = kind.__module__
            code = getattr(code, "__wrapped__", None)
        modules.add(str(module))
    return modules
