"""KV cache: keys and values of all layers of a decoder in segments, each stored once for the rows that share it.

For B inputs with M rows (beams or samples) each:

    layer             prompt: segments that no step writes        generated: a `Generated` for all layers of equal shape
    0   self          prefix [1, H, P, D], prompt [B, H, S, D]    [layers, B*M, H, capacity, D], filled up to `lengths`;
    ...                                                           buffers grow towards `limit`
    n   cross         encoder's output [B, H, S, D]               (nothing is added)

What a layer of a host's cache needs of a `KVCache`, or of a `StaticKVCache`, by its number:

    append, read    adds positions of each row; returns all of a layer's, `[rows, kv_heads, length, head_dim]`
    length, copy    the number of positions; keys and values in memory of their own
    reorder         moves what is stored for each row

See FastSeq §4.1. A captured step uses a `StaticKVCache` (static_kv_cache.py), filled with this cache's `content`. Both
hosts use this module; it knows none.

Tests: tests/optimizer/decoding/test_kv_cache.py
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from fastgen.config import CONFIG
from fastgen.ops.beams import move_rows
from fastgen.optimizer.decoding.cost_model import CostModel, Work
from fastgen.optimizer.decoding.report import LAYER_EMPTY, STEPS, LeaveAlone, Reason, check
from fastgen.optimizer.decoding.segmented_kv import (
    KV,
    SegmentedKV,
    cut,
    in_segments,
    length_of,
    materialized,
    repeated,
)
from fastgen.optimizer.decoding.static_kv_cache import KVContent, rows_of

FIRST_CAPACITY = 32

# Launches that a shared prompt adds to the attention of a layer; the same with `triton_attention` in a CUDA graph.
LAUNCHES = 12.5
LAUNCHES_OF_KERNEL = 0.5


def should_share(
    costs: CostModel, keys: Tensor, rows_per_copy: int, is_cross: bool = False, is_captured: bool = False
) -> bool:
    """Whether attention is faster with these keys `[inputs, kv_heads, length, head_dim]` stored once for several rows.

    is_cross: whether they belong to cross-attention, which has only one segment, and launches a quarter. If repeated
    instead, they are still never reordered. is_captured: whether steps will be captured. Values are assumed to be as
    wide as keys; on a CPU each number counts as one of fp32.
    """
    is_cpu = keys.device.type == "cpu"
    has_kernel = not is_cpu and CONFIG.cuda_kernels and keys.dtype in (torch.float16, torch.bfloat16)
    launches = LAUNCHES_OF_KERNEL if is_captured and has_kernel else LAUNCHES
    if is_cross:
        launches /= 4
    saved_bytes = 2 * keys.numel() * (rows_per_copy - 1) * (4 if is_cpu else keys.itemsize)
    added = Work(replayed=launches) if is_captured else Work(launches=launches)
    return costs.pays(Work(bytes=saved_bytes), added, device=keys.device)


class Generated:
    """Keys and values of each row, in layers of equal shape: one buffer for all keys, one for all values.

    limit: the most positions of a row; the buffers grow towards it instead of starting there, because many hosts allow
    far more positions than are used. lengths: the number of positions in each layer. unmoved: how many of the first
    positions are equal in all rows of an input, so that reorders need not move them. by_layer: keys and values of each
    layer, `[rows, kv_heads, capacity, head_dim]`, views of buffers. buffers: `[layers, rows, kv_heads, capacity,
    head_dim]`; empty before the first `append`.
    """

    def __init__(self, layers: int, limit: int) -> None:
        self.limit = limit
        self.unmoved = 0
        self.lengths = [0] * layers
        self.buffers: list[Tensor] = []
        self.by_layer: list[KV] = []

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Appends keys and values `[rows, kv_heads, new_length, head_dim]` to a layer."""
        start = self.lengths[layer]
        end = start + keys.shape[2]
        if not self.buffers or end > self.buffers[0].shape[3]:
            spare = max(FIRST_CAPACITY, max(self.lengths) - self.unmoved)
            self._reallocate((keys, values), max(end, min(self.limit, end + spare)))
        for buffer, added in zip(self.by_layer[layer], (keys, values)):
            buffer[:, :, start:end] = added
        self.lengths[layer] = end

    def read(self, layer: int) -> KV:
        """Returns a layer's keys and values `[rows, kv_heads, length, head_dim]` as views, once any were appended."""
        return cut(self.by_layer[layer], 0, self.lengths[layer])

    def reorder(self, beam_idx: Tensor, layers: slice = slice(None)) -> None:
        """Overwrites row i with row `beam_idx[i]` of the same input in these layers; beam_idx: int32 or int64."""
        length = max(self.lengths[layers])
        if length <= self.unmoved:
            return
        if _are_held_elsewhere(self.buffers):
            self._reallocate(self.by_layer[0], self.buffers[0].shape[3])
        move_rows([buffer[layers, :, :, self.unmoved : length] for buffer in self.buffers], beam_idx)

    def compact(self, rows: Tensor) -> None:
        """Overwrites row i with row `rows[i]` (int64), and drops the other rows."""
        if not self.buffers:
            return
        index = rows.tolist() if rows.device.type == self.buffers[0].device.type == "cpu" else []
        if not index or index != sorted(set(index)) or _are_held_elsewhere(self.buffers):
            self._reallocate(self.by_layer[0], self.buffers[0].shape[3], rows)
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

    def _reallocate(self, like: KV, capacity: int, rows: Tensor | None = None) -> None:
        """Moves these rows, or all, to buffers of this capacity; like: keys and values of one layer."""
        used = max(self.lengths)
        buffers = []
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
    """Whether other code, such as a model that stores its keys, holds a view of the buffers, or torch cannot tell."""
    most = _holders_of_new_buffer(len(buffers[0]))
    return most is None or any(_holders(buffer) > most for buffer in buffers)


