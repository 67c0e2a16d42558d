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

# The token in place of those that only longer sequences have.
ABSENT = -1

# The keys of comparisons without a difference.
_verified: set[object] = set()


class NotComparable(Exception):
    """A comparison shows nothing: the key stays unverified, and nothing is refused."""


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    step: the decode step, from 0 on; row: the row of the batch. ours, theirs: the scores there, of fastgen and of the
    library, if known.
    """

    text: str
    step: int | None = None
    row: int | None = None
    ours: float | None = None
    theirs: float | None = None

    @property
    def gap(self) -> float | None:
        """The absolute difference of the two scores."""
        return None if self.ours is None or self.theirs is None else abs(self.ours - self.theirs)

    def __str__(self) -> str:
        if self.gap is None:
            return self.text
        return f"{self.text}: score {self.ours:.6g} instead of {self.theirs:.6g}, gap {self.gap:.2g}"


def first_token_difference(ours: Tensor, theirs: Tensor, start: int) -> Difference | None:
    """Returns the first difference of tokens `[rows, length]` that are generated from column `start` on, or None."""
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
    """Whether a comparison for this key has shown no difference, see `verify_once`."""
    return key in _verified


def verify_once(key: object, compare: Callable[[], Difference | None], refuse: Callable[[Difference], None]) -> None:
    """Compares fastgen with the library, unless an earlier comparison for this key showed no difference.

    key: hashable; identifies what the comparison is valid for. compare: returns the difference, if any; may raise
    `NotComparable`. refuse: called with the difference; it must prevent that such a call gets here again.
    """
    if key in _verified:
        return
    different = compare()
    if different is None:
        _verified.add(key)
    else:
        refuse(different)


class HostCall(Protocol):
    """A call of a host's generate that can be repeated."""

    host: str

    def run(self) -> Any:
        """Runs the call and returns its output."""

    def rows_of(self, output: Any) -> int:
        """Returns the number of sequences in an output."""

    def difference(self, ours: Any, theirs: Any) -> Difference | None:
        """Returns the first difference of two outputs, or None."""


@dataclass(frozen=True)
class Run:
    """The cost of a call.

    seconds: of the second call, by the host's clock, after the device has finished. memory: the peak of bytes that this
    call took in addition to those before it, on the GPU or, under Linux, in the process; None if it is not known.
    """

    seconds: float
    memory: int | None

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s" + ("" if self.memory is None else f", {self.memory / 1e6:.0f} MB")


@dataclass(frozen=True)
class Verification:
    """The result of `fastgen.verify`. rows: the number of compared sequences. report: of the call with fastgen."""

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
        """The library's seconds divided by fastgen's."""
        return self.theirs.seconds / self.ours.seconds

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON: strings, numbers, and lists and dictionaries of them."""
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
    """Does the work of `fastgen.verify`, which passes `fastgen.enabled`."""
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
        ours = run(enabled())[0]  # also measures products and captures steps, which is not timed
        their_run, our_run = run(disabled())[1], run(enabled())[1]
    finally:
        restore()
    report = None if last_report() is before else last_report()
    with disabled():
        difference = call.difference(ours, theirs)
    return Verification(call.host, call.rows_of(theirs), difference, their_run, our_run, report)


def _peak_memory() -> Callable[[], int | None]:
    """Returns a function that returns the peak of allocated bytes since now, minus those allocated now."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return lambda: torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of the process
        resident = _status_bytes("VmRSS")
    except OSError:  # not Linux, or a container that forbids it
        return lambda: None
    return lambda: max(_status_bytes("VmHWM") - resident, 0)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
