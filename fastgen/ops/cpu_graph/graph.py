"""The recording of a function's kernels, and its replay.

Tests: tests/ops/test_cpu_graph.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgen.ops.cpu_graph.buffers import Memory, memories_of, share_buffers
from fastgen.ops.cpu_graph.calls import repetition_of
from fastgen.ops.cpu_graph.trace import Call, NotRepeatable, Tracer

# They give memory whose content is not defined: a replay has it already.
_MAKE_ROOM = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})


class CpuGraph:
    """The kernels that `function` calls on a CPU without gradients; the tensors that it reads have to stay.

    output: of the function; overwritten by each replay. nbytes: of the memory that a replay needs for itself. Raises
    NotRepeatable where a replay would not do the same.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        random = torch.get_rng_state()
        with Tracer() as tracer:
            self.output = function()
        if not torch.equal(random, torch.get_rng_state()):
            torch.set_rng_state(random)
            raise NotRepeatable("it draws random numbers")
        needed, constant = _needed(tracer.calls)
        returned = memories_of(leaf for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor))
        share_buffers(tracer.calls, returned | constant)
        self._repetitions = [repetition_of(call) for call in needed]
        self._calls = tracer.calls  # so that all tensors stay
        made = [tensor.untyped_storage() for call in needed for tensor in call.made if not call.writes]
        self.nbytes = sum(memory.nbytes() for memory in {memory._cdata: memory for memory in made}.values())

    def replay(self) -> Any:
        """The output, computed from what the tensors hold now. Raises Diverged where the function takes another way."""
        for function, args, kwargs in self._repetitions:
            function(*args, **kwargs)
        return self.output


def _needed(calls: list[Call]) -> tuple[list[Call], set[Memory]]:
    """The calls that a replay has to make, and memories that hold the same numbers at all times.

    Views and what was made from nothing need not be made again.
    """
    written = {memory for call in calls if call.writes for memory in memories_of(call.made or call.read)}
    needed: list[Call] = []
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
