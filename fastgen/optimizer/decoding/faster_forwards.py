"""Faster forwards on the modules of a model while `generate` runs.

They are put on the modules for the time of the call and taken off again, so that whoever compiles, traces, copies or
trains the model finds the library's own. A mode of torch that replaces products everywhere would cost some ten
microseconds for each of torch's functions.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastgen.ops import cpu_linear
from fastgen.ops.transforms import is_watched

# Given a module, its input and a counter of kernels: what its forward returns, or None to leave it to the library.
Forward = Callable[[nn.Module, Tensor, Counter], Tensor | None]

_LOCK = threading.Lock()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.usages: list[Counter[str]] = []  # of the calls of generate that run in this thread


_thread = _Thread()


@contextmanager
def faster_forwards(
    models: Iterable[nn.Module], forwards: dict[type[nn.Module], Forward], usages: list[Counter[str]]
) -> Iterator[None]:
    """Inside this context, in this thread, modules of these types have these forwards; appends a count to `usages`."""
    chosen = [
        (module, forward)
        for model in models
        for module in model.modules()
        if (forward := forwards.get(type(module))) is not None
    ]
    usages.append(Counter())
    _thread.usages.append(usages[-1])
    with _LOCK:
        put_on = [found for module, forward in chosen if (found := _put_on(module, forward)) is not None]
    try:
        yield
    finally:
        _thread.usages.pop()
        with _LOCK:
            for forward in put_on:
                forward.take_off()


def linears() -> dict[type[nn.Module], Forward]:
    """The forward of `nn.Linear`, where this machine has one that may be faster, and torch's product is torch's own."""
    if cpu_linear.machine_reasons() or not isinstance(functional.linear, BuiltinFunctionType):
        return {}
    return {nn.Linear: linear}


def linear(module: nn.Linear, rows: Tensor, usage: Counter[str]) -> Tensor | None:
    """Of `nn.Linear`: a large product in fp32 on a CPU."""
    return multiply(rows, module.weight, module.bias, usage)


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, usage: Counter[str]) -> Tensor | None:
    """`rows @ weight.T + bias` through `cpu_linear`, or None; counted as "cpu_linear"."""
    product = rows, weight, bias
    if not cpu_linear.can_multiply(*product) or is_watched() or not cpu_linear.is_faster(*product):
        return None
    usage["cpu_linear"] += 1
    return cpu_linear.cpu_linear(*product)


def _put_on(module: nn.Module, faster: Forward) -> ModuleForward | None:
    """The forward that is on the module, with one more user; None if the program has put one of its own there."""
    forward = vars(module).get("forward")
    if forward is None and type(module).forward.__module__ == type(module).__module__:
        forward = module.forward = ModuleForward(module, faster)
    if not isinstance(forward, ModuleForward):
        return None
    forward.users += 1
    return forward


def has_faster_forward(module: nn.Module) -> bool:
    """Whether a call of `generate`, of any thread, has put a forward on this module."""
    return isinstance(vars(module).get("forward"), ModuleForward)


class ModuleForward:
    """The forward of one module while `users` calls of `generate` run; other threads get the library's result."""

    def __init__(self, module: nn.Module, faster: Forward) -> None:
        self.module, self.faster = module, faster
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _thread.usages and len(args) == 1 and not kwargs:
            output = self.faster(self.module, args[0], _thread.usages[-1])
            if output is not None:
                return output
        return type(self.module).forward(self.module, *args, **kwargs)

    def take_off(self) -> None:
        self.users -= 1
        if not self.users and vars(self.module).get("forward") is self:
            del self.module.forward

    def __reduce__(self) -> tuple[Any, ...]:
        """In a copy of the module, or in a file, its class's own forward stands here."""
        return getattr, (self.module, "forward")
