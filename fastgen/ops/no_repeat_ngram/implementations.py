"""The implementations of no-repeat-n-gram, fastest first, and the choice between them.

Tests: tests/ops/test_no_repeat_ngram.py, tests/ops/test_no_repeat_ngram_kernels.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from fastgen.config import CONFIG
from fastgen.ops.libraries import load_reasons
from fastgen.ops.no_repeat_ngram import native, reference

Ban = Callable[[Tensor, Tensor, int, "Tensor | None", "Tensor | None"], None]


@dataclass(frozen=True)
class Implementation:
    """device_types: those that it runs on; empty means every one. ban: as `reference.ban`."""

    name: str
    device_types: tuple[str, ...]
    ban: Ban
    machine_reasons: Callable[[], list[str]]

    @property
    def task(self) -> str:
        return " on ".join(["n-gram blocking", *self.device_types])

    @property
    def counted_as(self) -> str:
        """Its name in `fastgen.explain().kernels`."""
        return f"no_repeat_ngram ({self.name})"


def reasons(implementation: Implementation) -> list[str]:
    """Why it is not used on this machine; empty if it can be, is switched on, and gives what torch gives."""
    return _reasons(implementation, CONFIG.cuda_kernels)


@functools.cache
def _reasons(implementation: Implementation, cuda_kernels: bool) -> list[str]:
    if found := implementation.machine_reasons():
        return found
    if "cuda" in implementation.device_types and not cuda_kernels:
        return ["not yet run on a GPU (FASTGEN_CUDA_KERNELS=1 switches it on)"]
    try:
        wrong = [device_type for device_type in implementation.device_types if _differs(implementation, device_type)]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return [f"differs from torch on {device_type}" for device_type in wrong]


def _differs(implementation: Implementation, device_type: str) -> bool:
    tokens = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]], device=device_type)
    found = torch.zeros(2, 8, device=device_type)
    expected = found.clone()
    implementation.ban(tokens, found, 3, None, None)
    reference.ban(tokens, expected, 3, None, None)
    return not torch.equal(found, expected)


def _ban_with_triton(
    tokens: Tensor, scores: Tensor, ngram_size: int, lengths: Tensor | None, encoder_tokens: Tensor | None
) -> None:
    from fastgen.ops.no_repeat_ngram import triton_kernel  # importing triton takes half a second

    triton_kernel.ban(tokens, scores, ngram_size, lengths, encoder_tokens)


def _gpu_reasons() -> list[str]:
    return [] if torch.cuda.is_available() else ["torch finds no GPU"]


def _triton_reasons() -> list[str]:
    return _gpu_reasons() or ([] if find_spec("triton") else ["triton is not installed"])


IMPLEMENTATIONS = (
    Implementation("CUDA", ("cuda",), native.ban_on_cuda, lambda: load_reasons(native.CUDA) or _gpu_reasons()),
    Implementation("Triton", ("cuda",), _ban_with_triton, _triton_reasons),
    Implementation("C++", ("cpu",), native.ban_on_cpu, lambda: load_reasons(native.CPU)),
    Implementation("torch", (), reference.ban, list),
)


def implementation_for(device_type: str) -> Implementation:
    """The first that runs on such a device; chosen once. The first call on a GPU must not be captured in a graph."""
    return _implementation_for(device_type, CONFIG.cuda_kernels)


@functools.cache
def _implementation_for(device_type: str, cuda_kernels: bool) -> Implementation:
    return next(
        implementation
        for implementation in IMPLEMENTATIONS
        if device_type in (implementation.device_types or (device_type,)) and not _reasons(implementation, cuda_kernels)
    )
