"""Keys and values of all layers of a decoder: what the rows of an input share once, the rest written in place.

FastSeq §4.1; the buffers follow the static caches of Seamless §"Optimizing SeamlessM4T", with one move for all layers
and steps. Both hosts use it. Knows no host library.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastgen.optimizer.decoding.segmented_kv import SegmentedKV

# From here on it pays, on a CPU, to find the rows that a reorder moves.
MIN_ELEMENTS_TO_LOOK_AT = 1 << 16

FIRST_CAPACITY = 32

KeysAndValues = tuple[Tensor, Tensor]


class DecodingCache:
    """The keys and values of `layers` layers with equal heads, for the same rows, those of an input next to each other.

    fan_out: rows (beams or samples) per input. limit: the number of own positions that a row can reach; the buffers
    grow towards it instead of starting there, because many hosts allow far more positions than are used.
    shared: for each layer what the rows of an input have in common, `[inputs, kv_heads, shared_length, head_dim]`, or
    None. lengths: how many positions of their own the rows have in each layer.
    fixed: how many of these are equal in all rows of an input, so that no reorder has to move them. given: for each
    layer what stands for its present content, see `LayerStates`.
    """

    def __init__(self, layers: int, fan_out: int, limit: int) -> None:
        self.fan_out, self.limit = fan_out, limit
        self.shared: list[KeysAndValues | None] = [None] * layers
        self.lengths = [0] * layers
        self.fixed = 0
        self.buffers: list[Tensor] = []  # of keys, of values: [layers, rows, kv_heads, capacity, head_dim]
        self._by_layer: list[tuple[Tensor, ...]] = []
        self.given: list[tuple[SegmentedKV, SegmentedKV] | None] = [None] * layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes what each row has computed, `[rows, kv_heads, new_length, head_dim]`, behind what is its own."""
        start = self.lengths[layer]
        end = start + keys.shape[2]
        if not self.buffers or end > self.buffers[0].shape[3]:
            self._grow(end, (keys, values))
        for mine, added in zip(self._by_layer[layer], (keys, values)):
            mine[:, :, start:end] = added
        self.lengths[layer] = end

    def own(self, layer: int) -> KeysAndValues:
        """What the rows have for themselves, `[rows, kv_heads, length, head_dim]`, as views; not before an `append`."""
        keys, values = self._by_layer[layer]
        length = self.lengths[layer]
        return keys[:, :, :length], values[:, :, :length]

    def attended(self, layer: int) -> KeysAndValues:
        """What a step sees of `own`, with the mask that belongs to it."""
        return self.own(layer)

    def repeat_shared(self, layer: int) -> None:
        """Gives each row a copy of the shared part, before it has anything of its own; all layers alike."""
        repeated = tuple(states.repeat_interleave(self.fan_out, dim=0) for states in self.shared[layer])
        self.shared[layer] = None
        self.append(layer, *repeated)
        self.fixed = repeated[0].shape[2]

    def reorder(self, beam_idx: Tensor, layers: slice = slice(None)) -> None:
        """Row i becomes what row `beam_idx[i]` (int64 or int32, `[rows]`) of the same input was, in these layers."""
        length = max(self.lengths[layers])
        if length <= self.fixed:
            return
        self.forget_given()
        moving = [buffer[layers, :, :, self.fixed : length] for buffer in self._not_held_elsewhere()]
        beam_idx = beam_idx.to(moving[0].device)
        if beam_idx.device.type != "cpu" or sum(map(Tensor.numel, moving)) < MIN_ELEMENTS_TO_LOOK_AT:
            for states in moving:
                states.copy_(states.index_select(1, beam_idx))
            return
        moved = (beam_idx != torch.arange(beam_idx.shape[0])).nonzero().squeeze(1)
        for states in moving if moved.numel() else ():
            states[:, moved] = states.index_select(1, beam_idx[moved])

    def keep(self, places: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `places`; row i becomes what row `rows[i]` was (int64 both)."""
        self.forget_given()
        for layer, shared in enumerate(self.shared):
            if shared is not None:
                self.shared[layer] = tuple(states.index_select(0, places.to(states.device)) for states in shared)
        if not self.buffers:
            return
        length, kept = max(self.lengths), []
        for buffer in self._not_held_elsewhere():
            taken = buffer[:, :, :, :length].index_select(1, rows.to(buffer.device))
            kept.append(buffer[:, : rows.shape[0]])
            kept[-1][:, :, :, :length] = taken
        self._use(kept)

    def forget_given(self) -> None:
        """Takes back what was given out and not asked for in one piece, which would keep buffers from being moved."""
        for layer, given in enumerate(self.given):
            if given is not None and all(states.is_segmented for states in given):
                self.given[layer] = None

    def _grow(self, needed: int, added: KeysAndValues) -> None:
        used = max(self.lengths)
        capacity = max(needed, min(self.limit, needed + max(FIRST_CAPACITY, used - self.fixed)))
        grown = []
        for place, states in enumerate(added):
            rows, heads, _, width = states.shape
            grown.append(states.new_empty((len(self.lengths), rows, heads, capacity, width)))
            if self.buffers:
                grown[-1][:, :, :, :used] = self.buffers[place][:, :, :, :used]
        self._use(grown)

    def _use(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self._by_layer = list(zip(*(buffer.unbind(0) for buffer in buffers)))

    def _not_held_elsewhere(self) -> list[Tensor]:
        """The buffers, or copies if somebody else holds a view of them, such as a model that remembers its keys.

        Copies as well where torch does not tell who holds them."""
        known = _holders_of_new_buffer(len(self.lengths))
        if known is None or any(_holders(buffer) > known for buffer in self.buffers):
            self._use([buffer.clone() for buffer in self.buffers])
        return self.buffers


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
