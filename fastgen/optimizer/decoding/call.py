"""One call of a host's `generate`: its state, from the patch of `generate` to the end of the call.

The patch of `generate` creates it and passes it on; patches that the host's code calls later read it from one context
variable. Its report describes the call, and nothing reads it to decide.

If the library must start again, `Rollback` restores what a forward or a loop has changed. Each part of the state has a
function that restores it: for tensors on modules, random numbers and attributes of objects it is here, for caches in
the folder of their host. A prefill opens a `Rollback`, and so does the test whether a prefix can be computed
separately; a decode step holds one for its loop.

Tests: tests/optimizer/test_report.py, tests/optimizer/transformers/test_generate_threads.py,
tests/optimizer/transformers/test_refused_calls.py, tests/optimizer/transformers/test_static_prefill.py
"""

from __future__ import annotations

import copy
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

from fastgen.optimizer.decoding import cost_model
from fastgen.optimizer.decoding.cost_model import CostModel
from fastgen.optimizer.decoding.guards import KnownCode
from fastgen.optimizer.decoding.model_info import ModelInfo, facts_of
from fastgen.optimizer.decoding.report import LOOP, STEPS, Reason, Report, Stage
from fastgen.patching import Fallback

logger = logging.getLogger("fastgen")

Restore = Callable[[], None]

ENDED_EARLY = Reason("ENDED_EARLY", "the call ended before a capture would have been worthwhile")


@dataclass
class GenerateCall:
    """The state of one call of `generate`.

    inputs, rows: 0 until the prefill has run. host: state that only the patches of one host use. will_capture: whether
    the steps after the prefill are to be captured. is_accelerated: whether something was computed or stored once per
    input, or the loop or a module's forward is fastgen's. on_exit: closed when the call ends, which returns captured
    steps and caches. has_stages: whether other calls of `generate` are stages of this one. costs: the cost model.
    facts: the facts that the call has requested, by model. swapped: the models whose modules have faster forwards in
    this call or in the enclosing one.
    """

    report: Report
    host: Any = None
    inputs: int = 0
    rows: int = 0
    will_capture: bool = False
    is_accelerated: bool = False
    on_exit: ExitStack = field(default_factory=ExitStack)
    has_stages: bool = False
    started: float = field(default_factory=time.perf_counter)
    costs: CostModel = field(default_factory=lambda: cost_model.DEFAULT)
    facts: dict[Any, ModelInfo] = field(default_factory=dict)
    swapped: tuple[Any, ...] = ()
    outer: GenerateCall | None = None

    def __enter__(self) -> GenerateCall:
        self.stage_started = self.started
        self.outer = _current.get()
        self.swapped = () if self.outer is None else self.outer.swapped
        _current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.on_exit.close()
        finally:
            _current.set(self.outer)
            report = self.report
            vars(_reports).update({report.kind: report, "": report})
            report.seconds = time.perf_counter() - self.started
            told = report.replays or report.reason_for(STEPS) or report.reason_for(LOOP)
            if self.rows and report.has_steps and not told:
                report.add_reasons(STEPS, [ENDED_EARLY])
            if self.outer is not None and self.outer.has_stages:
                self.outer.end_stage(f"generate of {report.model}", report)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("generate: %s", report.summary())

    def facts_of(self, model: Any, known_code: KnownCode) -> ModelInfo:
        """Returns the facts of a model, which are checked for changes once per call, see `model_info`."""
        if model not in self.facts:
            self.facts[model] = facts_of(model, known_code)
        return self.facts[model]

    def change_of(self, model: Any, between_steps: bool = False) -> str | None:
        """Returns what user code has changed in this model since the call requested its facts; if so, discards them.

        between_steps: whether the library's own functions are left out, see `Guards.check`.
        """
        facts = self.facts.get(model)
        change = None if facts is None else facts.guards.check(between_steps)
        if change is not None:
            del self.facts[model]
        return change

    def fallback(
        self, part: str, *packages: str, restore: Restore = lambda: None, is_callers: bool = False
    ) -> Fallback:
        """Returns a `Fallback` that calls `restore` after an error of fastgen, and reports it as a reason of `part`."""

        def undo(error: Exception) -> None:
            restore()
            self.is_accelerated = False
            self.leave_to_library(part, [Reason("ERROR", f"{type(error).__name__}: {error}")])

        return Fallback(*packages, undo=undo, is_callers=is_callers)

    def leave_to_library(self, part: str, reasons: Iterable[Reason]) -> None:
        """Reports why the library does this part, so that nothing is shared."""
        self.report.shared.clear()
        self.report.add_reasons(part, reasons)

    def set_rows(self, inputs: int, rows: int) -> None:
        """Stores the numbers of inputs and rows."""
        self.inputs, self.rows = inputs, rows
        self.report.inputs, self.report.rows = inputs, rows

    def end_stage(self, name: str, report: Report | None = None) -> None:
        """Adds a stage that began when the last one ended. report: the report of a nested call, if it was one."""
        now = time.perf_counter()
        self.report.stages.append(Stage(name, now - self.stage_started if report is None else report.seconds, report))
        self.stage_started = now


