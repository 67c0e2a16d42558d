"""Whose code it is, and whose error: the host library's, fastgen's or the user's.

Provenance of code is read from a function's globals, because `functools.wraps` copies `__module__` from the wrapped
function. After an error in fastgen's work, `Fallback` decides what the caller gets:

| error | what is restored | what the caller gets |
|---|---|---|
| of user code that was called back, or of the original | nothing | the error |
| of fastgen | what `undo` restores, in each context | the original's result or error; in strict mode, fastgen's error |
| KeyboardInterrupt and other errors that are not an `Exception` | nothing | the error |

Tests: tests/test_provenance.py, tests/patching/test_fallback.py
"""

from __future__ import annotations

import functools
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import AbstractContextManager

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


_IS_OWN = "__fastgen_is_own__"


class SwitchedOff(RuntimeError):
    """Raised by a replacement that cannot continue because its patches were reverted; the original does the work."""


class Fallback(AbstractContextManager["Fallback"]):
    """A context of work that the original can do again; the innermost one that an error leaves decides whose it is.

    packages: the host and the package of the replacement. An error is user code's if a frame belongs to none of these,
    fastgen, torch or Python itself. Without packages no user code runs in the context.
    undo: called with an error of fastgen.
    is_callers: whether all errors are the caller's, because user code or the original has run and must not run twice.
    """

    def __init__(self, *packages: str, undo: Callable[[Exception], None] | None = None, is_callers: bool = False):
        self.packages, self.undo, self.is_callers = packages, undo, is_callers

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            vars(error)[_IS_OWN] = self.claims(error)

    def claims(self, error: Exception) -> bool:
        """Whether an error is fastgen's; if so, restores what fastgen has changed."""
        is_own = vars(error).get(_IS_OWN)
        if is_own is None:
            trusted = PYTHON | {"fastgen", "torch", *self.packages}
            frames = traceback.walk_tb(error.__traceback__ if self.packages else None)
            names = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames}
            is_own = isinstance(error, SwitchedOff) or not (self.is_callers or names - trusted)
        if is_own:
            vars(error).pop(_IS_OWN, None)
            if self.undo is not None:
                self.undo(error)
        return is_own
