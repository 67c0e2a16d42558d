"""`fastgen.verify`: compares one call with and without fastgen, its output, seconds and memory.

Tests: tests/optimizer/test_verify.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional

from fastgen.optimizer.decoding.call import last_report, undo_of_random_numbers
from fastgen.optimizer.decoding.report import Report
from fastgen.optimizer.decoding.timing import Load, Ratio, describe_load, in_turns, peak_memory, ratio_of
from fastgen.patching import disabled
from fastgen.reasons import counted

# The token in place of those that only longer sequences have.
ABSENT = -1


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
    """The cost of a call. turns: its seconds in each turn. memory: the bytes that it adds at its peak, if known."""

    turns: list[float]
    memory: int | None

    @property
    def seconds(self) -> float:
        """The median of the turns."""
        return statistics.median(self.turns)

    def as_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "turns": self.turns, "memory": self.memory}

    def __str__(self) -> str:
        seconds = f"{self.seconds:.3f} s ({min(self.turns):.3f} to {max(self.turns):.3f})"
        if self.memory is None:
            return seconds
        return f"{seconds}, " + ("under 1 MB" if self.memory < 1e6 else f"{self.memory / 1e6:.0f} MB")


@dataclass(frozen=True)
class Verification:
    """The result of `fastgen.verify`.

    rows: the number of compared sequences. other_load: the share of the CPUs that other programs took, if known.
    report: of the last call with fastgen.
    """

    host: str
    rows: int
    difference: Difference | None
    theirs: Run
    ours: Run
    other_load: float | None
    report: Report | None

    @property
    def equal(self) -> bool:
        return self.difference is None

    @property
    def ratio(self) -> Ratio | str:
        """How many times as fast fastgen is, or the reason that there is no ratio."""
        return ratio_of(self.theirs.turns, self.ours.turns)

    @property
    def speedup(self) -> float | None:
        """The median ratio of the library's seconds to fastgen's; None if the turns allow none."""
        return None if isinstance(self.ratio, str) else self.ratio.median

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON: strings, numbers, and lists and dictionaries of them."""
        difference = None if self.difference is None else {**vars(self.difference), "gap": self.difference.gap}
        return {
            "equal": self.equal,
            "rows": self.rows,
            "difference": difference,
            self.host: self.theirs.as_dict(),
            "fastgen": self.ours.as_dict(),
            "speedup": self.speedup,
            "others": self.other_load,
            "report": None if self.report is None else self.report.as_dict(),
        }

    def __repr__(self) -> str:
        verdict = f"equal: {counted(self.rows, 'row')}" if self.difference is None else f"different: {self.difference}"
        summary = "; ".join(filter(None, [str(self.ratio), describe_load(self.other_load)]))
        unseen = "the call did not go through fastgen: see print(fastgen.status())"
        report = [unseen] if self.report is None else repr(self.report).splitlines()
        lines = [f"{self.host}: {self.theirs}", f"fastgen: {self.ours}", summary, *report]
        return "\n".join([verdict, *(f"  {line}" for line in lines)])


def verify(call: HostCall, enabled: Callable[[], AbstractContextManager[Any]]) -> Verification:
    """Does the work of `fastgen.verify`, which passes `fastgen.enabled`."""
    restore, previous_report = undo_of_random_numbers(), last_report()

    def run(context: Callable[[], AbstractContextManager[Any]]) -> Any:
        with context():
            restore()
            return call.run()

    stock, fast = (partial(run, context) for context in (disabled, enabled))
    try:
        theirs = stock()
        ours = fast()  # also measures products and captures steps, which is not timed
        memory = [peak_memory(way) for way in (stock, fast)]
        load = Load()
        their_turns, our_turns = in_turns([stock, fast])
        other_load = load.share()
    finally:
        restore()
    report = None if last_report() is previous_report else last_report()
    with disabled():
        difference = call.difference(ours, theirs)
    costs = Run(their_turns, memory[0]), Run(our_turns, memory[1])
    return Verification(call.host, call.rows_of(theirs), difference, *costs, other_load, report)
