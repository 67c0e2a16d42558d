"""Whose error it is, and what the caller gets after an error in fastgen's work.

| error | what is restored | what the caller gets |
|---|---|---|
| of user code that was called back, or of the original | nothing | the error |
| of fastgen | what `undo` restores, in each context | the original's result or error; in strict mode, fastgen's error |
| KeyboardInterrupt and others that are no `Exception` | nothing | the error |

Tests: tests/patching/test_fallback.py
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

from fastgen.provenance import PYTHON

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
