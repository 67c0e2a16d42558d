"""One layer of a `DecodingCache` as a model sees it: whole keys and values, that are whole only if it needs them so."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from fastgen.optimizer.decoding.decoding_cache import DecodingCache, KeysAndValues
from fastgen.optimizer.decoding.segmented_kv import SegmentedKV


class LayerStates:
    """The keys and values of layer `layer` of `cache`.

    usage: counts the operations on this layer's states, see `SegmentedKV`.
    group: the input of each row.
    """

    def __init__(self, cache: DecodingCache, layer: int, group: Tensor, usage: Counter[str]) -> None:
        self.cache, self.layer, self.usage = cache, layer, usage
        self.group = group

    @property
    def shared(self) -> KeysAndValues | None:
        return self.cache.shared[self.layer]

    @property
    def length(self) -> int:
        return self.cache.lengths[self.layer] + (0 if self.shared is None else self.shared[0].shape[2])

    @property
    def _given(self) -> tuple[SegmentedKV, SegmentedKV] | None:
        return self.cache.given[self.layer]

    @property
    def was_read_whole(self) -> bool:
        """Whether somebody has asked for the present keys or values in one piece, and may have written into them."""
        return self._given is not None and not all(states.is_segmented for states in self._given)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Adds what each row has computed for itself: `[rows, kv_heads, new_length, head_dim]`."""
        self.take_back()
        self.cache.append(self.layer, keys, values)

    def drop(self, count: int) -> bool:
        """Forgets the first `count` positions; False if that would leave nothing of the shared part."""
        self.take_back()
        if self.shared is None or count >= self.shared[0].shape[2]:
            return False
        self.cache.shared[self.layer] = tuple(states[:, :, count:] for states in self.shared)
        return True

    def states(self) -> KeysAndValues:
        """Keys and values `[rows, kv_heads, length, head_dim]`; the same tensors until the next change."""
        if self.was_read_whole:
            self.expand()
        if self.shared is None:
            return self.cache.own(self.layer)
        if self._given is None:
            self.cache.given[self.layer] = self._segmented()
        return self._given

    def keeps_groups(self, beam_idx: Tensor) -> bool:
        """Whether `beam_idx` takes for each row a row of the same input; indices on a device are trusted, not read."""
        if beam_idx.device.type != "cpu":
            return True
        group = self.group[: beam_idx.shape[0]]
        return torch.equal((beam_idx // self.cache.fan_out).to(group.dtype), group)

    def reorder(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` of the same input was, in this layer alone."""
        self.take_back()
        self.cache.reorder(beam_idx, slice(self.layer, self.layer + 1))

    def expand(self) -> None:
        """Keeps the shared part for each row, for code that cannot work on two parts: in a cache of its own."""
        keys, values = self.whole()
        repeated = self.shared[0].shape[2]
        self.cache = DecodingCache(1, self.cache.fan_out, self.cache.limit + repeated)
        self.layer = 0
        self.cache.append(0, keys, values)
        self.cache.fixed = repeated

    def whole(self) -> KeysAndValues:
        """Keys and values `[rows, kv_heads, length, head_dim]`, in memory of their own."""
        if self.shared is None:
            return tuple(states.clone() for states in self.cache.own(self.layer))
        return tuple(states.materialize() for states in self._given or self._segmented())

    def take_back(self) -> None:
        """What was given out stands for itself from here on, and no longer for the content."""
        if self.was_read_whole:
            self.expand()
        self.cache.given[self.layer] = None

    def _segmented(self) -> tuple[SegmentedKV, SegmentedKV]:
        pairs = [self.shared, self.cache.own(self.layer)] if self.cache.lengths[self.layer] else [self.shared]
        rows = self.shared[0].shape[0] * self.cache.fan_out
        keys, values = (SegmentedKV(segments, rows, self.usage) for segments in zip(*pairs))
        return keys, values
