"""One call of a host's `generate`: its state, from the patch of `generate` to the end of the call.

The patch of `generate` makes it and passes it on; patches behind the host's code find it through one context variable.
Its report describes the call, and nothing reads it to decide.

Tests: tests/optimizer/test_report.py, tests/optimizer/transformers/test_generate_threads.py
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastgen.optimizer.decoding import cost_model
from fastgen.optimizer.decoding.cost_model import CostModel
from fastgen.optimizer.decoding.model_facts import ModelFacts, facts_of
from fastgen.optimizer.decoding.report import LOOP, STEPS, Decision, Reason, Report, Stage
from fastgen.optimizer.decoding.user_code import KnownCode

logger = logging.getLogger("fastgen")

ENDED_EARLY = Decision("ENDED_EARLY", "the call ended before a capture would have paid")


@dataclass
class GenerateCall:
    """inputs, rows: 0 until the prefill has run.

    user_cache: the caller passed a cache. user_code: code that is not the host's works with the cache.
    has_callbacks: the caller passed what is called between steps, which may change the model. share:
    what equal rows have in common is stored once wherever it can be (True), nowhere (False), or where it pays (None).
    will_capture: the steps after the prefill are meant to be captured.
    to_verify: the call's arguments, where it has to be compared with the original before anything is shared.
    is_accelerated: something was computed or stored once per input, or the loop is fastgen's. on_exit: closed when the
    call ends: captured steps and caches are given back. has_stages: other calls of `generate` are stages of this one.
    beam_scores: of the best hypotheses that beam search has found, `[inputs, num_beams]`, the best first.
    staged_seconds: those of the stages that have ended. costs: decides what is worthwhile. facts: of the models that
    the call has asked about. checks: the host's `CallChecks` of its last loop.
    """

    report: Report
    inputs: int = 0
    rows: int = 0
    user_cache: bool = False
    user_code: bool = False
    has_callbacks: bool = False
    share: bool | None = None
    will_capture: bool = False
    to_verify: Any = None
    is_accelerated: bool = False
    on_exit: ExitStack = field(default_factory=ExitStack)
    has_stages: bool = False
    started: float = field(default_factory=time.perf_counter)
    beam_scores: Any = None
    staged_seconds: float = 0.0
    costs: CostModel = field(default_factory=cost_model.of_new_call)
    facts: dict[Any, ModelFacts] = field(default_factory=dict)
    checks: Any = None
    _outer: GenerateCall | None = None

    def __enter__(self) -> GenerateCall:
        self._outer = _current.get()
        _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.on_exit.close()
        finally:
            _current.set(self._outer)
            report = _thread.last = self.report
            report.seconds = self.seconds
            told = report.replays or report.reason_for(STEPS) or report.reason_for(LOOP)
            if self.rows and report.has_steps and not told:
                report.add_reasons(STEPS, [ENDED_EARLY])
            if self._outer is not None and self._outer.has_stages:
                self._outer.report.stages.append(Stage(f"generate of {report.model}", report.seconds, report))
                self._outer.staged_seconds = self._outer.seconds
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("generate: %s", report.summary())

    def facts_of(self, model: Any, known: KnownCode) -> ModelFacts:
        """What is known of this model, compared once in this call with what it was before, see `model_facts`."""
        if model not in self.facts:
            self.facts[model] = facts_of(model, known)
        return self.facts[model]

    def has_changed(self, model: Any) -> bool:
        """Whether the program has changed this model since the call has asked about it; then it is asked about anew."""
        facts = self.facts.get(model)
        if facts is None or facts.is_current():
            return False
        del self.facts[model]
        return True

    @property
    def rows_per_input(self) -> int:
        """Rows (beams, samples or repetitions) of each input."""
        return self.rows // self.inputs

    def set_rows(self, inputs: int, rows: int) -> None:
        """Notes how many inputs and rows there are."""
        self.inputs, self.rows = inputs, rows
        self.report.inputs, self.report.rows = inputs, rows

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.started

    def end_stage(self, name: str) -> None:
        """Notes that what this call did since its last stage was one of this name."""
        seconds = self.seconds
        self.report.stages.append(Stage(name, seconds - self.staged_seconds))
        self.staged_seconds = seconds


_current: ContextVar[GenerateCall | None] = ContextVar("fastgen_call", default=None)
_thread = threading.local()  # last: the report of its last call


def generate_call(model: str, has_stages: bool = False, has_steps: bool = True) -> GenerateCall:
    """A context inside of which `current_call()` is a new call of the `generate` of a model of this class."""
    return GenerateCall(Report(model, has_steps=has_steps), has_stages=has_stages)


def end_stage(name: str) -> None:
    """As `GenerateCall.end_stage`, of the call that runs, if it has stages."""
    if (call := _current.get()) is not None and call.has_stages:
        call.end_stage(name)


def current_call() -> GenerateCall | None:
    """The innermost call that runs, or None outside of one."""
    return _current.get()


def costs() -> CostModel:
    """The cost model of the call that runs, or of those that begin now."""
    call = _current.get()
    return cost_model.of_new_call() if call is None else call.costs


def count(kernel: str) -> None:
    """Counts a call of a kernel in the report of the call that runs, if one does."""
    if (call := _current.get()) is not None:
        call.report.kernels[kernel] += 1


def add_reasons(part: str, reasons: Iterable[Reason]) -> None:
    """As `Report.add_reasons`, of the call that runs, if one does."""
    if (call := _current.get()) is not None:
        call.report.add_reasons(part, reasons)


def last_report() -> Report | None:
    """Of the last call that ended in this thread, or None."""
    return getattr(_thread, "last", None)
