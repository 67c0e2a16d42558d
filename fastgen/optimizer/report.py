"""What `fastgen.explain()` tells: what one `generate` shared, which kernels ran, what fell back and why."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastgen import ops

logger = logging.getLogger("fastgen")


@dataclass(repr=False)
class Report:
    """One call of a host's `generate`.

    inputs, rows: 0 where fastgen did not come to see them. shared: what was kept or computed once per input, in words.
    fallbacks: what was left to the original, with the reason. usages: for each layer, calls of each operation on shared
    states, see `TwoPartStates`; the first one is of the whole call. caches: those with shared states, as long as they
    live. own_code: code that is not the host's works with the cache. keep: what is equal is kept once wherever it can
    be (True), nowhere (False), or where it pays (None). call: what the call was given, where it has to be compared with
    the original before anything is shared.
    """

    model: str
    inputs: int = 0
    rows: int = 0
    shared: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    usages: list[Counter[str]] = field(default_factory=lambda: [Counter()])
    user_gave_cache: bool = False
    own_code: bool = False
    keep: bool | None = None
    call: Any = field(default=None, compare=False)
    caches: list[weakref.ref[Any]] = field(default_factory=list, compare=False)

    @property
    def kernels(self) -> Counter[str]:
        """Calls of each kernel of fastgen, and of what asked for shared states in one piece (`whole: NAME`)."""
        return sum(self.usages, Counter())

    @property
    def unused_kernels(self) -> dict[str, str]:
        """The kernels of fastgen that did not run, and why; an operation of which none did is one item."""
        unused, counted = {}, self.kernels
        for operation, group in itertools.groupby(ops.kernels(), key=lambda kernel: kernel.name):
            implementations = list(group)
            ran = [one for one in implementations if not counted.keys().isdisjoint(one.counted_as)]
            if not ran:
                unused[operation] = _why_not(implementations[-1])  # runs wherever one of the others does
            for one in implementations if ran else ():
                if one not in ran:
                    before = implementations.index(one) < implementations.index(ran[0])
                    reason = _why_not(one) if before or one.reasons else f"{ran[0].implementation} comes first"
                    unused[f"{operation} ({one.implementation})"] = reason
        return unused

    def fell_back(self, reasons: list[str]) -> None:
        """Notes reasons, those of every step once."""
        self.fallbacks += [reason for reason in reasons if reason not in self.fallbacks]

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it: strings, numbers, and lists and dictionaries of them."""
        return {
            "model": self.model,
            "inputs": self.inputs,
            "rows": self.rows,
            "shared": list(self.shared),
            "kernels": dict(sorted(self.kernels.items())),
            "unused_kernels": self.unused_kernels,
            "fallbacks": list(self.fallbacks),
        }

    def __repr__(self) -> str:
        lines = [self._call()]
        lines += [f"  shared: {item}" for item in self.shared or ["nothing"]]
        lines += [f"  kernel: {name}, {calls} calls" for name, calls in sorted(self.kernels.items())]
        lines += [f"  not used: {name}: {reason}" for name, reason in self.unused_kernels.items()]
        lines += [f"  fell back: {item}" for item in self.fallbacks]
        return "\n".join(lines)

    def summary(self) -> str:
        """The call in one line, with the first reason of a fallback."""
        kernels = ", ".join(f"{name} {calls}" for name, calls in sorted(self.kernels.items()))
        parts = [self._call(), f"shared: {', '.join(self.shared) or 'nothing'}", f"kernels: {kernels or 'none'}"]
        if self.fallbacks:
            others = len(self.fallbacks) - 1
            parts.append(f"fell back: {self.fallbacks[0]}" + (f" (and {others} more)" if others else ""))
        return "; ".join(parts)

    def _call(self) -> str:
        return f"{self.model}: {self.inputs} inputs, {self.rows} rows" if self.rows else self.model


def _why_not(kernel: ops.Kernel) -> str:
    return "; ".join(kernel.reasons) or f"nothing to do ({kernel.task})"


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
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("generate: %s", report.summary())


def running() -> Report | None:
    """The report of the `generate` that runs in this thread, or None outside of one."""
    return _thread.running[-1] if _thread.running else None


def count(kernel: str) -> None:
    """Counts a call of a kernel in the `generate` that runs in this thread, if one does."""
    if _thread.running:
        _thread.running[-1].usages[0][kernel] += 1


def fell_back(reasons: list[str]) -> None:
    """As `Report.fell_back`, of the `generate` that runs in this thread, if one does."""
    if _thread.running:
        _thread.running[-1].fell_back(reasons)


def last() -> Report | None:
    """The report of the last `generate` that ended in this thread, or None."""
    return _thread.last
