"""A CPU's counterpart of a CUDA graph: records the kernel calls of a function and replays them without its Python.

A decode step calls some hundred kernels; with few rows, the Python between them takes as long as the kernels. A replay
calls each kernel with the same tensors, at fixed addresses, and leaves out calls that only create views.

    Tracer ──> calls ──> the needed ones, some of them fused ──> repetitions, into memory that tensors share

AMD EPYC (family 25), 2 threads, one step, ms, without and with it: GPT-2 small, one row, 47 and 31; BART-base, 4 beams
of one input, 46 and 33; T5-base, 32 rows, 190 and 150.

Tests: tests/ops/test_cpu_graph.py
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from fastgen.ops import cpu_attention, cpu_linear, norms, simd
from fastgen.ops.fusion import fused
from fastgen.ops.tracing import Diverged, Memory, NotRepeatable, TracedCall, Tracer, memories_of, memory_of

# Operations that allocate without initializing: a replay has the memory already.
_MAKE_ROOM = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})


def capture(function: Callable[[], Any]) -> tuple[Callable[[], Any], int, set[Memory]]:
    """Returns the replay of a function that runs on a CPU without gradients, the bytes it owns, and what it reads.

    A replay returns the function's output, computed from what the tensors hold then, in memory that the next replay
    overwrites; the storages that it reads (the third result) must stay alive and in place. Raises NotRepeatable if a
    replay would not do the same as the function; the replay raises Diverged if the function would take another branch.
    """
    random = torch.get_rng_state()
    with Tracer() as tracer:
        output = function()
    if not torch.equal(random, torch.get_rng_state()):
        torch.set_rng_state(random)
        raise NotRepeatable("it draws random numbers")
    returned = memories_of(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    calls = _without_repeats(_without_unused(tracer.calls, returned), returned)
    calls = fused(calls, output, [*norms.rms_fusions(), *cpu_linear.fusions(), *norms.layer_fusions()])
    needed, constant = _needed(calls)
    share_buffers(calls, returned | constant)
    storages = [tensor.untyped_storage() for call in needed for tensor in call.outputs if not call.writes]
    nbytes = sum(memory.nbytes() for memory in {memory._cdata: memory for memory in storages}.values())
    repetitions = [repetition_of(call) for call in needed]
    moving = [argument for _, args, _ in repetitions for argument in args if isinstance(argument, simd.Address)]
    replay = Replay(repetitions, moving, output, calls)
    return replay, nbytes, memories_of(tensor for call in needed for tensor in call.read)


@dataclass
class Replay:
    """Runs the repetitions and returns the output; calls: holds the tensors that the repetitions address."""

    repetitions: list[Repetition]
    moving: list[simd.Address]
    output: Any
    calls: list[TracedCall]

    def __call__(self) -> Any:
        for address in self.moving:
            address.value = address.tensor.data_ptr()
        for function, args, kwargs in self.repetitions:
            function(*args, **kwargs)
        return self.output

    @property
    def may_diverge(self) -> bool:
        """Whether a replay checks scalars that the function has read."""
        return any(not call.outputs and not call.writes for call in self.calls)


def _without_unused(calls: list[TracedCall], returned: set[Memory]) -> list[TracedCall]:
    """Returns the calls whose results are read or returned, or that have a side effect."""
    used = set(returned)
    used_calls = []
    for call in reversed(calls):
        if call.writes or not call.outputs or memories_of(call.outputs) & used:
            used |= memories_of(call.read)
            used_calls.append(call)
    return used_calls[::-1]


def _without_repeats(calls: list[TracedCall], returned: set[Memory]) -> list[TracedCall]:
    """Removes calls that repeat an earlier one, such as each layer's mask; their tensors get that call's memory.

    Calls whose tensors are written are not removed.
    """
    written, tensors = _written(calls), _tensors_by_memory(calls)
    first: dict[Hashable, TracedCall] = {}
    different = []
    for call in calls:
        read, results = memories_of(call.read), memories_of(call.outputs)
        changes = call.writes or not call.outputs or (read | results) & written or results & (returned | read)
        if changes or call.operation._schema.name in _MAKE_ROOM or (same := first.setdefault(_key(call), call)) is call:
            different.append(call)
            continue
        for result, other in zip(call.outputs, same.outputs):
            _move_to(other.untyped_storage(), tensors[memory_of(result)])
    return different


def _key(call: TracedCall) -> Hashable:
    """Returns a key that is equal for calls that compute the same."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    return call.operation, repr(structure), tuple(map(_identity, leaves))


