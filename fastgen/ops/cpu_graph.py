"""What a CPU has instead of a CUDA graph: the calls of torch's kernels that a function has made, to be made again.

A step of a decoder calls some hundred kernels; the Python between them takes as long as the kernels themselves where
rows are few. Here every call has its tensors, at addresses that stay, and what only looks at tensors is left out.

    Tracer ──> calls ──> those that are needed, some of them fused ──> repetitions, into memory that tensors share

AMD EPYC (family 25), 2 threads, one step, ms, without and with it: GPT-2 small, one row, 47 and 31; BART-base, 4 beams
of one input, 46 and 33; T5-base, 32 rows, 190 and 150.

Tests: tests/ops/test_cpu_graph.py
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from fastgen.ops import few_queries, lookup, rms_norm, x86
from fastgen.ops.cpu_linear import skinny_gemm
from fastgen.ops.tracing import Diverged, NotRepeatable, TracedCall, Tracer

# They give memory whose content is not defined: a replay has it already.
_MAKE_ROOM = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})


def capture(function: Callable[[], Any]) -> tuple[Callable[[], Any], int, set[Memory]]:
    """The replay of a function that runs on a CPU without gradients.

    Returns also the bytes of memory that it needs for itself, and the memories that it reads. A replay gives the
    function's output, computed from what the tensors hold then, in memory that the next replay overwrites; the tensors
    that the function reads have to stay. Raises NotRepeatable where a replay would not do the same; the replay raises
    Diverged where the function would take another way.
    """
    random = torch.get_rng_state()
    with Tracer() as tracer:
        output = function()
    if not torch.equal(random, torch.get_rng_state()):
        torch.set_rng_state(random)
        raise NotRepeatable("it draws random numbers")
    returned = memories_of(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    calls = _without_repeats(_without_unused(tracer.calls, returned), returned)
    calls = skinny_gemm.fused(rms_norm.fused(calls, output), output)
    needed, constant = _needed(calls)
    share_buffers(calls, returned | constant)
    made = [tensor.untyped_storage() for call in needed for tensor in call.made if not call.writes]
    nbytes = sum(memory.nbytes() for memory in {memory._cdata: memory for memory in made}.values())
    repetitions = [repetition_of(call) for call in needed]
    moving = [one for _, args, _ in repetitions for one in args if isinstance(one, x86.Address)]
    replay = partial(_replay, repetitions, moving, output, calls)
    return replay, nbytes, memories_of(tensor for call in needed for tensor in call.read)


def _replay(repetitions: list[Repetition], moving: list[x86.Address], output: Any, calls: list[TracedCall]) -> Any:
    """calls: whose tensors the repetitions address, and which stay as long as the replay does."""
    for address in moving:
        address.value = address.tensor.data_ptr()
    for function, args, kwargs in repetitions:
        function(*args, **kwargs)
    return output


def _without_unused(calls: list[TracedCall], returned: set[Memory]) -> list[TracedCall]:
    """The calls whose results are read or returned, or that do something else."""
    used, kept = set(returned), []
    for call in reversed(calls):
        if call.writes or not call.made or memories_of(call.made) & used:
            used |= memories_of(call.read)
            kept.append(call)
    return kept[::-1]


def _without_repeats(calls: list[TracedCall], returned: set[Memory]) -> list[TracedCall]:
    """Leaves out calls that compute what an earlier one has, such as each layer's mask; their tensors get its memory.

    Only of tensors that nobody writes.
    """
    written, tensors = _written(calls), _tensors_by_memory(calls)
    first: dict[Hashable, TracedCall] = {}
    kept = []
    for call in calls:
        read, made = memories_of(call.read), memories_of(call.made)
        changes = call.writes or not call.made or (read | made) & written or made & (returned | read)
        if changes or call.operation._schema.name in _MAKE_ROOM or (same := first.setdefault(_key(call), call)) is call:
            kept.append(call)
            continue
        for result, other in zip(call.made, same.made):
            _move_to(other.untyped_storage(), tensors[memory_of(result)])
    return kept


def _key(call: TracedCall) -> Hashable:
    """Returns a key that is equal for calls that compute the same."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    return call.operation, repr(structure), tuple(map(_identity, leaves))


