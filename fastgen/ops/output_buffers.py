"""Memory of large outputs, for the products, norms and activations of a prefill or an encoder on a CPU.

The allocator returns memory of 32 MiB or more to the system as soon as a tensor is freed, and smaller pieces when it
has too many. Then the next tensor of that size costs a page fault for each 4 KiB, and the system clears each page:
4,096 × 3,072 numbers in fp32 take 42 ms, a seventh of the product that computes them (AMD EPYC, family 25, model 1,
one thread).

Tests: tests/ops/test_output_buffers.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MIN_BYTES = 4 << 20  # of a buffer that is worth holding
_CAN_TELL = hasattr(torch._C, "_storage_Use_Count")  # whether a storage is held


class OutputBuffers:
    """Buffers of the outputs of one forward, each used again when no tensor holds it.

    Sizes are equal or a buffer is not used, so that an output has no more memory than it needs. The buffers are those
    of outputs that come from the same number of rows: when that changes, as it does after a prefill, they are freed.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.storages: list[torch.UntypedStorage] = []

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Returns an uninitialised contiguous tensor of this shape; its dtype is that of `like`, its device the CPU."""
        count = math.prod(shape)
        rows = count // shape[-1]
        if rows != self.rows:
            self.storages.clear()
            self.rows = rows
        nbytes = count * like.itemsize
        if nbytes < MIN_BYTES or not _CAN_TELL or torch._C._len_torch_dispatch_stack():
            return like.new_empty(shape)
        for storage in self.storages:
            if storage.nbytes() == nbytes and not _is_held(storage):
                return torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, 0, shape)
        output = torch.empty(shape, dtype=like.dtype, device="cpu")
        self.storages.append(output.untyped_storage())
        return output

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Returns an uninitialised contiguous tensor of this one's shape and dtype."""
        return self.empty(tensor.shape, tensor)


def _is_held(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor has this storage; the reference of Python's object is one."""
    return int(torch._C._storage_Use_Count(storage._cdata)) > 1