_current: ContextVar[GenerateCall | None] = ContextVar("fastgen_call", default=None)
_settings: ContextVar[tuple[Any, ...]] = ContextVar("fastgen_settings", default=())
_reports = threading.local()  # the last ones of a thread by the kind of their call, and by "" the last of all

Setting = TypeVar("Setting")


def generate_call(model: str, host: Any = None) -> GenerateCall:
    """Returns a context in which `current_call()` is a new call of `generate` of a model of this class."""
    return GenerateCall(Report(model), host)


def end_stage(name: str) -> None:
    """Ends a stage of the current call, if it has stages."""
    if (call := _current.get()) is not None and call.has_stages:
        call.end_stage(name)


current_call = _current.get  # the innermost running call, or None outside of calls


@contextmanager
def setting(value: object) -> Iterator[None]:
    """Applies a setting, an object of a class of settings, to the calls in this context."""
    token = _settings.set((value, *_settings.get()))
    try:
        yield
    finally:
        _settings.reset(token)


def settings_of(kind: type[Setting]) -> Iterator[Setting]:
    """Yields the settings of one class of the enclosing contexts, the innermost first."""
    return filter(kind.__instancecheck__, _settings.get())


def count(kernel: str) -> None:
    """Counts a call of a kernel in the report of the current call, if any."""
    if (call := _current.get()) is not None:
        call.report.kernels[kernel] += 1


def add_reasons(part: str, reasons: Iterable[Reason]) -> None:
    """Adds reasons to the report of the current call, if any."""
    if (call := _current.get()) is not None:
        call.report.add_reasons(part, reasons)


def last_report(kind: str | None = None) -> Report | None:
    """Returns the report of this thread's last finished call, or None. kind: one of `KINDS`; None: of any kind."""
    return vars(_reports).get(kind or "")


# Restoring the state for the library.


def all_of(*undos: Restore) -> Restore:
    """Returns a function that calls all of these, which may be called more than once."""

    def restore() -> None:
        for undo in undos:
            undo()

    return restore


class Rollback(ExitStack):
    """A context that calls the functions registered with `callback` when it ends, unless `keep` was called."""

    keep, restore = ExitStack.pop_all, ExitStack.close


def undo_of_tensors(modules: Iterable[nn.Module]) -> Restore:
    """Returns a function that restores the tensors that modules now hold as plain attributes and as buffers.

    Writes in place are not undone: for another number of rows a forward allocates new tensors.
    Other attributes are not restored either: the library records there where it has registered hooks.
    """
    snapshots = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]

    def restore() -> None:
        for module, attributes, buffers in snapshots:
            for name, value in tuple(vars(module).items()):
                if isinstance(value, Tensor) or isinstance(attributes.get(name), Tensor):
                    vars(module)[name] = attributes.get(name)
            module._buffers.clear()
            module._buffers.update(buffers)

    return restore


def undo_of_random_numbers(only_torch: bool = False) -> Restore:
    """Returns a function that restores the present random states of torch, numpy and Python.

    only_torch: saves only torch's, in 2 µs instead of 100.
    """
    undos: list[Restore] = [partial(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized():
        undos.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if not only_torch:
        undos.append(partial(numpy.random.set_state, numpy.random.get_state()))
        undos.append(partial(random.setstate, random.getstate()))
    return all_of(*undos)


def undo_of_attributes(objects: Iterable[Any]) -> Restore:
    """Returns a function that restores the present attributes and classes of objects, and copied dicts and lists."""
    states = []
    for changed in objects:
        attributes = getattr(changed, "__dict__", {})
        snapshot = dict(attributes)
        for name, value in attributes.items():
            if type(value) in (dict, list):
                snapshot[name] = copy.copy(value)
        states.append((changed, type(changed), attributes, snapshot))

    def restore() -> None:
        for changed, kind, attributes, snapshot in states:
            attributes.clear()
            attributes.update(snapshot)
            if type(changed) is not kind:
                changed.__class__ = kind

    return restore