def _identity(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return memory_of(leaf), leaf.storage_offset(), leaf.size(), leaf.stride(), leaf.dtype
    return type(leaf), leaf


def _written(calls: list[TracedCall]) -> set[Memory]:
    return {memory for call in calls if call.writes for memory in memories_of(call.made or call.read)}


def _needed(calls: list[TracedCall]) -> tuple[list[TracedCall], set[Memory]]:
    """The calls that a replay has to make, and memories that hold the same numbers at all times.

    Views and what was made from nothing need not be made again.
    """
    written = _written(calls)
    needed: list[TracedCall] = []
    constant: set[Memory] = set()
    for call in calls:
        read, made = memories_of(call.read), memories_of(call.made)
        if call.writes or not made:
            needed.append(call)
        elif made <= read or call.operation._schema.name in _MAKE_ROOM:
            continue
        elif read <= constant and not made & written:
            constant |= made
        else:
            needed.append(call)
    return needed, constant


# Repetitions.

# A function and its arguments.
Repetition = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)

# Operations of fastgen, by name: what makes a function that computes their result where it is.
_KERNELS: dict[str, Callable[..., partial[None]]] = {
    skinny_gemm.OPERATION: skinny_gemm.call_into,
    few_queries.OPERATION: few_queries.call_into,
    rms_norm.OPERATION: rms_norm.call_into,
    lookup.OPERATION: lookup.call_into,
}

# Arguments that a form with `out` takes from the tensor that it is given.
_TOLD_BY_OUT = frozenset({"dtype", "layout", "device", "pin_memory"})


def repetition_of(call: TracedCall) -> Repetition:
    """Returns that of a call that computes something, or reads a scalar: it raises Diverged if that has changed."""
    if not call.made and not call.writes:
        return partial(_check_scalar, call), (), {}
    if (in_place := _IN_PLACE.get(call.operation)) and (write := in_place(*call.args, **call.kwargs)) is not None:
        return write, (), {}
    if call.writes:
        return call.operation._op, call.args, call.kwargs
    if call.operation in _COPIES:
        return Tensor.copy_, (call.result, call.args[0]), {}
    name = call.operation._schema.name
    kernel = None
    if (call_into := _KERNELS.get(name)) is not None:
        kernel = call_into(call.result, *call.args)
    elif name in few_queries.SDPA:
        kernel = few_queries.sdpa_into(call.operation, call.made[0], call.args, call.kwargs)
    if kernel is not None:
        return kernel.func, kernel.args, {}
    form, outs = _form_with_out(call.operation)
    if form is None:
        return partial(_compute_and_copy, call), (), {}
    known = {argument.name for argument in form._schema.arguments}
    kwargs = {name: value for name, value in call.kwargs.items() if name in known}
    return form._op, call.args, kwargs | dict(zip(outs, call.made))


def _write_at(buffer: Tensor, dim: int, index: Tensor, source: Tensor) -> Callable[[], None] | None:
    """`buffer.index_copy_(dim, index, source)` of one index as the copy of a slice, in a quarter of the time."""
    if index.numel() != 1 or index.dtype != torch.int64 or not buffer.dim():
        return None
    position, added, size = ctypes.c_int64.from_address(index.data_ptr()), source.select(dim, 0), buffer.shape[dim]

    def write() -> None:
        if not 0 <= position.value < size:  # a slice may count from the end
            raise IndexError(f"index {position.value} is not one of {size} positions")
        buffer.select(dim, position.value).copy_(added)

    return write


def _add_to_count(count: Tensor, added: Any, **options: Any) -> Callable[[], None] | None:
    """`count.add_(added)` of one integer, without torch, whose code has left the caches after a large product."""
    if count.dim() or count.dtype != torch.int64 or type(added) is not int or options:
        return None
    number = ctypes.c_int64.from_address(count.data_ptr())

    def add() -> None:
        number.value += added

    return add


