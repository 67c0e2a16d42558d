"""Provenance checks: is a function or class the host library's, or the program's?

A function's globals tell, because `functools.wraps` gives a wrapper the `__module__` of what it wraps.

Tests: tests/test_provenance.py
"""

from __future__ import annotations

import functools
import sys
import traceback
import types

TYPE_CHECKING = False  # as in fastgen/__init__.py
if TYPE_CHECKING:
    from typing import Any

# Python's own packages, whose wrappers are as good as what they wrap; mocks stand for what a program puts there.
PYTHON = (sys.stdlib_module_names | {"typing_extensions"}) - {"unittest"}


def packages_of(code: object) -> set[str]:
    """The packages of a class, or of all functions and objects that a call runs through; none for None."""
    packages = set()
    for module in _modules_of(code):
        packages.add(module.partition(".")[0])
    return packages


def comes_with(method: object, kind: type) -> bool:
    """Whether this method is from the module of this class, and nothing was put around it."""
    return _modules_of(method) == {kind.__module__}


def is_from_elsewhere(error: Exception, *packages: str) -> bool:
    """Whether code of the program, called back by a replacement, had a part in the error: then it is not fastgen's.

    Only frames inside of the replacement count, of code that is not of these packages, fastgen, torch or Python itself.
    """
    known = PYTHON | {"fastgen", "torch", *packages}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").partition(".")[0] not in known for frame, _ in frames)


def _modules_of(code: Any) -> set[str]:
    modules = set()
    while code is not None:
        while type(code) is types.MethodType:  # not isinstance, to which wrapt's proxies say that they are one
            code = code.__func__
        kind = type(code)
        if kind is types.FunctionType:
            module, code = code.__globals__.get("__name__"), vars(code).get("__wrapped__")
        elif issubclass(kind, (type, types.BuiltinFunctionType)):
            module, code = code.__module__, None
        elif issubclass(kind, (functools.partial, functools.partialmethod, functools.cached_property)):
            module, code = kind.__module__, code.func
        elif issubclass(kind, property):
            module, code = kind.__module__, code.fget
        else:
            module, code = kind.__module__, getattr(code, "__wrapped__", None)
        modules.add(str(module))
    return modules
