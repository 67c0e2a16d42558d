"""What rows generate, the last segment of a `KVCache`: keys and values in buffers that are written in place.

Tests: tests/optimizer/decoding/test_kv_cache.py
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.ops.move_rows import move_rows

FIRST_CAPACITY = 32

KV = tuple[Tensor, ...]  # keys and values


class Generated:
    """Keys and values of each row, in layers that are alike: one buffer for all keys, one for all values.

    limit: positions that a row can reach; the buffers grow towards it instead of starting there, because many hosts
    allow far more positions than are used. lengths: positions of each layer. unmoved: how many of the first ones are
    equal in all rows of an input, so that no reorder has to move them. by_layer: keys and values of each layer,
    `[rows, kv_heads, capacity, head_dim]`. buffers: of which these are views, `[layers, rows, kv_heads, capacity,
    head_dim]`; empty before the first `append`. is_static: the buffers must not be replaced.
    """

    def __init__(self, layers: int, limit: int, is_static: bool = False) -> None:
        self.limit, self.is_static = limit, is_static
        self.lengths = [0] * layers
        self.unmoved = 0
        self.buffers: list[Tensor] = []
        self.by_layer: list[KV] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values `[rows, kv_heads, new_length, head_dim]` behind those that are there."""
        start = self.lengths[layer]
        end = start + keys.shape[2]
        if not self.buffers or end > self.buffers[0].shape[3]:
            spare = max(FIRST_CAPACITY, max(self.lengths) - self.unmoved)
            self._move((keys, values), max(end, min(self.limit, end + spare)))
        for buffer, added in zip(self.by_layer[layer], (keys, values)):
            buffer[:, :, start:end] = added
        self.lengths[layer] = end

    def read(self, layer: int) -> KV:
        """What is there, `[rows, kv_heads, length, head_dim]`, as views; not before an `append`."""
        keys, values = self.by_layer[layer]
        return keys[:, :, : self.lengths[layer]], values[:, :, : self.lengths[layer]]

    def reorder(self, beam_idx: Tensor, layers: slice = slice(None)) -> None:
        """Row i becomes what row `beam_idx[i]` (int64 or int32, `[rows]`) of the same input was, in these layers."""
        length = max(self.lengths[layers])
        if length <= self.unmoved:
            return
        if not self.is_static and _are_held_elsewhere(self.buffers):  # of a static one, by captured steps only
            self._move(self.by_layer[0], self.buffers[0].shape[3])
        move_rows([buffer[layers, :, :, self.unmoved : length] for buffer in self.buffers], beam_idx)

    def compact(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` (int64) was; the others are dropped."""
        if not self.buffers:
            return
        index = rows.tolist() if rows.device.type == self.buffers[0].device.type == "cpu" else []
        if not index or index != sorted(set(index)) or _are_held_elsewhere(self.buffers):
            self._move(self.by_layer[0], self.buffers[0].shape[3], rows)
            return
        used = max(self.lengths)
        for buffer in self.buffers:  # rows only move to the front: none is overwritten before it has moved
            for to, row in enumerate(index):
                if to != row:
                    buffer[:, to, :, :used] = buffer[:, row, :, :used]
        self.use([buffer[:, : len(rows)] for buffer in self.buffers])

    def use(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.by_layer = list(zip(*map(torch.unbind, buffers)))

    def _move(self, like: KV, capacity: int, rows: Tensor | None = None) -> None:
        """Goes on in buffers of this capacity, with these rows or with all; like: keys and values of one layer."""
        used, buffers = max(self.lengths), []
        for which, states in enumerate(like):
            count, heads, _, width = states.shape
            count = count if rows is None else len(rows)
            buffers.append(states.new_empty((len(self.lengths), count, heads, capacity, width)))
            if self.buffers:
                present = self.buffers[which][:, :, :, :used]
                chosen = present if rows is None else present.index_select(1, rows.to(present.device))
                buffers[-1][:, :, :, :used] = chosen
        self.use(buffers)


def _are_held_elsewhere(buffers: list[Tensor]) -> bool:
    """Whether somebody else holds a view of them, such as a model that remembers its keys, or torch does not tell."""
    most = _holders_of_new_buffer(len(buffers[0]))
    return most is None or any(_holders(buffer) > most for buffer in buffers)


def _holders(buffer: Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)


@functools.cache
def _holders_of_new_buffer(layers: int) -> int | None:
    """How many hold a buffer that only its layers are views of, which differs between versions of torch."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        return None
    buffer = torch.empty(layers, 1)
    _by_layer = buffer.unbind(0)
    return _holders(buffer)
