"""Keys and values whose shapes and addresses stay while tokens are added, so that a decode step can be recorded.

Seamless, "Updating and retrieving KV cache": the position is a tensor, and attention sees the whole capacity with a
mask that hides what is not there yet. What rows share is stored once, as in `DecodingCache`. Knows no host library.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.optimizer.decoding.decoding_cache import DecodingCache, KeysAndValues
from fastgen.optimizer.decoding.segmented_kv import SegmentedKV

SMALLEST_CAPACITY = 32


def capacity_for(needed: int, most: int) -> int:
    """Room for twice the positions that are needed, or for `most` if that is less, rounded."""
    return max(SMALLEST_CAPACITY, rounded(max(needed, min(most, 2 * needed))))


def rounded(length: int) -> int:
    """The next of a few sizes, that many lengths have in common: four to eight between powers of two."""
    step = max(SMALLEST_CAPACITY // 2, 1 << max((length - 1).bit_length() - 3, 0))
    return -(-length // step) * step


@dataclass(frozen=True)
class Content:
    """The keys and values of layers that are alike.

    shared: of each layer `[inputs, kv_heads, shared_length, head_dim]`, or empty where nothing is kept once. own: of
    each layer `[rows, kv_heads, own_length, head_dim]`, or empty where rows have nothing of their own. fan_out, fixed:
    as in `DecodingCache`.
    """

    shared: list[KeysAndValues]
    own: list[KeysAndValues]
    fan_out: int = 1
    fixed: int = 0

    @property
    def length(self) -> int:
        return self.own[0][0].shape[2] if self.own else 0

    @property
    def shared_length(self) -> int:
        return self.shared[0][0].shape[2] if self.shared else 0

    def has_equal_lengths(self) -> bool:
        """Whether all layers hold as many positions."""
        return all(len({states.shape[2] for pair in part for states in pair}) <= 1 for part in (self.shared, self.own))

    def without_last(self) -> Content:
        """The same before the last position was added."""
        own = [tuple(states[:, :, :-1] for states in pair) for pair in self.own]
        return Content(self.shared, own, self.fan_out, self.fixed)

    def of_rows(self, places: Tensor, rows: Tensor) -> Content:
        """The same of the inputs at `places`, which have these `rows` (int64 both)."""
        inputs = rows if self.fan_out == 1 else places
        shared = [tuple(states.index_select(0, inputs) for states in pair) for pair in self.shared]
        own = [tuple(states.index_select(0, rows) for states in pair) for pair in self.own]
        return Content(shared, own, self.fan_out, self.fixed)

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for pair in (*self.shared, *self.own) for states in pair)

    def is_alike(self) -> bool:
        """Whether all layers are of one kind and hold as many positions."""
        return len(self.kinds()) <= 1 and self.has_equal_lengths()

    def kinds(self) -> set[tuple]:
        """What a `StaticCache` has to be made for, of each layer, beside lengths: one kind where all are alike."""
        shared = [tuple(map(_kind, pair)) for pair in self.shared]
        own = [tuple(map(_kind, pair)) for pair in self.own]
        return set(zip(shared or own, own or shared))


class StaticCache(DecodingCache):
    """A `DecodingCache` with room for `capacity` own positions, for any content of the same kind.

    The shared part lies at the end of `shared_capacity` positions; `padding` before it have to be hidden by masks.
    place: where the next position goes, `[1]`. seq_lengths: how many positions each layer holds, `[layers]`. A step
    reads both, and writes the second; `advance` counts afterwards.
    """

    def __init__(self, content: Content, capacity: int, shared_capacity: int) -> None:
        super().__init__(len(content.shared or content.own), content.fan_out, capacity)
        for layer, pair in enumerate(content.shared):
            self.shared[layer] = tuple(_room_like(states, shared_capacity) for states in pair)
        for states in content.own[0] if content.own else ():
            self.buffers.append(_room_like(states, capacity, len(content.own)))
        self._use(self.buffers)
        self.padding = 0
        device = (content.shared or content.own)[0][0].device
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.seq_lengths = torch.zeros(len(self.lengths), dtype=torch.int64, device=device)

    @property
    def shared_length(self) -> int:
        return 0 if self.shared[0] is None else self.shared[0][0].shape[2] - self.padding

    @property
    def length(self) -> int:
        """How many own positions there are."""
        return self.lengths[0]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.buffers, *(states for pair in self.shared if pair is not None for states in pair)]

    def fill(self, content: Content) -> None:
        """Copies this content, and zeros around it: what is hidden has the weight 0, which NaN would survive."""
        if content.shared:
            self.padding = self.shared[0][0].shape[2] - content.shared_length
        for mine, pair in zip(self.shared, content.shared):
            for states, given in zip(mine, pair):
                states[:, :, : self.padding] = 0
                states[:, :, self.padding :] = given
        for layer, pair in enumerate(content.own):
            for states, given in zip(self._by_layer[layer], pair):
                states[:, :, : content.length] = given
                states[:, :, content.length :] = 0
        self.fixed = content.fixed
        self.lengths = [content.length] * len(self.lengths)
        self.expect_next()

    def content(self) -> Content:
        own = [self.own(layer) for layer in range(len(self.lengths))] if self.buffers else []
        shared = [self._without_padding(layer) for layer, pair in enumerate(self.shared) if pair is not None]
        return Content(shared, own, self.fan_out, self.fixed)

    def _without_padding(self, layer: int) -> KeysAndValues | None:
        pair = self.shared[layer]
        return None if pair is None else tuple(states[:, :, self.padding :] for states in pair)

    def expect_next(self) -> None:
        """Sets the tensors for the next position: before it is added, or added once more."""
        self.place.fill_(self.length)
        self.seq_lengths.fill_(self.shared_length + self.length)

    def mask_of_next(self) -> Tensor:
        """What may be attended to once the next position is added, bool `[1, 1, 1, …]`; padding and free room not."""
        shared = self.padding + self.shared_length
        positions = torch.arange(shared + self.limit, device=self.place.device)
        return ((positions >= self.padding) & (positions <= shared + self.length))[None, None, None]

    def attended(self, layer: int) -> KeysAndValues:
        """All the room of the rows' own positions, with what is not there yet."""
        return self._by_layer[layer]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes what each row has computed, `[rows, kv_heads, 1, head_dim]`, at `place`."""
        for mine, added in zip(self._by_layer[layer], (keys, values)):
            mine.index_copy_(2, self.place, added)
        self.seq_lengths[layer].add_(1)

    def advance(self) -> None:
        """Counts the position that was added to each layer."""
        self.lengths = [self.length + 1] * len(self.lengths)
        self.expect_next()

    def states(self, layer: int) -> KeysAndValues:
        """Keys and values `[rows, kv_heads, padding + shared_length + capacity, head_dim]`."""
        return self._joined(self.shared[layer], self._by_layer[layer] if self.buffers else None)

    def whole(self, layer: int) -> KeysAndValues:
        """Keys and values `[rows, kv_heads, length, head_dim]` of the positions that are there, in their own memory."""
        joined = self._joined(self._without_padding(layer), self.own(layer) if self.buffers else None)
        return tuple(states.materialize() if isinstance(states, SegmentedKV) else states.clone() for states in joined)

    def _joined(self, shared: KeysAndValues | None, own: KeysAndValues | None) -> KeysAndValues:
        if shared is None:
            return own
        if own is None and self.fan_out == 1:
            return shared
        rows, pairs = shared[0].shape[0] * self.fan_out, [shared] if own is None else [shared, own]
        keys, values = (SegmentedKV(segments, rows, Counter()) for segments in zip(*pairs))
        return keys, values

    def _not_held_elsewhere(self) -> list[Tensor]:
        return self.buffers  # they must not move, and only recorded steps have views of them


def _kind(states: Tensor) -> tuple:
    rows, heads, _, width = states.shape
    return (rows, heads, width), states.dtype, states.device


def _room_like(states: Tensor, length: int, *layers: int) -> Tensor:
    """Room for `[layers, rows, kv_heads, length, head_dim]`, or without the first dimension."""
    rows, heads, _, width = states.shape
    return states.new_empty((*layers, rows, heads, length, width))
