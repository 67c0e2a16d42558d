"""Faster forwards on the modules of a model while `generate` runs.

They are put on the modules for the time of the call and taken off again, so that whoever compiles, traces, copies or
trains the model finds the library's own. A mode of torch that replaces products everywhere would cost some ten
microseconds for each of torch's functions.

Tests: tests/optimizer/decoding/test_faster_forwards.py
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastgen.ops import cpu_linear
from fastgen.ops.tracing import is_watched
from fastgen.provenance import comes_with

_LOCK = threading.Lock()

CACHED = 12 << 20  # elements; more than caches hold


class Call:
    """One call of `generate` in its thread; usage: counts kernels."""

    def __init__(self, models: Iterable[nn.Module], usage: Counter[str]) -> None:
        self.models, self.usage = tuple(models), usage

    def read_before(self, weight: Tensor) -> list[Tensor]:
        """What is read between two products with this weight: other weights, as many as caches hold, or all."""
        found, elements = [], 0
        for other in (other for model in self.models for other in model.parameters()):
            if elements < CACHED and other.is_cpu and other.is_contiguous() and other.data_ptr() != weight.data_ptr():
                found.append(other.detach().view(-1)[: CACHED - elements])
                elements += found[-1].numel()
        return found


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_thread = _Thread()


@contextmanager
def faster_forwards(
    models: Mapping[nn.Module, Iterable[nn.Module]],
    forwards: dict[type[nn.Module], Forward],
    usages: list[Counter[str]],
) -> Iterator[None]:
    """Inside this context, in this thread, modules of these types have these forwards; appends a count to `usages`.

    models: the modules of each model.
    """
    usages.append(Counter())
    forwards = {kind: forward for kind, forward in forwards.items() if comes_with(kind.forward, kind)}
    call = Call(models, usages[-1])
    chosen = [
        (module, forward)
        for modules in models.values()
        for module in modules
        if (forward := forwards.get(type(module))) is not None
    ]
    _thread.calls.append(call)
    with _LOCK:
        put_on = [found for one in chosen if (found := _put_on(*one)) is not None]
    try:
        yield
    finally:
        _thread.calls.pop()
        with _LOCK:
            for forward in put_on:
                forward.take_off()


def linears() -> dict[type[nn.Module], Forward]:
    """The forward of `nn.Linear`, where this machine has one that may be faster, and torch's product is torch's own."""
    if cpu_linear.machine_reasons() or not isinstance(functional.linear, BuiltinFunctionType):
        return {}
    return {nn.Linear: linear}


def linear(forward: ModuleForward, rows: Tensor, call: Call) -> Tensor | None:
    """Of `nn.Linear`: a large product on a CPU."""
    return multiply(forward, rows, forward.module.weight, forward.module.bias, call)


def multiply(forward: ModuleForward, rows: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor | None:
    """`rows @ weight.T + bias` in the fastest way, or None if that is BLAS; counted as "cpu_linear, WAY"."""
    if not cpu_linear.can_multiply(rows, weight, bias) or is_watched():
        return None
    fastest = cpu_linear.fastest(rows, weight, bias, lambda: call.read_before(weight))
    if fastest == cpu_linear.BLAS:
        forward.blas_shapes.add(rows.shape)
        return None
    call.usage[f"cpu_linear, {fastest}"] += 1
    return cpu_linear.ways()[fastest](rows, weight, bias)


def _put_on(module: nn.Module, faster: Forward) -> ModuleForward | None:
    """The forward that is on the module, with one more user; None if the program has put one of its own there."""
    attributes = vars(module)
    forward = attributes.get("forward")
    if forward is None:
        forward = attributes["forward"] = ModuleForward(module, faster)
        attributes.setdefault("__getstate__", StateWithoutForward(module))
    if not isinstance(forward, ModuleForward):
        return None
    forward.users += 1
    return forward


def has_faster_forward(module: nn.Module) -> bool:
    """Whether a call of `generate`, of any thread, has put a forward on this module."""
    return isinstance(vars(module).get("forward"), ModuleForward)


class ModuleForward:
    """The forward of one module while `users` calls of `generate` run; other threads get the library's result.

    blas_shapes: inputs for which BLAS is the fastest. To find that out anew for each product of a step would cost some
    hundredths of a step in bf16.
    """

    def __init__(self, module: nn.Module, faster: Forward) -> None:
        self.module, self.faster, self.users = module, faster, 0
        self.blas_shapes: set[torch.Size] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _thread.calls and len(args) == 1 and not kwargs:
            rows = args[0]
            if not isinstance(rows, Tensor) or rows.shape not in self.blas_shapes:
                output = self.faster(self, rows, _thread.calls[-1])
                if output is not None:
                    return output
        return type(self.module).forward(self.module, *args, **kwargs)

    def take_off(self) -> None:
        self.users -= 1
        if self.users:
            return
        attributes = vars(self.module)
        if attributes.get("forward") is self:
            del attributes["forward"]
        if isinstance(attributes.get("__getstate__"), StateWithoutForward):
            del attributes["__getstate__"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Where the program copies or pickles what it took for the module's method."""
        return getattr, (self.module, "forward")


class StateWithoutForward:
    """The `__getstate__` of a module that has a `ModuleForward`: copies and pickles of the module have none."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> dict[str, Any]:
        ours = (ModuleForward, StateWithoutForward)
        return {name: value for name, value in vars(self.module).items() if not isinstance(value, ours)}


# Given the forward of a module, its input and the call: what it returns, or None to leave it to the library.
Forward = Callable[[ModuleForward, Tensor, Call], Tensor | None]
