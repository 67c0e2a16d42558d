"""The kernels of an operation: one list, the fastest first and torch's own last, which runs everywhere.

    MOVE_KERNELS = (
        Kernel("C++", simd.machine_reasons, _move, "cpu", can_move),
        Kernel("torch", list, _move_in_torch),
    )
    first_supported(MOVE_KERNELS, "cpu", buffers).run(buffers, beam_idx)

torch's own kernel is also the oracle of the tests. If no rule predicts the fastest kernel, the kernels of the list are
measured (cpu_linear). `fastgen.ops.kernels` returns the lists of all operations.

Tests: tests/ops/test_kernel.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fastgen.config import CONFIG

# The largest difference that rounding alone explains between two results of one computation, by dtype: relative to the
# largest number; for scores (log-probabilities of tokens) absolute; for prefixes that of norms.
TOLERANCES = {
    "logits": {"float64": 1e-6, "float32": 1e-4, "float16": 0.02, "bfloat16": 0.1},
    "product": {"float32": 1e-4, "float16": 0.002, "bfloat16": 0.01},
    "score": {"float32": 1e-4},
    "prefix": {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.03},
}


def _all(*arguments: Any) -> bool:
    return True


@dataclass(eq=False)
class Kernel:
    """One implementation of an operation.

    unsupported_reasons: returns why this machine cannot run it, empty if it can; called for each choice, so it must
    cache slow checks. run: computes the operation. device: the device type that it runs on, empty for all. supports:
    whether it supports these arguments and is worthwhile for them. task: the work that it does, for reports.
    counted_as: its names in `fastgen.explain().kernels`; empty for a kernel that is not counted.
    """

    name: str
    unsupported_reasons: Callable[[], list[str]]
    run: Callable[..., Any]
    device: str = ""
    supports: Callable[..., bool] = _all
    task: str = ""
    counted_as: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.state}"

    @property
    def state(self) -> str:
        """Why this machine cannot run the kernel, or "usable"."""
        return "; ".join(self.unsupported_reasons()) or "usable"


def first_supported(kernels: Sequence[Kernel], device: str, *arguments: Any) -> Kernel:
    """Returns the first kernel that supports these arguments on a device of this type, or the last of the list."""
    for kernel in kernels[:-1]:
        if kernel.device == device and not kernel.unsupported_reasons() and kernel.supports(*arguments):
            return kernel
    return kernels[-1]


def gpu_reasons() -> list[str]:
    """Returns why no kernel of fastgen runs on a GPU here; empty if some may."""
    import torch

    if not torch.cuda.is_available():
        return ["torch finds no GPU"]
    return [] if CONFIG.cuda_kernels else ["FASTGEN_CUDA_KERNELS=0"]


def triton_reasons() -> list[str]:
    """Returns why no kernel in Triton runs here; empty if some may."""
    return gpu_reasons() or ([] if find_spec("triton") else ["triton is not installed"])


def tolerance(kind: str, dtype: Any) -> float:
    """Returns a tolerance of TOLERANCES. kind: its first key; dtypes that are not in the table get float32's."""
    table = TOLERANCES[kind]
    return table.get(str(dtype).removeprefix("torch."), table["float32"])
