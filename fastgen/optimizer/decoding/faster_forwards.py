"""Faster forwards on the modules of a model while `generate` runs.

They are put on the modules for the time of the call and taken off again, so that whoever compiles, traces, copies or
trains the model finds the library's own. A mode of torch would cost a microsecond for each of torch's functions: one is
active only inside of attention of many queries.

Tests: tests/optimizer/decoding/test_faster_forwards.py
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastgen.ops import cpu_linear, flash_attention
from fastgen.ops.flash_attention import MIN_QUERIES, FlashAttention
from fastgen.ops.tracing import is_watched
from fastgen.optimizer.decoding.call import GenerateCall, current_call
from fastgen.provenance import packages_of

_LOCK = threading.Lock()

CACHED = 48 << 20  # bytes; more than caches hold


@contextmanager
def faster_forwards(
    call: GenerateCall, models: Mapping[nn.Module, Iterable[nn.Module]], forwards: dict[type[nn.Module], Forward]
) -> Iterator[None]:
    """Inside this context, in this call, modules of these types have these forwards; the report counts their kernels.

    Modules of attention have one, too, see `FasterForward`. models: the modules of each model. A forward that the user
    has put on a module stays.
    """
    forwards = {kind: faster for kind, faster in forwards.items() if packages_of(kind.forward) == packages_of(kind)}
    attention_is_faster = not flash_attention.KERNELS[0].unsupported_reasons()
    put_on: list[FasterForward] = []
    with _LOCK:
        for module in itertools.chain(*models.values()):
            faster = forwards.get(type(module))
            if faster is not None or (attention_is_faster and attends(type(module).forward)):
                attributes = vars(module)
                forward = attributes.get("forward")
                if forward is None:
                    forward = attributes["forward"] = FasterForward(module, faster)
                if isinstance(forward, FasterForward):
                    forward.users += 1
                    put_on.append(forward)
    before, call.swapped = call.swapped, tuple(models)
    try:
        yield
    finally:
        call.swapped = before
        with _LOCK:
            for forward in put_on:
                forward.users -= 1
                attributes = vars(forward.module)
                if not forward.users and attributes.get("forward") is forward:
                    del attributes["forward"]


# By module: the number of threads and how its weight lies in memory, and the shapes for which BLAS is the fastest then.
_blas_shapes: WeakKeyDictionary[nn.Module, tuple[Any, set[torch.Size]]] = WeakKeyDictionary()


def _blas_shapes_of(module: nn.Module) -> set[torch.Size]:
    """Returns the shapes that earlier calls have found for this module as it is."""
    weight, layout = module._parameters.get("weight"), None
    if type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided and not weight.is_nested:
        layout = weight.shape, weight.stride(), weight.dtype
    found = _blas_shapes.get(module)
    if found is None or found[0] != (torch.get_num_threads(), layout):
        found = _blas_shapes[module] = (torch.get_num_threads(), layout), set()
    return found[1]


def linears() -> dict[type[nn.Module], Forward]:
    """The forward of `nn.Linear`, where this machine has one that may be faster, and torch's product is torch's own."""
    if cpu_linear.machine_reasons() or not isinstance(functional.linear, BuiltinFunctionType):
        return {}
    return {nn.Linear: multiply}


def multiply(forward: FasterForward, rows: Tensor, call: GenerateCall, is_transposed: bool = False) -> Tensor | None:
    """`rows @ weight.T + bias` in the fastest way, or None if that is BLAS; counted as "cpu_linear, WAY".

    is_transposed: the module's weight is `[in_features, out_features]`.
    """
    weight, bias = forward.module.weight, forward.module.bias
    if is_transposed:
        weight = weight.t()
    if not cpu_linear.can_multiply(rows, weight, bias):
        return None
    fastest = cpu_linear.fastest(rows, weight, bias, lambda: _read_before(weight, call.swapped))
    if fastest == cpu_linear.BLAS:
        forward.blas_shapes.add(rows.shape)
        return None
    call.report.kernels[f"cpu_linear, {fastest}"] += 1
    return cpu_linear.gemm_backends(rows.dtype)[fastest](rows, weight, bias)


def _read_before(weight: Tensor, models: Iterable[nn.Module]) -> list[Tensor]:
    """Returns what is read between two products with this weight: other weights, as many as caches hold, or all."""
    weights, nbytes = [], 0
    for other in (other for model in models for other in model.parameters()):
        if nbytes < CACHED and other.is_cpu and other.is_contiguous() and other.data_ptr() != weight.data_ptr():
            weights.append(other.detach().view(-1)[: (CACHED - nbytes) // other.itemsize])
            nbytes += weights[-1].nbytes
    return weights


def has_faster_forward(module: nn.Module) -> bool:
    """Whether a call of `generate`, of any thread, has put a forward on this module."""
    return isinstance(vars(module).get("forward"), FasterForward)


class FasterForward:
    """The forward of one module while `users` calls of `generate` run; other threads get the library's result.

    faster: returns the output for the one input of the module, or None for the library's forward to run. None for a
    module of attention: the library's forward, in which `FlashAttention` is torch's attention of many queries.
    blas_shapes: inputs for which BLAS is the fastest. To find that out takes 40 µs after a product that has emptied the
    caches, some hundredths of a call in bf16.
    """

    def __init__(self, module: nn.Module, faster: Forward | None) -> None:
        self.module, self.faster, self.users = module, faster, 0
        self.blas_shapes = set() if faster is None else _blas_shapes_of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original, call = type(self.module).forward, None if torch.compiler.is_compiling() else current_call()
        if call is None or not call.swapped:
            return original(self.module, *args, **kwargs)
        if self.faster is None:
            states = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if states is not None and states.dim() == 3 and states.shape[1] >= MIN_QUERIES:
                with FlashAttention(call.report.kernels):
                    return original(self.module, *args, **kwargs)
        elif len(args) == 1 and {NoneType}.issuperset(map(type, kwargs.values())):
            rows = args[0]
            if (not isinstance(rows, Tensor) or rows.shape not in self.blas_shapes) and not is_watched():
                with torch._C.DisableTorchFunction():  # else `FlashAttention` sees each look at a tensor
                    output = self.faster(self, rows, call)
                if output is not None:
                    return output
        return original(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets copies and pickles of the module have the library's method in its place."""
        return getattr, (self.module, "forward")


_ATTENTION = frozenset({"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"})


@functools.lru_cache
def attends(forward: Callable[..., Any]) -> bool:
    """Whether this forward of a class calls torch's attention, by its name or by a registry of such functions."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and not _ATTENTION.isdisjoint(code.co_names)


# Given the forward of a module, its input and the call: what it returns, or None to leave it to the library.
Forward = Callable[[FasterForward, Tensor, GenerateCall], Tensor | None]
