"""What `fastgen.explain()` tells: what one `generate` shared, which kernels ran, what fell back and why."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """One call of a host's `generate`.

    shared: what was kept or computed once per input, in words. fallbacks: what was left to the original, with the
    reason. usages: for each layer, calls of each operation on shared states, see `TwoPartStates`.
    caches: those with shared states, as long as they live.
    own_code: code that is not the host's works with the cache. keep: what is equal is kept once wherever it can be
    (True), nowhere (False), or where it pays (None). call: what the call was given, where it has to be compared with
    the original before anything is shared.
    """

    model: str
    inputs: int = 0
    rows: int = 0
    shared: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    usages: list[Counter[str]] = field(default_factory=list)
    user_gave_cache: bool = False
    own_code: bool = False
    keep: bool | None = None
    call: Any = field(default=None, repr=False, compare=False)
    caches: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, repr=False, compare=False)

    @property
    def kernels(self) -> Counter[str]:
        """Calls of each operation that worked on shared states, or asked for them in one piece (`whole: NAME`)."""
        return sum(self.usages, Counter())

    def fell_back(self, reasons: list[str]) -> None:
        """Notes reasons, those of every step once."""
        self.fallbacks += [reason for reason in reasons if reason not in self.fallbacks]

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.inputs} inputs, {self.rows} rows"]
        lines += [f"  shared: {item}" for item in self.shared or ["nothing"]]
        lines += [f"  kernel: {name}, {calls} calls" for name, calls in sorted(self.kernels.items())]
        lines += [f"  fell back: {item}" for item in self.fallbacks]
        return "\n".join(lines)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[Report] = []
        self.last: Report | None = None


_thread = _Thread()


@contextmanager
def recording(model: str) -> Iterator[Report]:
    """Records a `generate` of this thread; the innermost that runs is `running()`, the last that ended is `last()`."""
    report = Report(model)
    _thread.running.append(report)
    try:
        yield report
    finally:
        _thread.running.pop()
        _thread.last = report


def running() -> Report | None:
    """The report of the `generate` that runs in this thread, or None outside of one."""
    return _thread.running[-1] if _thread.running else None


def last() -> Report | None:
    """The report of the last `generate` that ended in this thread, or None."""
    return _thread.last