def _identity(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return memory_of(leaf), leaf.storage_offset(), leaf.size(), leaf.stride(), leaf.dtype
    return type(leaf), leaf


def _written(calls: list[TracedCall]) -> set[Memory]:
    return {memory for call in calls if call.writes for memory in memories_of(call.outputs or call.read)}


def _needed(calls: list[TracedCall]) -> tuple[list[TracedCall], set[Memory]]:
    """Returns the calls that a replay must make, and the memories whose content never changes.

    Views, and results that depend on no input, need not be computed again.
    """
    written = _written(calls)
    needed: list[TracedCall] = []
    constant: set[Memory] = set()
    for call in calls:
        read, results = memories_of(call.read), memories_of(call.outputs)
        if call.writes or not results:
            needed.append(call)
        elif results <= read or call.operation._schema.name in _MAKE_ROOM:
            continue
        elif read <= constant and not results & written:
            constant |= results
        else:
            needed.append(call)
    return needed, constant


# Repetitions.

# A function and its arguments.
Repetition = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)

# Arguments that an `out` overload takes from its output tensor.
_TOLD_BY_OUT = frozenset({"dtype", "layout", "device", "pin_memory"})


def repetition_of(call: TracedCall) -> Repetition:
    """Returns the repetition of a call. If the call reads a scalar, it raises Diverged when the scalar has changed."""
    if not call.outputs and not call.writes:
        return partial(_check_scalar, call), (), {}
    if (in_place := _IN_PLACE.get(call.operation)) and (write := in_place(*call.args, **call.kwargs)) is not None:
        return write, (), {}
    if call.writes:
        return call.operation._op, call.args, call.kwargs
    if call.operation in _COPIES:
        return Tensor.copy_, (call.result, call.args[0]), {}
    name = call.operation._schema.name
    kernel = None
    if (call_into := simd.CALLS_INTO.get(name)) is not None:
        kernel = call_into(call.result, *call.args)
    elif name in cpu_attention.SDPA:
        kernel = cpu_attention.sdpa_into(call.operation, call.outputs[0], call.args, call.kwargs)
    if kernel is not None:
        return kernel.func, kernel.args, {}
    form, outs = _form_with_out(call.operation)
    if form is None:
        return partial(_compute_and_copy, call), (), {}
    accepted = {argument.name for argument in form._schema.arguments}
    kwargs = {name: value for name, value in call.kwargs.items() if name in accepted}
    return form._op, call.args, kwargs | dict(zip(outs, call.outputs))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _write_at(buffer: Tensor, dim: int, index: Tensor, source: Tensor) -> Callable[[], None] | None:
    """Returns `buffer.index_copy_(dim, index, source)` for one index as numpy's copy of a slice.

    After a product that has evicted all code from the caches, this takes less than half the time of torch's slice copy.
    """
    integers = _INTEGERS.get(buffer.itemsize)  # numpy lacks some types of numbers
    if index.numel() != 1 or index.dtype != torch.int64 or not buffer.dim() or integers is None:
        return None
    position = ctypes.c_int64.from_address(index.data_ptr())
    slices = buffer.detach().view(integers).movedim(dim, 0).numpy()
    added = source.detach().view(integers).select(dim, 0).numpy()
    size = len(slices)

    def write() -> None:
        if not 0 <= position.value < size:  # a slice may count from the end
            raise IndexError(f"index {position.value} is not one of {size} positions")
        slices[position.value] = added

    return write


def _add_to_count(count: Tensor, added: Any, **options: Any) -> Callable[[], None] | None:
    """Returns `count.add_(added)` for one integer without torch, whose code a large product evicts from the caches."""
    if count.dim() or count.dtype != torch.int64 or type(added) is not int or options:
        return None
    number = ctypes.c_int64.from_address(count.data_ptr())

    def add() -> None:
        number.value += added

    return add