# What may take less time than an operation that writes, or None.
_IN_PLACE: dict[Any, Callable[..., Callable[[], None] | None]] = {
    torch.ops.aten.index_copy_.default: _write_at,
    torch.ops.aten.add_.Tensor: _add_to_count,
}


def _check_scalar(call: TracedCall) -> None:
    found = call.operation._op(*call.args, **call.kwargs)
    if found != call.result:
        raise Diverged(f"{call.operation} returned {found} on the host instead of {call.result}")


def _compute_and_copy(call: TracedCall) -> None:
    results = call.operation._op(*call.args, **call.kwargs)
    for mine, found in zip(call.made, (results,) if isinstance(results, Tensor) else results):
        mine.copy_(found)


@functools.cache
def _form_with_out(operation: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload | None, tuple[str, ...]]:
    """The form of an operation that writes its results into given tensors, and their names; None if it has none."""
    results = [str(result.type) for result in operation._schema.returns]
    wanted = [_described(argument) for argument in operation._schema.arguments if argument.name not in _TOLD_BY_OUT]
    packet = operation.overloadpacket
    for form in (getattr(packet, name) for name in packet.overloads()):
        outs = [argument for argument in form._schema.arguments if argument.is_out]
        others = [argument for argument in form._schema.arguments if not argument.is_out]
        if results and [str(out.type) for out in outs] == results and wanted == list(map(_described, others)):
            return form, tuple(out.name for out in outs)
    return None, ()


def _described(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)


# Memory for the tensors between two kernels: those that are not needed at the same time have the same.

# A buffer is not taken for what needs less than this part of it.
LEAST_USE = 0.5

# Identity of a storage, unique while the storage is alive.
Memory = int


def memory_of(tensor: Tensor) -> Memory:
    return int(tensor.untyped_storage()._cdata)


def memories_of(tensors: Iterable[Tensor]) -> set[Memory]:
    return set(map(memory_of, tensors))


def share_buffers(calls: list[TracedCall], kept: set[Memory]) -> None:
    """Moves what the calls have made into buffers that they share, all but the memories `kept`.

    The tensors stay the same objects; their content is lost.
    """
    tensors = _made_in_between(calls, kept)
    last = {memory: number for number, call in enumerate(calls) for memory in memories_of(call.read + call.made)}
    free: list[torch.UntypedStorage] = []
    buffers: dict[Memory, torch.UntypedStorage] = {}
    for number, call in enumerate(calls):
        used = memories_of(call.read + call.made) & tensors.keys()
        for memory in used - buffers.keys():
            needed = tensors[memory][0].untyped_storage().nbytes()
            fitting = [one for one in free if LEAST_USE * one.nbytes() <= needed <= one.nbytes()]
            buffer = min(fitting, key=torch.UntypedStorage.nbytes) if fitting else torch.UntypedStorage(needed)
            buffers[memory], free = buffer, [one for one in free if one is not buffer]
        free += [buffers[memory] for memory in used if last[memory] == number]
    for memory, sharing in tensors.items():
        _move_to(buffers[memory], sharing)


def _move_to(memory: torch.UntypedStorage, tensors: Iterable[Tensor]) -> None:
    """The tensors lie in this memory from now on, as they lay in theirs; their content is lost."""
    for tensor in tensors:
        tensor.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _tensors_by_memory(calls: list[TracedCall]) -> dict[Memory, list[Tensor]]:
    """What the calls read and make."""
    tensors: dict[Memory, dict[int, Tensor]] = {}
    for call in calls:
        for tensor in (*call.read, *call.made):
            tensors.setdefault(memory_of(tensor), {})[id(tensor)] = tensor
    return {memory: list(sharing.values()) for memory, sharing in tensors.items()}


def _made_in_between(calls: list[TracedCall], kept: set[Memory]) -> dict[Memory, list[Tensor]]:
    """The tensors in each memory that the calls have made, all but `kept`."""
    given = set(kept)
    made: set[Memory] = set()
    for call in calls:
        given |= memories_of(call.read) - made
        made |= memories_of(call.made)
    return {memory: tensors for memory, tensors in _tensors_by_memory(calls).items() if memory not in given}
