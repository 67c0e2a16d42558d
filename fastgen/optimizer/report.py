"""What `fastgen.explain()` tells: what one `generate` shared, which kernels ran, what fell back and why."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fastgen import ops


@dataclass(repr=False)
class Stage:
    """A part of a call, such as the encoder.

    seconds: of the host's clock, which does not wait for a GPU. report: of a stage that is a call of `generate`.
    """

    name: str
    seconds: float
    report: Report | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        inner = {} if self.report is None else {"report": self.report.as_dict()}
        return {"name": self.name, "seconds": self.seconds, **inner}

    def lines(self) -> list[str]:
        """For people."""
        own = [f"  stage: {self.name}, {self.seconds:.3f} s"]
        return own + ([] if self.report is None else [f"  {line}" for line in repr(self.report).splitlines()[1:]])


@dataclass(repr=False)
class Report:
    """One call of a host's `generate`.

    inputs, rows: 0 where fastgen did not come to see them. shared: what was kept or computed once per input, in words.
    fallbacks: what was left to the original, with the reason. usages: for each layer, calls of each operation on shared
    states, see `TwoPartStates`; the first one is of the whole call. stages: its parts, where they are known.
    """

    model: str
    inputs: int = 0
    rows: int = 0
    shared: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    usages: list[Counter[str]] = field(default_factory=lambda: [Counter()])
    seconds: float = 0.0
    stages: list[Stage] = field(default_factory=list)

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
            "seconds": self.seconds,
            "stages": [stage.as_dict() for stage in self.stages],
        }

    def __repr__(self) -> str:
        lines = [self._call() + (f", {self.seconds:.3f} s" if self.seconds else "")]
        lines += [line for stage in self.stages for line in stage.lines()]
        shares = all(stage.report is None for stage in self.stages)  # else it is they that share
        lines += [f"  shared: {item}" for item in self.shared or ["nothing"] if shares]
        lines += [f"  kernel: {name}, {calls} calls" for name, calls in sorted(self.kernels.items())]
        lines += [f"  not used: {name}: {reason}" for name, reason in self.unused_kernels.items() if shares]
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
