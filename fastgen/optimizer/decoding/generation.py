"""One call of a host's `generate`: what its patches hand from one to the next.

Made by the patch of `generate`, found by the others through one context variable, and gone when the call ends. What is
told of the call is its report, which nobody reads to decide anything.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastgen.optimizer.report import Report, Stage

logger = logging.getLogger("fastgen")


@dataclass
class Generation:
    """inputs, rows: 0 until fastgen comes to see them.

    user_gave_cache: the caller passed one. own_code: code that is not the host's works with the cache. keep: what is
    equal is kept once wherever it can be (True), nowhere (False), or where it pays (None). call: what the call was
    given, where it has to be compared with the original before anything is shared. caches: those with shared states, as
    long as they live. shares: something was computed or kept once per input, or the loop is fastgen's. recorded: the
    decode steps that are recorded, to be told when the call ends. until_end: contexts that are left when it ends.
    has_stages: other calls of `generate` are stages of this one.
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
    has_stages: bool = False
    begun: float = field(default_factory=time.perf_counter)
    beam_scores: Any = None

    @property
    def fan_out(self) -> int:
        """Rows (beams, samples or repetitions) of each input."""
        return self.rows // self.inputs

    def sees(self, inputs: int, rows: int) -> None:
        """Notes how many inputs and rows there are."""
        self.inputs, self.rows = inputs, rows
        self.report.inputs, self.report.rows = inputs, rows

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.begun

    def ends_stage(self, name: str) -> None:
        """Notes that what this call did since its last stage was one of this name."""
        self.report.stages.append(Stage(name, self.seconds - sum(stage.seconds for stage in self.report.stages)))


_current: ContextVar[Generation | None] = ContextVar("fastgen_generation", default=None)


class _Thread(threading.local):
    last: Report | None = None


_thread = _Thread()


@contextmanager
def generating(model: str, has_stages: bool = False) -> Iterator[Generation]:
    """Inside this context `current()` is a new call of the `generate` of a model of this class."""
    outer = _current.get()
    generation = Generation(Report(model), has_stages=has_stages)
    token = _current.set(generation)
    try:
        yield generation
    finally:
        if generation.recorded is not None:
            generation.recorded.end()
        generation.until_end.close()
        _current.reset(token)
        report = _thread.last = generation.report
        report.seconds = generation.seconds
        if outer is not None and outer.has_stages:
            outer.report.stages.append(Stage(f"generate of {model}", report.seconds, report=report))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("generate: %s", generation.report.summary())


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Inside this context, a call that has stages is in the one of this name."""
    generation = _current.get()
    if generation is None or not generation.has_stages:
        yield
        return
    begun = time.perf_counter()
    stage = Stage(name, 0.0)
    generation.report.stages.append(stage)
    try:
        yield
    finally:
        stage.seconds = time.perf_counter() - begun


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
