"""`NewGELUActivation` (GPT-2, GPT-J, T5 v1.1, …) in one pass over the tensor instead of eight, while `generate` runs.

A `forward` is put on the model's activations for the time of the call and taken off again, so that whoever compiles,
traces, copies or trains the model finds the library's own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import NewGELUActivation

from fastgen.ops.transforms import is_transformed
from fastgen.optimizer.decoding.linear_mode import is_watched

_LOCK = threading.Lock()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.usages: list[Counter[str]] = []  # of the calls of generate that run in this thread


_thread = _Thread()


@contextmanager
def fused(model: nn.Module, usages: list[Counter[str]]) -> Iterator[None]:
    """Inside this context, in this thread, the model's activations are fused; appends their count to `usages`."""
    modules = [module for module in model.modules() if type(module) is NewGELUActivation]
    usages.append(Counter())
    _thread.usages.append(usages[-1])
    with _LOCK:
        forwards = [forward for module in modules if (forward := _put_on(module)) is not None]
    try:
        yield
    finally:
        _thread.usages.pop()
        with _LOCK:
            for forward in forwards:
                forward.take_off()


def _put_on(module: NewGELUActivation) -> FusedForward | None:
    """The forward that is on the module, with one more user; None if the program has put one of its own there."""
    forward = vars(module).get("forward")
    if forward is None and NewGELUActivation.forward.__module__ == NewGELUActivation.__module__:
        forward = module.forward = FusedForward(module)
    if not isinstance(forward, FusedForward):
        return None
    forward.users += 1
    return forward


class FusedForward:
    """The forward of one module while `users` calls of `generate` run; other threads get the library's result."""

    def __init__(self, module: NewGELUActivation) -> None:
        self.module = module
        self.users = 0

    def __call__(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not _can_fuse(input):
            return NewGELUActivation.forward(self.module, input)
        _thread.usages[-1]["fused activation"] += 1
        return functional.gelu(input, approximate="tanh")

    def take_off(self) -> None:
        self.users -= 1
        if not self.users and vars(self.module).get("forward") is self:
            del self.module.forward

    def __reduce__(self) -> tuple[Any, ...]:
        """In a copy of the module, or in a file, its class's own forward stands here."""
        return getattr, (self.module, "forward")


def _can_fuse(input: Tensor) -> bool:
    """In half precision the original rounds after each of its steps, which the fused one does not repeat."""
    if not _thread.usages or torch.is_grad_enabled():
        return False
    return type(input) is Tensor and input.dtype == torch.float32 and not is_transformed() and not is_watched()
