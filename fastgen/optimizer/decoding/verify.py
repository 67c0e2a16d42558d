"""Comparison of fastgen with the library: `verify_once` on first use, and `fastgen.verify` of one call.

Tests: tests/optimizer/test_verify.py, tests/optimizer/transformers/test_verification.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.optimizer.decoding.call import last_report, undo_of_random_numbers
from fastgen.optimizer.decoding.report import Report
from fastgen.patching import disabled

# In place of a token where the other sequences are longer.
ABSENT = -1

# The keys of what was compared and did not differ.
_verified: set[object] = set()


class NotComparable(Exception):
    """A comparison shows nothing: the key stays unverified, and nothing is refused."""


@dataclass(frozen=True)
class Difference:
    """Where two runs differ first.

    step: of decoding, from 0 on; row: of the batch. ours, theirs: the scores there, of fastgen and of the library, as
    far as they are known.
    """

    text: str
    step: int | None = None
    row: int | None = None
    ours: float | None = None
    theirs: float | None = None

    @property
    def gap(self) -> float | None:
        """How far the two scores are apart."""
        return None if self.ours is None or self.theirs is None else abs(self.ours - self.theirs)

    def __str__(self) -> str:
        if self.gap is None:
            return self.text
        return f"{self.text}: score {self.ours:.6g} instead of {self.theirs:.6g}, gap {self.gap:.2g}"


def first_token_difference(ours: Tensor, theirs: Tensor, start: int) -> Difference | None:
    """Returns the earliest difference of tokens `[rows, length]` that are generated from column `start` on, or None."""
    if ours.shape[0] != theirs.shape[0]:
        return Difference(f"{ours.shape[0]} rows instead of {theirs.shape[0]}")
    length = max(ours.shape[1], theirs.shape[1])
    ours, theirs = (functional.pad(tokens, (0, length - tokens.shape[1]), value=ABSENT) for tokens in (ours, theirs))
    different = (ours != theirs).nonzero()  # [differences, 2]
    if not len(different):
        return None
    row, column = different[different[:, 1].argmin()].tolist()
    tokens = ["the end" if token == ABSENT else f"token {token}" for token in (ours[row, column], theirs[row, column])]
    text = f"step {column - start} of row {row} gives {tokens[0]} instead of {tokens[1]}"
    return Difference(text, column - start, row)


def is_verified(key: object) -> bool:
    return key in _verified


def verify_once(key: object, compare: Callable[[], Difference | None], refuse: Callable[[Difference], None]) -> None:
    """Compares fastgen with the library, unless that was done before for this key and nothing differed.

    key: hashable; what the comparison holds for. compare: returns what differs; may raise `NotComparable`. refuse:
    called with that; it has to see to it that the call does not come here again.
    """
    if key in _verified:
        return
    different = compare()
    if different is None:
        _verified.add(key)
    else:
        refuse(different)


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
        difference = None if self.difference is None else {**vars(self.difference), "gap": self.difference.gap}
        return {
            "equal": self.equal,
            "rows": self.rows,
            "difference": difference,
            self.host: vars(self.theirs),
            "fastgen": vars(self.ours),
            "speedup": self.speedup,
            "report": None if self.report is None else self.report.as_dict(),
        }

    def __repr__(self) -> str:
        verdict = f"equal: {self.rows} rows" if self.difference is None else f"different: {self.difference}"
        lines = [verdict, f"  {self.host}: {self.theirs}", f"  fastgen: {self.ours}, {self.speedup:.2f} times as fast"]
        unseen = "the call did not go through fastgen: see print(fastgen.status())"
        report = [unseen] if self.report is None else repr(self.report).splitlines()
        return "\n".join([*lines, *(f"  {line}" for line in report)])


def verify(call: HostCall, enabled: Callable[[], AbstractContextManager[Any]]) -> Verification:
    """See `fastgen.verify`, which gives `fastgen.enabled`."""
    restore, before = undo_of_random_numbers(), last_report()

    def run(context: AbstractContextManager[Any]) -> tuple[Any, Run]:
        with context:
            restore()
            peak = _peak_memory()
            started = time.perf_counter()
            output = call.run()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            return output, Run(time.perf_counter() - started, peak())

    try:
        theirs = run(disabled())[0]
        ours = run(enabled())[0]  # measures products and captures steps, which is not timed
        their_run, our_run = run(disabled())[1], run(enabled())[1]
    finally:
        restore()
    report = None if last_report() is before else last_report()
    with disabled():
        difference = call.difference(ours, theirs)
    return Verification(call.host, call.rows_of(theirs), difference, their_run, our_run, report)


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
