"""Tracing: notes which kernels of torch a function calls, and tells whether the program traces or transforms them.

Tests: tests/ops/test_cpu_graph.py, tests/optimizer/transformers/test_replaced_code.py
"""

from __future__ import annotations

from collections import Counter
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of a call of torch that a mode sees.
Arguments = tuple[Any, ...]
Options = dict[str, Any] | None


class NotRepeatable(Exception):
    """The function does something that a repetition of its kernels would not do. code: of the reason."""

    code = "CAPTURE_REFUSED"


class UnderAutocast(NotRepeatable):
    """The function begins autocast itself."""

    code = "AUTOCAST"


class Diverged(Exception):
    """A scalar read on the host (`.item()`) changed since the capture, so that control flow may differ."""


class TracedCall(NamedTuple):
    """A call of an operation. read: the tensors among its arguments; made: those among its results.

    An operation that makes nothing and writes nothing returns a scalar, on which control flow may depend.
    """

    operation: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    read: list[Tensor]
    made: list[Tensor]

    @property
    def writes(self) -> bool:
        """Whether it changes one of its arguments."""
        return bool(self.operation._schema.is_mutable)

    @property
    def returns_argument(self) -> bool:
        """Whether its result is its argument, as of `to` in the type that is there."""
        return len(self.made) == 1 and any(self.made[0] is tensor for tensor in self.read)


class Tracer(TorchDispatchMode):
    """Inside this context the calls of torch's operations, in their order; raises NotRepeatable."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TracedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Arguments = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        if foreign := set(types) - {Tensor, nn.Parameter}:  # what they do inside would not be seen
            raise NotRepeatable(f"{func} works on {', '.join(sorted(kind.__name__ for kind in foreign))}")
        if _has_any_size(func, args) or kwargs.get("generator") is not None:
            raise NotRepeatable(f"{func} has results of any size or draws numbers")
        result = func(*args, **kwargs)
        call = TracedCall(func, args, kwargs, result, _tensors((args, kwargs)), _tensors(result))
        if not call.made and not call.writes and result != result:
            raise NotRepeatable(f"{func} returned {result} on the host: control flow cannot be checked")
        self.calls.append(call)
        return result


class NoWaiting(Tracer):
    """Inside this context NotRepeatable is raised for what a CUDA graph cannot hold, before it is called.

    The host would wait for the device, or numbers would be copied between the two. CUDA would end the capture with an
    error, from which torch's allocator does not recover (pytorch#190308).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Arguments = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or _has_any_size(func, args):
            raise NotRepeatable(f"{func} lets the host wait for the device")
        copies = func.overloadpacket in _COPIES
        devices = {tensor.device.type for tensor in _tensors((args, kwargs)) if copies or tensor.dim()}
        devices |= {torch.device(kwargs["device"]).type} if copies and kwargs.get("device") is not None else set()
        if len(devices) > 1:
            raise NotRepeatable(f"{func} copies between the host and the device")
        return func(*args, **kwargs)


_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)


def uses_of(calls: list[TracedCall], output: Any) -> Counter[int]:
    """How often the calls read each tensor, by its `id`, and the function that has made them returns it."""
    uses = Counter(id(tensor) for call in calls if not call.returns_argument for tensor in call.read)
    uses.update(id(leaf) for leaf in tree_leaves(output))
    return uses


def _has_any_size(operation: torch._ops.OpOverload, args: Arguments) -> bool:
    """Whether the size of the result depends on numbers: where masks are indices, but not where places are."""
    if operation is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    return torch.Tag.dynamic_output_shape in operation.tags


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


# Whether somebody else watches: then an operation of another name differs.


def is_transformed() -> bool:
    """Inside torch.func, forward-mode AD, torch.jit.trace or a dispatch mode of this thread that is not fastgen's.

    Raises AttributeError where this version of torch does not tell.
    """
    for index in range(torch._C._len_torch_dispatch_stack()):
        if not isinstance(torch._C._get_dispatch_stack_at(index), Tracer):
            return True
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


# Functions by which decoding loops choose tokens and move rows, in torch and in its module of functions.
_OF_LOOPS = (
    (torch, ("argmax", "cat", "gather", "isin", "log_softmax", "multinomial", "softmax", "sort")),
    (torch, ("take_along_dim", "topk", "where")),
    (functional, ("log_softmax", "softmax")),
)


def replaced_functions() -> list[str]:
    """The functions of decoding loops in whose place the program has put others."""
    replaced = []
    for space, names in _OF_LOOPS:
        for name in names:
            function = getattr(space, name, None)
            is_torchs = type(function) is BuiltinFunctionType or getattr(function, "__globals__", None) is vars(space)
            if not is_torchs or getattr(function, "__name__", None) != name:
                replaced.append(f"{space.__name__}.{name}")
    return replaced


class TransparentMode(TorchFunctionMode):
    """A mode of fastgen, which leaves to other modes all that they wait for."""


def is_watched() -> bool:
    """Whether a mode of the program would miss what it waits for, or keeps what nobody else is to have."""
    for index in range(torch._C._len_torch_function_stack()):
        if not isinstance(torch._C._get_function_stack_at(index), (DeviceContext, TransparentMode)):
            return True
    return False
