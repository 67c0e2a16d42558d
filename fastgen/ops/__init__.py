"""Operations on tensors; they know no host library. `kernels()` lists their implementations, the last resort last."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operation, and why it cannot run here, if so."""

    name: str
    implementation: str
    reasons: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return f"{self.name} ({self.implementation}): {'; '.join(self.reasons) or 'usable'}"


def kernels() -> list[Kernel]:
    """Every implementation of every operation on this machine."""
    if not find_spec("torch"):
        missing = ("torch is not installed",)
        names = ("shared attention", "cpu linear", "no-repeat n-gram")
        return [Kernel(name, "all", missing) for name in names]
    from fastgen.ops.cpu_linear import machine_reasons
    from fastgen.ops.no_repeat_ngram.implementations import IMPLEMENTATIONS, reasons

    ngram = [Kernel("no-repeat n-gram", one.name, tuple(reasons(one))) for one in IMPLEMENTATIONS]
    return [Kernel("shared attention", "torch"), Kernel("cpu linear", "oneDNN", tuple(machine_reasons())), *ngram]
