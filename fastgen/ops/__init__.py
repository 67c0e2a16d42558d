"""Operations on tensors; they know no host library. `kernels()` lists their implementations, the last resort last.

The shared libraries of `csrc/` are bound with ctypes. They hold no torch header, so that they are built wherever there
is a compiler, whichever torch is installed later.

Tests: tests/ops/test_cpu_linear.py, tests/ops/test_no_repeat_ngram.py,
tests/ops/test_no_repeat_ngram_build.py
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operation.

    reasons: why it cannot run here, if so. task: what it is for. counted_as: its names in `fastgen.explain().kernels`.
    """

    name: str
    implementation: str
    reasons: tuple[str, ...] = ()
    task: str = ""
    counted_as: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.implementation}): {'; '.join(self.reasons) or 'usable'}"


def kernels() -> list[Kernel]:
    """Every implementation of every operation on this machine."""
    if not find_spec("torch"):
        names = ("shared attention", "flash attention", "cpu linear", "fused activation", "no-repeat n-gram")
        return [Kernel(name, "all", ("torch is not installed",)) for name in names]
    from fastgen.ops import x86
    from fastgen.ops.cpu_linear import MIN_ELEMENTS, machine_reasons
    from fastgen.ops.no_repeat_ngram.implementations import IMPLEMENTATIONS, reasons

    attention = ("scaled_dot_product_attention", "matmul", "shared_attention")
    products = f"products with weights of {MIN_ELEMENTS:,} numbers or more, where it is the fastest"
    few = f"{products}, in fp32 and bf16"
    many = "prompts and encoders of large models, in fp32 and bf16"
    return [
        Kernel("shared attention", "torch", task="rows that share keys and values", counted_as=attention),
        Kernel("flash attention", "C++", tuple(x86.machine_reasons()), many, ("flash attention",)),
        Kernel("cpu linear", "C++", tuple(x86.machine_reasons()), few, ("cpu_linear, skinny GEMM",)),
        Kernel("cpu linear", "oneDNN", tuple(machine_reasons()), products, ("cpu_linear, oneDNN",)),
        Kernel("fused activation", "torch", task="NewGELUActivation in large models", counted_as=("fused activation",)),
        *(
            Kernel("no-repeat n-gram", one.name, tuple(reasons(one)), one.task, (one.counted_as,))
            for one in IMPLEMENTATIONS
        ),
    ]


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """The library with this name of a module. Raises OSError if there is none or it cannot be loaded."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise OSError("not built")
    return ctypes.CDLL(spec.origin)


def load_reasons(name: str) -> list[str]:
    """Why a library cannot be used; empty if it can."""
    try:
        load(name)
    except OSError as error:
        return [str(error)]
    return []
