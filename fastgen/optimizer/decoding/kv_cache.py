"""KV cache: keys and values of all layers of a decoder in segments, each stored once for the rows that share it.

For B inputs with M rows (beams or samples) each:

    layer             prompt: segments that no step writes        generated: `Generated`, for all layers that are alike
    0   self          prefix [1, H, P, D], prompt [B, H, S, D]    [layers, B*M, H, capacity, D], of which `length` are
    ...                                                           there
    n   cross         encoder's output [B, H, S, D]               (nothing is added)

    growable    `append` writes behind what is there, buffers grow towards `limit`, `read` gives what is there
    static      `append` writes at `write_position`, a tensor; `read` gives the whole capacity, for a mask to hide the
                rest; shapes and addresses stay, so that a step can be captured:

                prompt    | padding | positions        |
                generated | positions | spare capacity |

FastSeq §4.1; static caches follow Seamless, "Updating and retrieving KV cache". Both hosts use it; it knows none.

Tests: tests/optimizer/decoding/test_kv_cache.py tests/optimizer/transformers/test_captured_steps.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen.ops.tracing import UnderAutocast
from fastgen.optimizer.decoding.generated_kv import KV, Generated
from fastgen.optimizer.decoding.report import LAYER_EMPTY, Reason
from fastgen.optimizer.decoding.segmented_kv import SegmentedKV, materialized

SMALLEST_CAPACITY = 32

Spec = tuple[int, int, tuple]  # rows, rows per input, and of layers that are alike their number and shapes


def capacity_for(needed: int, most: int) -> int:
    """Capacity for twice the positions that are needed, or for `most` if that is less, rounded.

    A short call never grows: the steps behind would often be too few for another graph.
    """
    return max(SMALLEST_CAPACITY, rounded(max(needed, min(most, 2 * max(needed, SMALLEST_CAPACITY)))))


def rounded(length: int) -> int:
    """The next of a few sizes, that many lengths have in common: four to eight between powers of two."""
    step = max(SMALLEST_CAPACITY // 2, 1 << max((length - 1).bit_length() - 3, 0))
    return -(-length // step) * step


@dataclass
class LayerKV:
    """prompt: segments `[copies, kv_heads, length, head_dim]` that no step writes. generated, index: where that lies
    which is added; None if nothing is. view: what was read of the present content. padding: before the first segment.
    """

    prompt: tuple[KV, ...]
    generated: Generated | None
    index: int
    view: tuple[SegmentedKV, ...] | None = None
    padding: int = 0


class KVCache:
    """Keys and values of all layers of a decoder, for `inputs * rows_per_input` rows, see the drawing above.

    usage: counts the operations on keys and values in segments, see `SegmentedKV`.

    Of a static cache: padding, how many positions before its first segment have to be hidden (in the cross-attention
    where there is one, otherwise in the self-attention). prompt_length: of the self-attention, without padding.
    capacity: how many positions each row can generate; generated_length: how many it has. write_position: where the
    next one goes, int64 `[1]`. first_position: where the self-attention begins, after its padding, int64 `[1]`.
    seq_lengths: how many positions each layer with generated ones holds, int64 `[layers]`. A step reads the three, and
    writes the last; `advance` counts afterwards.
    """

    write_position: Tensor
    first_position: Tensor
    seq_lengths: Tensor

    def __init__(
        self, inputs: int, rows_per_input: int, is_static: bool = False, usage: Counter[str] | None = None
    ) -> None:
        self.rows, self.rows_per_input, self.is_static = inputs * rows_per_input, rows_per_input, is_static
        self.layers: list[LayerKV] = []
        self.generated: list[Generated] = []
        self.usage: Counter[str] = Counter() if usage is None else usage
        self.padding = self.prompt_length = self.capacity = self.generated_length = 0

    def add_layers(self, prompts: Sequence[tuple[KV, ...]], limit: int | None) -> range:
        """Adds layers that are alike, with these prompts; returns their numbers. Those without a limit come last.

        limit: how many positions can be added to each row; None if none are.
        """
        first, generated = len(self.layers), None
        if limit is not None:
            generated = Generated(len(prompts), limit, self.is_static)
            self.generated.append(generated)
        self.layers += [LayerKV(prompt, generated, index) for index, prompt in enumerate(prompts)]
        return range(first, len(self.layers))

    def repeat_prompt(self, layer: int) -> None:
        """Stores the last segment of a prompt for each row, before anything is generated; of all layers alike."""
        one = self.layers[layer]
        *others, last = one.prompt
        pair = tuple(states.repeat_interleave(self.rows // states.shape[0], dim=0) for states in last)
        if one.generated is None:
            one.prompt = (*others, pair)
        else:
            one.prompt = tuple(others)
            one.generated.append(one.index, *pair)
            one.generated.unmoved = pair[0].shape[2]

    def expand(self, rows_per_input: int, shares: bool, limit: int) -> None:
        """Makes an input of each row: `rows_per_input` rows, which have in common what was added to it.

        shares: that is a segment of the prompt from now on; otherwise it is stored for each of the rows. limit: how
        many positions can be added to each.
        """
        self.rows_per_input = rows_per_input
        if rows_per_input == 1:
            return
        self.rows *= rows_per_input
        expanded: dict[Generated, Generated] = {}
        for layer, one in enumerate(self.layers):
            self._invalidate(layer)
            if (added := one.generated) is not None:
                one.prompt += (tuple(states.contiguous() for states in added.read(one.index)),)
                length = 0 if shares else added.lengths[one.index]
                one.generated = expanded.setdefault(added, Generated(len(added.lengths), limit + length))
                if not shares:
                    self.repeat_prompt(layer)
        self.generated = list(expanded.values())

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Adds what each row has computed, `[rows, kv_heads, new_length, head_dim]`; one position if static.

        A static cache raises UnderAutocast, where a growable one takes keys and values of several types.
        """
        one = self.layers[layer]
        if one.view is not None:
            self._invalidate(layer)
        generated = one.generated or self._materialize(layer)  # to a layer that never grows a model has added something
        if not self.is_static:
            generated.append(one.index, keys, values)
            return
        if torch.is_autocast_enabled(keys.device.type):
            raise UnderAutocast("autocast begins inside the forward")
        for buffer, added in zip(generated.by_layer[one.index], (keys, values)):
            buffer.index_copy_(2, self.write_position, added)
        self.seq_lengths[layer].add_(1)

    def segments(self, layer: int, present: bool = False) -> tuple[KV, ...]:
        """What attention sees: the prompt's segments, and `[rows, kv_heads, length or capacity, head_dim]`.

        present: without the padding and the spare capacity of a static cache.
        """
        one = self.layers[layer]
        prompt, generated = one.prompt, one.generated
        if present and one.padding:
            prompt = (tuple(states[:, :, one.padding :] for states in prompt[0]), *prompt[1:])
        if generated is None:
            return prompt
        if self.is_static and not present:
            return *prompt, generated.by_layer[one.index]
        return (*prompt, generated.read(one.index)) if generated.lengths[one.index] else prompt

    def read(self, layer: int) -> KV:
        """Keys and values `[rows, kv_heads, length, head_dim]`; the same tensors until the next change."""
        one = self.layers[layer]
        if one.view is not None:
            if not self.was_materialized(layer):
                return one.view
            self._invalidate(layer)
        segments, bounds = self.segments(layer), self.bounds(layer)
        if len(segments) == 1 and segments[0][0].shape[0] == self.rows and bounds is None:
            return segments[0]
        keys, values = (SegmentedKV(states, self.rows, self.usage, bounds=bounds) for states in zip(*segments))
        view = keys, values
        if not self.is_static:
            one.view = view
        return view

    def bounds(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The first and the last position that a step sees in a static cache, for kernels of a GPU; else None."""
        if not self.is_static or self.layers[layer].generated is None or not self.write_position.is_cuda:
            return None
        return self.first_position, self.write_position

    def was_materialized(self, layer: int) -> bool:
        """Whether the present keys or values were needed in one piece, which may have been written into."""
        view = self.layers[layer].view
        return view is not None and (view[0].memory is not None or view[1].memory is not None)

    def length(self, layer: int) -> int:
        """How many positions the layer holds."""
        return sum(keys.shape[2] for keys, _ in self.segments(layer, present=True))

    def copy(self, layer: int) -> KV:
        """Keys and values `[rows, kv_heads, length, head_dim]`, in memory of their own."""
        if (view := self.layers[layer].view) is not None:
            return view[0].materialize(), view[1].materialize()
        keys, values = zip(*self.segments(layer, present=True))
        return materialized(keys, self.rows), materialized(values, self.rows)

    def drop(self, layer: int, count: int) -> bool:
        """Forgets the first `count` positions; False if they are not all of the first segment, of which some stay."""
        self._invalidate(layer)
        one = self.layers[layer]
        if not one.prompt or count >= one.prompt[0][0].shape[2]:
            return False
        first, *others = one.prompt
        one.prompt = tuple(states[:, :, count:] for states in first), *others
        return True

    def reorder(self, beam_idx: Tensor, layer: int | None = None) -> None:
        """Row i goes on with what row `beam_idx[i]` of the same input has, in all layers or in this one."""
        for index, one in enumerate(self.layers):
            if one.view is not None and one.generated is not None and layer in (None, index):
                self._invalidate(index)
        if layer is None:
            for generated in self.generated:
                generated.reorder(beam_idx)
        elif (one := self.layers[layer]).generated is not None:
            one.generated.reorder(beam_idx, slice(one.index, one.index + 1))

    def compact(self, batch_index: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `batch_index`; row i becomes what row `rows[i]` was (int64 both).

        All inputs that stay have equally many of these rows, which are next to each other.
        """
        for layer, one in enumerate(self.layers):
            self._invalidate(layer)
            one.prompt = tuple(self._of_rows(pair, batch_index, rows) for pair in one.prompt)
        for generated in self.generated:
            generated.compact(rows)
        self.rows, self.rows_per_input = rows.shape[0], rows.shape[0] // batch_index.shape[0]

    def _of_rows(self, pair: KV, batch_index: Tensor, rows: Tensor) -> KV:
        copies = pair[0].shape[0]
        if copies == 1 or (copies != self.rows and copies == batch_index.shape[0]):  # all inputs stay
            return pair
        index = (rows if copies == self.rows else batch_index).to(pair[0].device)
        return tuple(states.index_select(0, index) for states in pair)

    def _invalidate(self, layer: int) -> None:
        """Invalidates the tensors handed out by `read`: they stand for themselves from here on."""
        if self.was_materialized(layer):
            self._materialize(layer)
        self.layers[layer].view = None

    def _materialize(self, layer: int) -> Generated:
        """Stores a layer for each row, in buffers of its own."""
        one, pair = self.layers[layer], self.copy(layer)
        repeated = sum(keys.shape[2] for keys, _ in one.prompt)
        generated = Generated(1, repeated + (0 if one.generated is None else one.generated.limit))
        generated.append(0, *pair)
        generated.unmoved = repeated
        self.generated.append(generated)
        one.prompt, one.generated, one.index, one.view = (), generated, 0, None
        return generated

    def static_reasons(self) -> list[Reason]:
        """Why there can be no static cache with this content; empty if there can."""
        if any(map(self.was_materialized, range(len(self.layers)))):
            return [Reason("MATERIALIZED", "the model materializes its keys")]
        kinds: dict[bool, set[tuple]] = {True: set(), False: set()}
        for layer, one in enumerate(self.layers):
            if not (present := self.segments(layer, present=True)):
                return [LAYER_EMPTY]
            kinds[one.generated is None].add(tuple(_spec_of(pair, pair[0].shape[2]) for pair in present))
        if len(kinds[True]) > 1 or len(kinds[False]) != 1:
            return [Reason("LAYERS_DIFFER", "the layers of the cache differ in shape, dtype or device")]
        return []

    def content(
        self, batch_index: Tensor | None = None, rows: Tensor | None = None, drop_last: bool = False
    ) -> KVCache:
        """What is there, as views, to be loaded into a static cache: of these inputs and rows only, or of all.

        drop_last: without the position that was added last.
        """
        inputs, kept = self.rows // self.rows_per_input, self.rows
        if batch_index is not None and rows is not None:
            inputs, kept = batch_index.shape[0], rows.shape[0]
        prompts: list[tuple[KV, ...]] = []
        pairs, unmoved = [], 0
        for layer, one in enumerate(self.layers):
            present = self.segments(layer, present=True)
            if batch_index is not None and rows is not None:
                present = tuple(self._of_rows(pair, batch_index, rows) for pair in present)
            if one.generated is not None:
                present, pair = present[:-1], present[-1]
                pairs.append(tuple(states[:, :, :-1] for states in pair) if drop_last else pair)
                unmoved = one.generated.unmoved
            prompts.append(present)
        content = KVCache(inputs, kept // inputs)
        content.add_layers(prompts[: len(pairs)], 0)
        content.add_layers(prompts[len(pairs) :], None)
        generated = content.generated[0]
        generated.by_layer, generated.unmoved = pairs, unmoved
        generated.lengths = [pairs[0][0].shape[2]] * len(pairs)
        return content

    def spec(self, most: int, exact_lengths: bool = False) -> Spec:
        """Of a static cache for this `content`: shapes with capacities, types and devices, the key of a captured graph.

        most: positions that a row can generate. exact_lengths: prompts are not padded to lengths that others have.
        """
        generated, count = self.generated[0], len(self.layers)
        growing, capacity = len(generated.lengths), capacity_for(generated.lengths[0] + 1, most)
        kinds, added = [], _spec_of(generated.by_layer[0], capacity)
        for first, end in ((0, growing), (growing, count)) if growing < count else ((0, growing),):
            prompt = self.layers[first].prompt
            lengths = [keys.shape[2] for keys, _ in prompt]
            if prompt and end == count and not exact_lengths:
                lengths[0] = rounded(lengths[0])
            kinds.append((end - first, tuple(map(_spec_of, prompt, lengths)), None if first else added))
        return self.rows, self.rows_per_input, tuple(kinds)

    def to_static(self, spec: Spec) -> KVCache:
        """A static cache of this spec, to `load` this content, or others with the same spec."""
        rows, rows_per_input, kinds = spec
        static = KVCache(rows // rows_per_input, rows_per_input, is_static=True)
        for count, prompt, added in kinds:
            prompts = [tuple(tuple(map(_empty, pair)) for pair in prompt) for _ in range(count)]
            static.add_layers(prompts, None if added is None else 0)
            if added is not None:
                buffers = [_empty(one, count) for one in added]
                static.generated[0].use(buffers)
                static.capacity = buffers[0].shape[3]
                static.write_position = torch.zeros(1, dtype=torch.int64, device=buffers[0].device)
                static.first_position = torch.zeros_like(static.write_position)
                static.seq_lengths = torch.zeros(count, dtype=torch.int64, device=buffers[0].device)
        return static

    def make_growable(self, limit: int) -> None:
        """Positions can be added up to `limit` for each row, once no captured step uses this static cache any more."""
        for layer, one in enumerate(self.layers):
            one.prompt, one.padding = self.segments(layer, present=True)[: len(one.prompt)], 0
        self.generated[0].limit = limit
        self.is_static = self.generated[0].is_static = False
        self.padding = 0

    def load(self, content: KVCache) -> None:
        """Copies this content, and zeros around it: what is hidden has the weight 0, which NaN would survive."""
        generated, loaded = self.generated[0], content.generated[0]
        for one, source in zip(self.layers, content.layers):
            for pair, given in zip(one.prompt, source.prompt):
                _copy_in(pair, given, pair[0].shape[2] - given[0].shape[2])
            if one.prompt:
                one.padding = one.prompt[0][0].shape[2] - source.prompt[0][0].shape[2]
            if one.generated is not None:
                _copy_in(generated.by_layer[one.index], loaded.by_layer[one.index], 0)
        self.padding = self.layers[-1].padding
        self.first_position.fill_(self.layers[0].padding)
        generated.unmoved, self.generated_length = loaded.unmoved, loaded.lengths[0]
        self.prompt_length = content.length(0) - self.generated_length
        self.advance(0)

    @property
    def device(self) -> torch.device:
        return self.segments(0)[0][0].device

    @property
    def nbytes(self) -> int:
        """Of all keys and values; of a static cache with padding and spare capacity."""
        total = 0
        for layer in range(len(self.layers)):
            for keys, values in self.segments(layer):
                total += keys.nbytes + values.nbytes
        return total

    def advance(self, count: int = 1) -> None:
        """Counts the position that was added to each layer; 0 sets the write position back after an attempt."""
        self.generated_length += count
        self.generated[0].lengths = [self.generated_length] * len(self.generated[0].lengths)
        self.write_position.fill_(self.generated_length)
        self.seq_lengths.fill_(self.prompt_length + self.generated_length)

    def mask(self) -> Tensor:
        """What self-attention may see once the next position is added, bool `[1, 1, 1, …]`."""
        padding = self.layers[0].padding
        seen = padding + self.prompt_length + self.generated_length
        positions = torch.arange(padding + self.prompt_length + self.capacity, device=self.write_position.device)
        return ((positions >= padding) & (positions <= seen))[None, None, None]


def _spec_of(pair: KV, length: int) -> tuple:
    """The sizes of keys and values with this length, their types and devices."""
    return tuple((*states.shape[:2], length, states.shape[3], states.dtype, states.device) for states in pair)


def _empty(spec: tuple, *layers: int) -> Tensor:
    *sizes, dtype, device = spec
    return torch.empty((*layers, *sizes), dtype=dtype, device=device)


def _copy_in(pair: KV, given: KV, start: int) -> None:
    for states, copied in zip(pair, given):
        end = start + copied.shape[2]
        states[:, :, :start] = 0
        states[:, :, start:end] = copied
        states[:, :, end:] = 0
