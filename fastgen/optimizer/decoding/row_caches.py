"""Keys and values of all layers of a decoder, preallocated in one buffer, written in place and reordered together.

For self-attention during decoding, where every row has its own keys: the preallocated caches of Seamless §"Optimizing
SeamlessM4T", with one move for all layers instead of two per layer. Knows no host library.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_CAPACITY = 32

# From here on it pays, on a CPU, to find the rows that a reorder moves.
MIN_ELEMENTS_TO_LOOK_AT = 1 << 16


class RowCaches:
    """The keys and values of `layers` layers with equal heads, for the same rows.

    limit: the number of positions that decoding can reach; the buffer doubles towards it instead of starting there,
    because many hosts allow far more positions than are used.
    """

    def __init__(self, layers: int, limit: int) -> None:
        self.limit = limit
        self.lengths = [0] * layers
        self.fixed = 0  # leading positions that are equal in all rows that may change places
        self.buffer: Tensor | None = None  # [layers, 2, rows, heads, capacity, head_dim]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values `[rows, heads, new_length, head_dim]`; returns all of the layer, as views."""
        start = self.lengths[layer]
        end = start + keys.shape[2]
        if self.buffer is None or end > self.buffer.shape[4]:
            self._grow(end, keys)
        mine = self.buffer[layer]
        mine[0, :, :, start:end] = keys
        mine[1, :, :, start:end] = values
        self.lengths[layer] = end
        filled = mine[:, :, :, :end]  # [2, rows, heads, length, head_dim]
        return filled[0], filled[1]

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row `order[i]` was; `order` (int64) may have fewer entries than there are rows."""
        length, rows = max(self.lengths), order.shape[0]
        if self.buffer is None or length == 0:
            return
        if rows < self.buffer.shape[2]:
            taken = self.buffer[:, :, :, :, :length].index_select(2, order)
            self.buffer = self.buffer[:, :, :rows]
            self.buffer[:, :, :, :, :length] = taken
            return
        moving = self.buffer[:, :, :, :, self.fixed : length]
        if order.device.type != "cpu" or moving.numel() < MIN_ELEMENTS_TO_LOOK_AT:
            moving.copy_(moving.index_select(2, order))
            return
        moved = (order != torch.arange(rows)).nonzero().squeeze(1)
        if moved.numel():
            moving[:, :, moved] = moving.index_select(2, order[moved])

    def _grow(self, needed: int, keys: Tensor) -> None:
        rows, heads, _, width = keys.shape
        before = 0 if self.buffer is None else self.buffer.shape[4]
        capacity = max(needed, min(self.limit, max(FIRST_CAPACITY, 2 * before)))
        grown = keys.new_empty((len(self.lengths), 2, rows, heads, capacity, width))
        if self.buffer is not None:
            length = max(self.lengths)
            grown[:, :, :, :, :length] = self.buffer[:, :, :, :, :length]
        self.buffer = grown