# Faster replacements of operations that write; each returns None if it does not apply.
_IN_PLACE: dict[Any, Callable[..., Callable[[], None] | None]] = {
    torch.ops.aten.index_copy_.default: _write_at,
    torch.ops.aten.add_.Tensor: _add_to_count,
}


def _check_scalar(call: TracedCall) -> None:
    value = call.operation._op(*call.args, **call.kwargs)
    if value != call.result:
        raise Diverged(f"{call.operation} returned {value} on the host instead of {call.result}")


def _compute_and_copy(call: TracedCall) -> None:
    results = call.operation._op(*call.args, **call.kwargs)
    for output, result in zip(call.outputs, (results,) if isinstance(results, Tensor) else results):
        output.copy_(result)


@functools.cache
def _form_with_out(operation: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload | None, tuple[str, ...]]:
    """Returns an operation's `out` overload and the names of its outputs, or (None, ()) if it has none."""
    results = [str(result.type) for result in operation._schema.returns]
    wanted = [_described(argument) for argument in operation._schema.arguments if argument.name not in _TOLD_BY_OUT]
    packet = operation.overloadpacket
    for form in (getattr(packet, name) for name in packet.overloads()):
        outs = [argument for argument in form._schema.arguments if argument.is_out]
        inputs = [argument for argument in form._schema.arguments if not argument.is_out]
        if results and [str(out.type) for out in outs] == results and wanted == list(map(_described, inputs)):
            return form, tuple(out.name for out in outs)
    return None, ()


def _described(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)


# Memory of intermediate tensors: tensors that are not needed at the same time share a buffer.

# A tensor that needs less than this fraction of a buffer does not get it.
LEAST_USE = 0.5


def share_buffers(calls: list[TracedCall], excluded: set[Memory]) -> None:
    """Moves the calls' outputs, except the memories `excluded`, into buffers that they share.

    The tensors stay the same objects; their content is lost.
    """
    tensors = _intermediate_tensors(calls, excluded)
    last = {memory: number for number, call in enumerate(calls) for memory in memories_of(call.read + call.outputs)}
    free: list[torch.UntypedStorage] = []
    buffers: dict[Memory, torch.UntypedStorage] = {}
    for number, call in enumerate(calls):
        used = memories_of(call.read + call.outputs) & tensors.keys()
        for memory in used - buffers.keys():
            needed = tensors[memory][0].untyped_storage().nbytes()
            fitting = [storage for storage in free if LEAST_USE * storage.nbytes() <= needed <= storage.nbytes()]
            buffer = min(fitting, key=torch.UntypedStorage.nbytes) if fitting else torch.UntypedStorage(needed)
            buffers[memory], free = buffer, [storage for storage in free if storage is not buffer]
        free += [buffers[memory] for memory in used if last[memory] == number]
    for memory, sharing in tensors.items():
        _move_to(buffers[memory], sharing)


def _move_to(memory: torch.UntypedStorage, tensors: Iterable[Tensor]) -> None:
    """Moves tensors into this memory, with their offsets, sizes and strides; their content is lost."""
    for tensor in tensors:
        tensor.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _tensors_by_memory(calls: list[TracedCall]) -> dict[Memory, list[Tensor]]:
    """Returns the tensors that the calls read and return, by memory."""
    tensors: dict[Memory, dict[int, Tensor]] = {}
    for call in calls:
        for tensor in (*call.read, *call.outputs):
            tensors.setdefault(memory_of(tensor), {})[id(tensor)] = tensor
    return {memory: list(sharing.values()) for memory, sharing in tensors.items()}


def _intermediate_tensors(calls: list[TracedCall], excluded: set[Memory]) -> dict[Memory, list[Tensor]]:
    """Returns the tensors in memories that the calls allocate, by memory, except the memories `excluded`."""
    outside = set(excluded)
    allocated: set[Memory] = set()
    for call in calls:
        outside |= memories_of(call.read) - allocated
        allocated |= memories_of(call.outputs)
    return {memory: tensors for memory, tensors in _tensors_by_memory(calls).items() if memory not in outside}
