"""Memory for the tensors between two kernels: those that are not needed at the same time have the same.

Tests: tests/ops/test_cpu_graph.py
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastgen.ops.cpu_graph.trace import Call

# A buffer is not taken for what needs less than this part of it.
LEAST_USE = 0.5

# Identity of a storage, unique while the storage is alive.
Memory = int


def memory_of(tensor: Tensor) -> Memory:
    return tensor.untyped_storage()._cdata


def memories_of(tensors: Iterable[Tensor]) -> set[Memory]:
    return set(map(memory_of, tensors))


def share_buffers(calls: list[Call], kept: set[Memory]) -> None:
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
        for tensor in sharing:
            tensor.set_(buffers[memory], tensor.storage_offset(), tensor.size(), tensor.stride())


def _made_in_between(calls: list[Call], kept: set[Memory]) -> dict[Memory, list[Tensor]]:
    """The tensors in each memory that the calls have made, all but `kept`."""
    given = set(kept)
    tensors: dict[Memory, dict[int, Tensor]] = {}
    for call in calls:
        given |= memories_of(call.read) - tensors.keys()
        for tensor in (*call.read, *call.made):
            if memory_of(tensor) not in given:
                tensors.setdefault(memory_of(tensor), {})[id(tensor)] = tensor
    return {memory: list(sharing.values()) for memory, sharing in tensors.items()}
