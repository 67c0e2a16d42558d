"""`fastgen.verify`: one call of a host's generate without fastgen and with it, what differs first, time and memory.

The parts that know a host are `TransformersCall` (optimizer/transformers) and `FairseqCall` (optimizer/fairseq).

Tests: tests/optimizer/test_verify.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fastgen.optimizer.decoding.call import last_report
from fastgen.optimizer.decoding.report import Report
from fastgen.optimizer.decoding.verify_once import Difference, RandomStates
from fastgen.patching import disabled


class HostCall(Protocol):
    """One call of a host's generate, which can be repeated."""

    host: str

    def run(self) -> Any:
        """What the call returns."""

    def rows_of(self, output: Any) -> int:
        """How many sequences an output has."""

    def difference(self, ours: Any, theirs: Any) -> Difference | None:
        """Where two outputs differ first; None if they do not."""


@dataclass(frozen=True)
class Run:
    """seconds: of the second call, by the host's clock with the device's work done. memory: the most bytes that this
    call took beyond what was there before, on the GPU or, under Linux, of the process; None where it is not known.
    """

    seconds: float
    memory: int | None

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s" + ("" if self.memory is None else f", {self.memory / 1e6:.0f} MB")


@dataclass(frozen=True)
class Verification:
    """What `fastgen.verify` found. rows: sequences that were compared. report: of the call with fastgen."""

    host: str
    rows: int
    difference: Difference | None
    theirs: Run
    ours: Run
    report: Report | None

    @property
    def equal(self) -> bool:
        return self.difference is None

    @property
    def speedup(self) -> float:
        """How many times as fast as the library the call is with fastgen."""
        return self.theirs.seconds / self.ours.seconds

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {
            "equal": self.equal,
            "rows": self.rows,
            "difference": None if self.difference is None else self.difference.as_dict(),
            self.host: vars(self.theirs),
            "fastgen": vars(self.ours),
            "speedup": self.speedup,
            "report": None if self.report is None else self.report.as_dict(),
        }

    def __repr__(self) -> str:
        verdict = f"equal: {self.rows} rows" if self.difference is None else f"different: {self.difference}"
        lines = [verdict, f"  {self.host}: {self.theirs}", f"  fastgen: {self.ours}, {self.speedup:.2f} times as fast"]
        report = ["fastgen was not asked"] if self.report is None else repr(self.report).splitlines()
        return "\n".join([*lines, *(f"  {line}" for line in report)])


def verify(model: Any, inputs: Any, **generate_kwargs: Any) -> Verification:
    """See `fastgen.verify`."""
    from fastgen import enabled

    call = _host_call(model, inputs, generate_kwargs)
    states, before = RandomStates.current(), last_report()
    try:
        theirs = _run(call, disabled(), states)[0]
        ours = _run(call, enabled(), states)[0]  # measures products and captures steps, which is not timed
        _, their_run = _run(call, disabled(), states)
        _, our_run = _run(call, enabled(), states)
    finally:
        states.restore()
    report = last_report()
    with disabled():
        difference = call.difference(ours, theirs)
    return Verification(
        call.host, call.rows_of(theirs), difference, their_run, our_run, None if report is before else report
    )


def _host_call(model: Any, inputs: Any, generate_kwargs: dict[str, Any]) -> HostCall:
    hosts = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if "fairseq" in hosts and hasattr(model, "search"):
        from fastgen.optimizer.fairseq.verify import FairseqCall

        return FairseqCall(model, inputs, generate_kwargs)
    if callable(getattr(model, "generate", None)):
        from fastgen.optimizer.transformers.verification import TransformersCall

        return TransformersCall(model, inputs, generate_kwargs)
    raise TypeError(
        f"model is a {type(model).__name__} (accepted: a model of transformers with generate, a generator of fairseq)"
    )


def _run(call: HostCall, context: AbstractContextManager[Any], states: RandomStates) -> tuple[Any, Run]:
    with context:
        states.restore()
        peak = _peak_memory()
        started = time.perf_counter()
        output = call.run()
        _synchronize()
        seconds = time.perf_counter() - started
        return output, Run(seconds, peak())


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _peak_memory() -> Callable[[], int | None]:
    """A function that returns the most bytes that were taken since now, beyond those that are taken now."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return lambda: torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the most that the process has held
        resident = _status_bytes("VmRSS")
    except OSError:  # not Linux, or a container that forbids it
        return lambda: None
    return lambda: max(_status_bytes("VmHWM") - resident, 0)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