def _holders(buffer: Tensor) -> int:
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))


@functools.cache
def _holders_of_new_buffer(layers: int) -> int | None:
    """Returns the reference count of a buffer that only its layers view, which differs between versions of torch."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        return None
    buffer = torch.empty(layers, 1)
    _by_layer = buffer.unbind(0)
    return _holders(buffer)


class KVCache:
    """Keys and values of `inputs` inputs of `rows_per_input` rows each, in buffers that grow, see the drawing above.

    prompts: for each layer, the segments `[copies, kv_heads, length, head_dim]` that no step writes. generated: where
    layers store new positions. bounds: none, as in a `StaticKVCache` on a CPU. usage: counts the operations on keys and
    values in segments, see `SegmentedKV`. stored_in: for each layer the `Generated` and the index in it; None if
    the layer does not grow. views: the results of `read`; None after a change.
    """

    def __init__(self, inputs: int, rows_per_input: int, usage: Counter[str] | None = None) -> None:
        self.rows = inputs * rows_per_input
        self.rows_per_input = rows_per_input
        self.usage: Counter[str] = Counter() if usage is None else usage
        self.prompts: list[tuple[KV, ...]] = []
        self.bounds: list[None] = []
        self.generated: list[Generated] = []
        self.stored_in: list[tuple[Generated, int] | None] = []
        self.views: list[tuple[SegmentedKV, SegmentedKV] | None] = []

    @classmethod
    def of(cls, content: KVContent, limit: int) -> KVCache:
        """Returns a cache with the content of another one; limit: the most generated positions of a row."""
        cache = cls(content.rows // content.rows_per_input, content.rows_per_input)
        growing = len(content.generated)
        cache.add_layers(content.prompts[:growing], limit)
        cache.add_layers(content.prompts[growing:], None)
        for layer, pair in enumerate(content.generated):
            cache.append(layer, *pair)
        cache.generated[0].unmoved = content.unmoved
        return cache

    def add_layers(self, prompts: Sequence[tuple[KV, ...]], limit: int | None) -> range:
        """Adds layers of equal shape, with these prompts, and returns their numbers.

        limit: the most positions that can be added to each row; None for layers that do not grow, which come last.
        """
        first = len(self.prompts)
        count = len(prompts)
        self.prompts += prompts
        self.views += [None] * count
        self.bounds += [None] * count
        if limit is None:
            self.stored_in += [None] * count
        else:
            self.generated.append(Generated(count, limit))
            self.stored_in += [(self.generated[-1], index) for index in range(count)]
        return range(first, len(self.prompts))

    def repeat_prompt(self, layer: int) -> None:
        """Stores the last segment of a prompt once per row, before anything is generated; called for each layer."""
        *first, last = self.prompts[layer]
        pair = repeated(last, self.rows)
        if (stored := self.stored_in[layer]) is None:
            self.prompts[layer] = (*first, pair)
        else:
            generated, index = stored
            self.prompts[layer] = tuple(first)
            generated.append(index, *pair)
            generated.unmoved = pair[0].shape[2]

    def branch(self, rows_per_input: int, shares: bool, limit: int) -> None:
        """Turns each row into an input of `rows_per_input` rows, which share the positions that were added to it.

        shares: whether these become a segment of the prompt; otherwise they are stored once per row. limit: the most
        positions that can be added to each row.
        """
        self.rows_per_input = rows_per_input
        if rows_per_input == 1:
            return
        self.rows *= rows_per_input
        branched: dict[Generated, Generated] = {}
        for layer in range(len(self.prompts)):
            self._invalidate(layer)
            if (stored := self.stored_in[layer]) is not None:
                added, index = stored
                self.prompts[layer] += (tuple(states.contiguous() for states in added.read(index)),)
                length = 0 if shares else added.lengths[index]
                self.stored_in[layer] = branched.setdefault(added, Generated(len(added.lengths), limit + length)), index
                if not shares:
                    self.repeat_prompt(layer)
        self.generated = list(branched.values())

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Appends the keys and values of each row, `[rows, kv_heads, new_length, head_dim]`, to a layer."""
        if self.views[layer] is not None:
            self._invalidate(layer)
        stored = self.stored_in[layer] or self._materialize(layer)  # the model appends to a layer that should not grow
        generated, index = stored
        generated.append(index, keys, values)

    def segments(self, layer: int) -> tuple[KV, ...]:
        """Returns what attention sees: the prompt's segments, and the generated one, with a copy per row."""
        prompt = self.prompts[layer]
        if (stored := self.stored_in[layer]) is None:
            return prompt
        generated, index = stored
        return (*prompt, generated.read(index)) if generated.lengths[index] else prompt

    def read(self, layer: int) -> KV:
        """Returns keys and values `[rows, kv_heads, length, head_dim]`; the same tensors until the next change."""
        if (view := self.views[layer]) is not None:
            if not self.was_materialized(layer):
                return view
            self._invalidate(layer)
        keys, values = in_segments(self.segments(layer), self.rows, self.usage)
        if isinstance(keys, SegmentedKV) and isinstance(values, SegmentedKV):
            self.views[layer] = keys, values
        return keys, values

    def was_materialized(self, layer: int) -> bool:
        """Whether the present keys or values were materialized, and so may have been written by other code."""
        view = self.views[layer]
        return view is not None and (view[0].memory is not None or view[1].memory is not None)

    def length(self, layer: int) -> int:
        """Returns the number of positions in the layer."""
        return length_of(self.segments(layer))

    def copy(self, layer: int) -> KV:
        """Returns keys and values `[rows, kv_heads, length, head_dim]`, in memory of their own."""
        if (view := self.views[layer]) is not None:
            return view[0].materialize(), view[1].materialize()
        return tuple(materialized(segments, self.rows) for segments in zip(*self.segments(layer)))

    def drop(self, layer: int, count: int) -> bool:
        """Drops the first `count` positions; returns False if the first segment does not have more than these."""
        self._invalidate(layer)
        prompt = self.prompts[layer]
        if not prompt or count >= prompt[0][0].shape[2]:
            return False
        self.prompts[layer] = cut(prompt[0], count, None), *prompt[1:]
        return True

    def crop(self, layer: int, count: int) -> bool:
        """Drops the last `count` positions of a layer; returns False if fewer were generated."""
        if (stored := self.stored_in[layer]) is None:
            return False
        generated, index = stored
        if count > generated.lengths[index] - generated.unmoved:
            return False
        self._invalidate(layer)
        generated.lengths[index] -= count
        return True

    def reorder(self, beam_idx: Tensor, layer: int | None = None) -> None:
        """Overwrites row i with row `beam_idx[i]` of the same input, in all layers or in one."""
        for index, stored in enumerate(self.stored_in):
            if stored is not None and self.views[index] is not None and layer in (None, index):
                self._invalidate(index)
        if layer is None:
            for generated in self.generated:
                generated.reorder(beam_idx)
        elif (stored := self.stored_in[layer]) is not None:
            generated, index = stored
            generated.reorder(beam_idx, slice(index, index + 1))

    def compact(self, batch_index: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `batch_index`; row i becomes what row `rows[i]` was (int64 both).

        Each remaining input has the same number of rows, which are adjacent.
        """
        for layer in range(len(self.prompts)):
            self._invalidate(layer)
            prompt = self.prompts[layer]
            self.prompts[layer] = tuple(rows_of(pair, self.rows, batch_index, rows) for pair in prompt)
        for generated in self.generated:
            generated.compact(rows)
        self.rows, self.rows_per_input = len(rows), len(rows) // len(batch_index)

    @check(STEPS)
    def content(self, layers: Sequence[int] | None = None) -> KVContent:
        """Returns the content as views, to be loaded into a static cache. Raises LeaveAlone if that is impossible.

        layers: their numbers, in the order of the content, in which those that do not grow come last.
        """
        layers = layers or range(len(self.prompts))
        generated: list[KV] = []
        for layer in layers:
            stored = self.stored_in[layer]
            if self.was_materialized(layer):
                raise LeaveAlone([Reason("MATERIALIZED", "the model materializes its keys")])
            is_empty = not self.prompts[layer]
            if stored is not None:
                buffers, index = stored
                is_empty = not buffers.lengths[index]
            if is_empty:
                raise LeaveAlone([LAYER_EMPTY])
            if stored is not None:
                generated.append(buffers.read(index))
        unmoved = min(map(attrgetter("unmoved"), self.generated), default=0)
        content = KVContent(
            self.rows, self.rows_per_input, [self.prompts[layer] for layer in layers], generated, unmoved
        )
        content.require_alike()
        return content

    def _invalidate(self, layer: int) -> None:
        """Invalidates the tensors handed out by `read`."""
        if self.was_materialized(layer):
            self._materialize(layer)
        self.views[layer] = None

    def _materialize(self, layer: int) -> tuple[Generated, int]:
        """Stores a layer once per row, in buffers of its own, and returns where."""
        pair = self.copy(layer)
        unmoved = length_of(self.prompts[layer])
        stored = self.stored_in[layer]
        generated = Generated(1, unmoved + (0 if stored is None else stored[0].limit))
        generated.append(0, *pair)
        generated.unmoved = unmoved
        self.generated.append(generated)
        self.prompts[layer] = ()
        self.views[layer] = None
        self.stored_in[layer] = generated, 0
        return generated, 0
