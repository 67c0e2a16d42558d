"""One call of a host's `generate`: what its patches hand from one to the next.

Made by the patch of `generate`, found by the others through one context variable, and gone when the call ends. What is
told of the call is its report, which nobody reads to decide anything.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastgen.optimizer.report import Report

logger = logging.getLogger("fastgen")


@dataclass
class Generation:
    """inputs, rows: 0 until fastgen comes to see them.

    user_gave_cache: the caller passed one. own_code: code that is not the host's works with the cache. keep: what is
    equal is kept once wherever it can be (True), nowhere (False), or where it pays (None). call: what the call was
    given, where it has to be compared with the original before anything is shared. caches: those with shared states, as
    long as they live. shares: something was computed or kept once per input, or the loop is fastgen's. recorded: the
    decode steps that are recorded, to be told when the call ends. until_end: contexts that are left when it ends.
    beam_scores: of the best hypotheses that beam search has found, `[inputs, num_beams]`, the best first.
    """

    report: Report
    inputs: int = 0
    rows: int = 0
    user_gave_cache: bool = False
    own_code: bool = False
    keep: bool | None = None
    call: Any = None
    caches: list[weakref.ref[Any]] = field(default_factory=list)
    shares: bool = False
    recorded: Any = None
    until_end: ExitStack = field(default_factory=ExitStack)
    beam_scores: Any = None

    @property
    def fan_out(self) -> int:
        """Rows (beams, samples or repetitions) of each input."""
        return self.rows // self.inputs

    def sees(self, inputs: int, rows: int) -> None:
        """Notes how many inputs and rows there are."""
        self.inputs, self.rows = inputs, rows
        self.report.inputs, self.report.rows = inputs, rows


_current: ContextVar[Generation | None] = ContextVar("fastgen_generation", default=None)


class _Thread(threading.local):
    last: Report | None = None


_thread = _Thread()


@contextmanager
def generating(model: str) -> Iterator[Generation]:
    """Inside this context `current()` is a new call of the `generate` of a model of this class."""
    generation = Generation(Report(model))
    token = _current.set(generation)
    try:
        yield generation
    finally:
        if generation.recorded is not None:
            generation.recorded.end()
        generation.until_end.close()
        _current.reset(token)
        _thread.last = generation.report
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("generate: %s", generation.report.summary())


def current() -> Generation | None:
    """The innermost call that runs, or None outside of one."""
    return _current.get()


def count(kernel: str) -> None:
    """Counts a call of a kernel in the report of the call that runs, if one does."""
    if (generation := _current.get()) is not None:
        generation.report.usages[0][kernel] += 1


def fell_back(reasons: list[str]) -> None:
    """As `Report.fell_back`, of the call that runs, if one does."""
    if (generation := _current.get()) is not None:
        generation.report.fell_back(reasons)


def last_report() -> Report | None:
    """Of the last call that ended in this thread, or None."""
    return _thread.last
