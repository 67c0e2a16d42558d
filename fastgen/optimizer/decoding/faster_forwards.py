"""Faster forwards for a model's modules while `generate` runs.

They are set on the modules for the time of the call and removed afterwards, so that code that compiles, traces, copies
or trains the model meets the library's own. A torch function mode would cost a microsecond for each function of torch,
so one is active only inside attention modules with many queries.

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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastgen.ops import cpu_attention, cpu_linear
from fastgen.ops.cpu_attention import MIN_QUERIES, FlashAttention
from fastgen.ops.tracing import is_watched
from fastgen.optimizer.decoding.call import GenerateCall, current_call
from fastgen.optimizer.decoding.cost_model import CostModel, ModelSize, Work, first_weight
from fastgen.provenance import packages_of

_LOCK = threading.Lock()


class Whole(NamedTuple):
    """A forward that takes the call, the module and all arguments of the library's, and runs instead of it."""

    forward: Callable[..., Any]


CACHED = 48 << 20  # bytes, more than a CPU's caches hold


def should_swap(costs: CostModel, size: ModelSize, steps: int | None = None) -> bool:
    """Whether the model spends its time in large products for which oneDNN is an option.

    steps: of the call, if known. A single step must gain as much as it takes to swap the forwards of all modules.
    """
    part = costs.min_large * (4 if steps == 1 else 1)
    return costs.saves(Work(bytes=4 * size.large), Work(part * size.modules))


@contextmanager
def faster_forwards(
    call: GenerateCall,
    models: Mapping[nn.Module, Iterable[nn.Module]],
    forwards: Mapping[type[nn.Module], Forward | Whole],
) -> Iterator[None]:
    """A context in which modules of these types have these forwards for one call; its report counts their kernels.

    Attention modules on a CPU get `FLASH`, too. models: the modules of each model. A forward that user code has set on
    a module is not replaced.
    """
    forwards = {kind: faster for kind, faster in forwards.items() if packages_of(kind.forward) == packages_of(kind)}
    weights = map(first_weight, models)
    is_cpu = all(weight is None or weight.is_cpu for weight in weights)
    attention_is_faster = is_cpu and not cpu_attention.KERNELS[0].unsupported_reasons()
    swapped: list[FasterForward] = []
    with _LOCK:
        for module in itertools.chain(*models.values()):
            faster = forwards.get(type(module))
            if faster is None and attention_is_faster and attends(type(module).forward):
                faster = FLASH
            if faster is not None:
                attributes = vars(module)
                forward = attributes.get("forward")
                if forward is None:
                    forward = attributes["forward"] = FasterForward(module, faster)
                if isinstance(forward, FasterForward):
                    forward.users += 1
                    swapped.append(forward)
    previous = call.swapped
    call.swapped = tuple(models)
    call.is_accelerated |= bool(swapped)
    try:
        yield
    finally:
        call.swapped = previous
        with _LOCK:
            for forward in swapped:
                forward.users -= 1
                attributes = vars(forward.module)
                if not forward.users and attributes.get("forward") is forward:
                    del attributes["forward"]


# For each module: the number of threads and the layout of its weight, and the shapes for which BLAS is fastest then.
_blas_shapes: WeakKeyDictionary[nn.Module, tuple[Any, set[torch.Size]]] = WeakKeyDictionary()


def _blas_shapes_of(module: nn.Module) -> set[torch.Size]:
    """Returns the shapes for which earlier calls found BLAS fastest, with the module's present weight and threads."""
    weight = module._parameters.get("weight")
    layout = None
    if type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided and not weight.is_nested:
        layout = weight.shape, weight.stride(), weight.dtype
    cached = _blas_shapes.get(module)
    if cached is None or cached[0] != (torch.get_num_threads(), layout):
        cached = _blas_shapes[module] = (torch.get_num_threads(), layout), set()
    return cached[1]


def linears() -> dict[type[nn.Module], Forward]:
    """Returns the forward of `nn.Linear`, if this machine may have a faster one and torch's own is not replaced."""
    if cpu_linear.machine_reasons() or not isinstance(functional.linear, BuiltinFunctionType):
        return {}
    return {nn.Linear: multiply}


def multiply(forward: FasterForward, rows: Tensor, call: GenerateCall, is_transposed: bool = False) -> Tensor | None:
    """Returns `rows @ weight.T + bias` by the fastest backend, counted as "cpu_linear, BACKEND"; None if that is BLAS.

    is_transposed: whether the module's weight is `[in_features, out_features]`.
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
    """Returns what a step reads between two products with this weight: other weights, at most `CACHED` bytes."""
    weights = []
    nbytes = 0
    for other in (other for model in models for other in model.parameters()):
        if nbytes < CACHED and other.is_cpu and other.is_contiguous() and other.data_ptr() != weight.data_ptr():
            weights.append(other.detach().view(-1)[: (CACHED - nbytes) // other.itemsize])
            nbytes += weights[-1].nbytes
    return weights


def has_faster_forward(module: nn.Module) -> bool:
    """Whether a call of `generate`, in any thread, has set a forward on this module."""
    return isinstance(vars(module).get("forward"), FasterForward)


class FasterForward:
    """The forward of one module while `users` calls of `generate` run; other threads get the library's result.

    faster: returns the output for the module's one input, or None to run the library's forward; or a `Whole`.
    blas_shapes: the input shapes for which BLAS is fastest. Asking again takes 40 µs after a product that has evicted
    the caches, some percent of a call in bf16.
    """

    def __init__(self, module: nn.Module, faster: Forward | Whole) -> None:
        self.module = module
        self.faster = faster
        self.users = 0
        self.blas_shapes = set() if isinstance(faster, Whole) else _blas_shapes_of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = type(self.module).forward
        call = None if torch.compiler.is_compiling() else current_call()
        if call is None or not call.swapped:
            return original(self.module, *args, **kwargs)
        if isinstance(self.faster, Whole):
            return self.faster.forward(call, self.module, *args, **kwargs)
        if len(args) == 1 and {NoneType}.issuperset(map(type, kwargs.values())):
            rows = args[0]
            uses_faster = not isinstance(rows, Tensor) or rows.shape not in self.blas_shapes
            if uses_faster and not (torch._C._len_torch_function_stack() and is_watched()):
                with torch._C.DisableTorchFunction():  # otherwise `FlashAttention` sees every attribute access
                    output = self.faster(self, rows, call)
                if output is not None:
                    return output
        return original(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Replaces this forward by the library's method in copies and pickles of the module."""
        return getattr, (self.module, "forward")


def _attend(call: GenerateCall, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the library's forward with `FlashAttention` instead of torch's attention of many queries."""
    original = type(module).forward
    states = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if states is not None and states.dim() == 3 and states.shape[1] >= MIN_QUERIES:
        with FlashAttention(call.report.kernels):
            return original(module, *args, **kwargs)
    return original(module, *args, **kwargs)


FLASH = Whole(_attend)

_ATTENTION = frozenset({"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"})


@functools.lru_cache
def attends(forward: Callable[..., Any]) -> bool:
    """Whether this forward of a class calls torch's attention, by name or through a registry of such functions."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and not _ATTENTION.isdisjoint(code.co_names)


# Takes the forward of a module, its input and the call; returns the output, or None to leave it to the library.
Forward = Callable[[FasterForward, Tensor, GenerateCall], Tensor | None]
