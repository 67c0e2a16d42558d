"""Tracing: records the operations of torch that a function calls, and detects user code that watches or traces them.

Tests: tests/ops/test_cpu_graph.py, tests/optimizer/transformers/test_replaced_code.py
"""

from __future__ import annotations

from collections.abc import Iterable
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

# The arguments of a call of torch that a mode sees.
Arguments = tuple[Any, ...]
Options = dict[str, Any] | None
# The identity of a storage, unique while it is alive.
Memory = int


class NotRepeatable(Exception):
    """The function does something that repeating its kernels would not do. code: the code of the reason."""

    code = "CAPTURE_REFUSED"


class UnderAutocast(NotRepeatable):
    """The function enters autocast itself."""

    code = "AUTOCAST"


class Diverged(Exception):
    """A scalar read on the host (`.item()`) changed since the capture, so that control flow may differ."""


class TracedCall(NamedTuple):
    """One call of an operation. read: the tensors among its arguments; outputs: the tensors among its results.

    An operation without outputs that writes nothing returns a scalar, on which control flow may depend.
    """

    operation: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    read: list[Tensor]
    outputs: list[Tensor]

    @property
    def writes(self) -> bool:
        """Whether the call changes one of its arguments."""
        return bool(self.operation._schema.is_mutable)

    @property
    def returns_argument(self) -> bool:
        """Whether the call returns its argument, as `to` does if the dtype is already right."""
        return len(self.outputs) == 1 and any(self.outputs[0] is tensor for tensor in self.read)


class Tracer(TorchDispatchMode):
    """A context that records the calls of torch's operations in order; raises NotRepeatable."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TracedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Arguments = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        if foreign := set(types) - {Tensor, nn.Parameter}:  # their inner calls would not be recorded
            raise NotRepeatable(f"{func} works on {', '.join(sorted(kind.__name__ for kind in foreign))}")
        if _has_any_size(func, args) or kwargs.get("generator") is not None:
            raise NotRepeatable(f"{func} has results of any size or draws numbers")
        result = func(*args, **kwargs)
        call = TracedCall(func, args, kwargs, result, _tensors((args, kwargs)), _tensors(result))
        if not call.outputs and not call.writes and result != result:
            raise NotRepeatable(f"{func} returned {result} on the host: control flow cannot be checked")
        self.calls.append(call)
        return result


class NoWaiting(Tracer):
    """A context that raises NotRepeatable before an operation that a CUDA graph cannot hold.

    Such operations make the host wait for the device, or copy between the two. CUDA would end the capture with an
    error, from which torch's allocator does not recover (pytorch#190308).
    """

    def __init__(self) -> None:
        super().__init__()
        self._read: set[Memory] = set()
        self._sees_all = True

    def has_read(self, tensor: Tensor) -> bool:
        """Whether an operation may have read this tensor; kernels that are not operations of torch are not seen."""
        return not self._sees_all or not _is_storage(tensor) or memory_of(tensor) in self._read

    def __torch_dispatch__(self, func: Any, types: Any, args: Arguments = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or _has_any_size(func, args) or _loops_on_host(func, args):
            raise NotRepeatable(f"{func} makes the host wait for the device")
        copies = func.overloadpacket in _COPIES
        tensors = _tensors((args, kwargs))
        self._read |= memories_of(filter(_is_storage, tensors))
        self._sees_all = self._sees_all and all(map(_is_storage, tensors))
        devices = {tensor.device.type for tensor in tensors if copies or tensor.dim()}
        devices |= {torch.device(kwargs["device"]).type} if copies and kwargs.get("device") is not None else set()
        if len(devices) > 1:
            raise NotRepeatable(f"{func} copies between the host and the device")
        return func(*args, **kwargs)


_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)


class TransparentMode(TorchFunctionMode):
    """The base of fastgen's modes, which do not interfere with other modes."""


class NoData(TransparentMode):
    """Raises NotRepeatable before a device gets numbers of the host, which dispatch modes do not see."""

    def __torch_function__(self, func: Any, types: Any, args: Arguments = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        device = "cpu"
        if func in _INDEXING and any(map(_is_sequence, args[1] if type(args[1]) is tuple else args[1:2])):
            device = args[0].device
        elif func in _OF_DATA and not any(isinstance(value, Tensor) for value in (*args[:1], *kwargs.values())):
            device = kwargs.get("device") or torch.get_default_device()
        elif func is Tensor.new_tensor:
            device = kwargs.get("device") or args[0].device
        if torch.device(device).type != "cpu":
            raise NotRepeatable(f"torch.{func.__name__} copies between the host and the device")
        return func(*args, **kwargs)


_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


def _is_sequence(index: Any) -> bool:
    """Whether an index is a list, or something else that torch converts to a tensor."""
    return hasattr(index, "__len__") and not isinstance(index, Tensor)


def _has_any_size(operation: torch._ops.OpOverload, args: Arguments) -> bool:
    """Whether the size of the result depends on values: it does if the indices are masks, not if they are positions."""
    if operation is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    return torch.Tag.dynamic_output_shape in operation.tags


def _loops_on_host(operation: torch._ops.OpOverload, args: Arguments) -> bool:
    """Whether it is a product of groups, as in mixtures of experts, that reads their sizes on the host.

    torch has a kernel for bfloat16 on GPUs of the compute capabilities 9 and 10 only (pytorch#169970).
    """
    name = operation._schema.name
    if name != "aten::_grouped_mm":
        return bool(name == "transformers::grouped_mm_fallback")
    operands = _tensors(args[:2])
    is_bfloat16 = all(operand.dtype == torch.bfloat16 for operand in operands)
    return not is_bfloat16 or torch.cuda.get_device_capability(operands[0].device)[0] not in (9, 10)


def _is_storage(tensor: Tensor) -> bool:
    """Whether the tensor is a view of a storage, not a class that wraps other tensors, which modes do not see."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided


def memory_of(tensor: Tensor) -> Memory:
    """Returns the identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def memories_of(tensors: Iterable[Tensor]) -> set[Memory]:
    """Returns the identities of the tensors' storages."""
    return set(map(memory_of, tensors))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


# Whether user code watches: then calling an operation of another name makes a difference.


def is_transformed() -> bool:
    """Whether torch.func, forward-mode AD, torch.jit.trace or a dispatch mode other than fastgen's is active here."""
    for index in range(torch._C._len_torch_dispatch_stack()):
        if not isinstance(torch._C._get_dispatch_stack_at(index), Tracer):
            return True
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


# Functions with which decoding loops choose tokens and move rows, in torch and in torch.nn.functional.
_OF_LOOPS = (
    (torch, ("argmax", "cat", "gather", "isin", "log_softmax", "multinomial", "softmax", "sort")),
    (torch, ("take_along_dim", "topk", "where")),
    (functional, ("log_softmax", "softmax")),
)


def replaced_functions() -> list[str]:
    """Returns the names of the decoding loops' functions that user code has replaced."""
    replaced = []
    for space, names in _OF_LOOPS:
        for name in names:
            function = getattr(space, name, None)
            is_torchs = type(function) is BuiltinFunctionType or getattr(function, "__globals__", None) is vars(space)
            if not is_torchs or getattr(function, "__name__", None) != name:
                replaced.append(f"{space.__name__}.{name}")
    return replaced


def is_watched() -> bool:
    """Whether a function mode of user code is active, which might miss or intercept calls."""
    for index in range(torch._C._len_torch_function_stack()):
        if not isinstance(torch._C._get_function_stack_at(index), (DeviceContext, TransparentMode)):
            return True
    return False
