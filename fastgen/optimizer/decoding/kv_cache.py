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

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastgen.optimizer.decoding.report import LAYER_EMPTY, Reason
from fastgen.optimizer.decoding.segmented_kv import SegmentedKV, materialized

# From here on it pays, on a CPU, to find the rows that a reorder moves.
MIN_ELEMENTS_TO_LOOK_AT = 1 << 16

FIRST_CAPACITY = 32
SMALLEST_CAPACITY = 32

KV = tuple[Tensor, ...]  # keys and values
Spec = tuple[int, int, tuple]  # rows, rows per input, and of each layer shapes with capacities, types and devices


def capacity_for(needed: int, most: int) -> int:
    """Capacity for twice the positions that are needed, or for `most` if that is less, rounded."""
    return max(SMALLEST_CAPACITY, rounded(max(needed, min(most, 2 * needed))))


def rounded(length: int) -> int:
    """The next of a few sizes, that many lengths have in common: four to eight between powers of two."""
    step = max(SMALLEST_CAPACITY // 2, 1 << max((length - 1).bit_length() - 3, 0))
    return -(-length // step) * step


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
            self._grow(end, (keys, values))
        for buffer, added in zip(self.by_layer[layer], (keys, values)):
            buffer[:, :, start:end] = added
        self.lengths[layer] = end

    def read(self, layer: int) -> KV:
        """What is there, `[rows, kv_heads, length, head_dim]`, as views; not before an `append`."""
        length = self.lengths[layer]
        keys, values = self.by_layer[layer]
        return keys[:, :, :length], values[:, :, :length]

    def reorder(self, beam_idx: Tensor, layers: slice = slice(None)) -> None:
        """Row i becomes what row `beam_idx[i]` (int64 or int32, `[rows]`) of the same input was, in these layers."""
        length = max(self.lengths[layers])
        if length <= self.unmoved:
            return
        moving = [buffer[layers, :, :, self.unmoved : length] for buffer in self._not_held_elsewhere()]
        beam_idx = beam_idx.to(moving[0].device)
        if beam_idx.device.type != "cpu" or sum(map(Tensor.numel, moving)) < MIN_ELEMENTS_TO_LOOK_AT:
            for states in moving:
                states.copy_(states.index_select(1, beam_idx))
            return
        moved = (beam_idx != torch.arange(beam_idx.shape[0])).nonzero().squeeze(1)
        for states in moving if moved.numel() else ():
            states[:, moved] = states.index_select(1, beam_idx[moved])

    def compact(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` (int64) was; the others are dropped."""
        if not self.buffers:
            return
        length, kept = max(self.lengths), []
        for buffer in self._not_held_elsewhere():
            taken = buffer[:, :, :, :length].index_select(1, rows.to(buffer.device))
            kept.append(buffer[:, : rows.shape[0]])
            kept[-1][:, :, :, :length] = taken
        self.use(kept)

    def use(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.by_layer = list(zip(*(buffer.unbind(0) for buffer in buffers)))

    def _grow(self, needed: int, added: KV) -> None:
        used = max(self.lengths)
        capacity = max(needed, min(self.limit, needed + max(FIRST_CAPACITY, used - self.unmoved)))
        grown = []
        for which, states in enumerate(added):
            rows, heads, _, width = states.shape
            grown.append(states.new_empty((len(self.lengths), rows, heads, capacity, width)))
            if self.buffers:
                grown[-1][:, :, :, :used] = self.buffers[which][:, :, :, :used]
        self.use(grown)

    def _not_held_elsewhere(self) -> list[Tensor]:
        """The buffers, or copies if somebody else holds a view of them, such as a model that remembers its keys.

        Copies as well where torch does not tell who holds them. Of static buffers only captured steps have views."""
        if self.is_static:
            return self.buffers
        known = _holders_of_new_buffer(len(self.lengths))
        if known is None or any(_holders(buffer) > known for buffer in self.buffers):
            self.use([buffer.clone() for buffer in self.buffers])
        return self.buffers


class KVCache:
    """Keys and values of all layers of a decoder, for `inputs * rows_per_input` rows, see the drawing above.

    prompts: of each layer, segments `[copies, kv_heads, length, head_dim]` that no step writes. usage: counts the
    operations on keys and values in segments, see `SegmentedKV`.

    Of a static cache: padding, how many positions before its first segment have to be hidden (in the cross-attention
    where there is one, otherwise in the self-attention). prompt_length: of the self-attention, without padding.
    capacity: how many positions each row can generate. write_position: where the next generated position goes, int64
    `[1]`. seq_lengths: how many positions each layer with generated ones holds, int64 `[layers]`. A step reads both,
    and writes the second; `advance` counts afterwards.
    """

    def __init__(self, inputs: int, rows_per_input: int) -> None:
        self.rows, self.rows_per_input = inputs * rows_per_input, rows_per_input
        self.prompts: list[tuple[KV, ...]] = []
        self.generated: list[Generated] = []
        self.usage: Counter[str] = Counter()
        self._slots: list[tuple[Generated, int] | None] = []  # of each layer; None where nothing is added
        self._views: list[tuple[SegmentedKV, ...] | None] = []  # of each layer, what stands for its present content
        self._paddings: list[int] = []
        self.is_static = False
        self.padding = self.prompt_length = self.capacity = 0
        self.write_position: Tensor  # of a static cache
        self.seq_lengths: Tensor

    def add_layers(self, prompts: Sequence[tuple[KV, ...]], limit: int | None, is_static: bool = False) -> list[int]:
        """Adds layers that are alike, with these prompts; returns their numbers. Those without a limit come last.

        limit: how many positions can be added to each row; None if none are.
        """
        first, count = len(self.prompts), len(prompts)
        self.prompts += prompts
        if limit is None:
            self._slots += [None] * count
        else:
            self.generated.append(Generated(count, limit, is_static))
            self._slots += [(self.generated[-1], index) for index in range(count)]
        self._views += [None] * count
        self._paddings += [0] * count
        return list(range(first, first + count))

    def repeat_prompt(self, layer: int) -> None:
        """Stores the prompt of a layer for each row, before anything is generated; all layers that are alike."""
        repeated = tuple(materialized(segments, self.rows) for segments in zip(*self.prompts[layer]))
        slot, self.prompts[layer] = self._slots[layer], ()
        if slot is None:
            self.prompts[layer] = (repeated,)
        else:
            slot[0].append(slot[1], *repeated)
            slot[0].unmoved = repeated[0].shape[2]

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
        for layer, slot in enumerate(self._slots):
            if self._views[layer] is not None:
                self._invalidate(layer)
            if slot is None:
                continue
            added, index = slot
            pair = tuple(states.contiguous() for states in added.read(index))
            if added not in expanded:
                expanded[added] = Generated(len(added.lengths), limit + (0 if shares else added.lengths[index]))
            self._slots[layer] = expanded[added], index
            if shares:
                self.prompts[layer] += (pair,)
            else:
                expanded[added].append(index, *(states.repeat_interleave(rows_per_input, 0) for states in pair))
                expanded[added].unmoved = pair[0].shape[2]
        self.generated = list(expanded.values())

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Adds what each row has computed, `[rows, kv_heads, new_length, head_dim]`; one position if static."""
        if self._views[layer] is not None:
            self._invalidate(layer)
        slot = self._slots[layer]
        if slot is None:  # to a layer that never grows a model has added something
            slot = self._materialize(layer)
        generated, index = slot
        if not self.is_static:
            generated.append(index, keys, values)
            return
        for buffer, added in zip(generated.by_layer[index], (keys, values)):
            buffer.index_copy_(2, self.write_position, added)
        self.seq_lengths[layer].add_(1)

    def segments(self, layer: int) -> tuple[KV, ...]:
        """What attention sees: the prompt's segments, and `[rows, kv_heads, length or capacity, head_dim]`."""
        slot = self._slots[layer]
        if slot is None or not (self.is_static or slot[0].lengths[slot[1]]):
            return self.prompts[layer]
        generated, index = slot
        return *self.prompts[layer], (generated.by_layer[index] if self.is_static else generated.read(index))

    def read(self, layer: int) -> KV:
        """Keys and values `[rows, kv_heads, length, head_dim]`; the same tensors until the next change."""
        if (present := self._views[layer]) is not None:
            if not self.was_materialized(layer):
                return present
            self._invalidate(layer)
        segments = self.segments(layer)
        if len(segments) == 1 and segments[0][0].shape[0] == self.rows:
            return segments[0]
        keys, values = zip(*segments)
        view = SegmentedKV(keys, self.rows, self.usage), SegmentedKV(values, self.rows, self.usage)
        if not self.is_static:
            self._views[layer] = view
        return view

    def was_materialized(self, layer: int) -> bool:
        """Whether the present keys or values were needed in one piece, which may have been written into."""
        view = self._views[layer]
        return view is not None and (view[0].memory is not None or view[1].memory is not None)

    def length(self, layer: int) -> int:
        """How many positions the layer holds."""
        return sum(keys.shape[2] for keys, _ in self._present(layer))

    def copy(self, layer: int) -> KV:
        """Keys and values `[rows, kv_heads, length, head_dim]`, in memory of their own."""
        if (view := self._views[layer]) is not None:
            return tuple(states.materialize() for states in view)
        return tuple(materialized(segments, self.rows) for segments in zip(*self._present(layer)))

    def drop(self, layer: int, count: int) -> bool:
        """Forgets the first `count` positions; False if they are not all of the first segment, of which some stay."""
        if self._views[layer] is not None:
            self._invalidate(layer)
        if not self.prompts[layer] or count >= self.prompts[layer][0][0].shape[2]:
            return False
        first, *others = self.prompts[layer]
        self.prompts[layer] = tuple(states[:, :, count:] for states in first), *others
        return True

    def reorder(self, beam_idx: Tensor, layer: int | None = None) -> None:
        """Row i goes on with what row `beam_idx[i]` of the same input has, in all layers or in this one."""
        for one in range(len(self._views)) if layer is None else (layer,):
            if self._views[one] is not None and self._slots[one] is not None:
                self._invalidate(one)
        if layer is None:
            for generated in self.generated:
                generated.reorder(beam_idx)
        elif (slot := self._slots[layer]) is not None:
            slot[0].reorder(beam_idx, slice(slot[1], slot[1] + 1))

    def compact(self, batch_index: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `batch_index`; row i becomes what row `rows[i]` was (int64 both).

        All inputs that stay have equally many of these rows, which are next to each other.
        """
        for layer, view in enumerate(self._views):
            if view is not None:
                self._invalidate(layer)
            self.prompts[layer] = tuple(self._of_rows(pair, batch_index, rows) for pair in self.prompts[layer])
        for generated in self.generated:
            generated.compact(rows)
        self.rows, self.rows_per_input = rows.shape[0], rows.shape[0] // batch_index.shape[0]

    def _of_rows(self, pair: KV, batch_index: Tensor, rows: Tensor) -> KV:
        copies = pair[0].shape[0]
        if copies == 1:
            return pair
        index = (rows if copies == self.rows else batch_index).to(pair[0].device)
        return tuple(states.index_select(0, index) for states in pair)

    def _invalidate(self, layer: int) -> None:
        """Invalidates the tensors handed out by `read`: they stand for themselves from here on."""
        if self.was_materialized(layer):
            self._materialize(layer)
        self._views[layer] = None

    def _materialize(self, layer: int) -> tuple[Generated, int]:
        """Stores a layer for each row, in buffers of its own."""
        keys, values = self.copy(layer)
        slot, repeated = self._slots[layer], sum(pair[0].shape[2] for pair in self.prompts[layer])
        generated = Generated(1, repeated + (0 if slot is None else slot[0].limit))
        generated.append(0, keys, values)
        generated.unmoved = repeated
        self.generated.append(generated)
        self.prompts[layer], self._views[layer], self._slots[layer] = (), None, (generated, 0)
        return generated, 0

    def _present(self, layer: int) -> tuple[KV, ...]:
        """The segments without padding and spare capacity."""
        prompt, padding, slot = self.prompts[layer], self._paddings[layer], self._slots[layer]
        if padding:
            prompt = (tuple(states[:, :, padding:] for states in prompt[0]), *prompt[1:])
        if slot is None or not slot[0].lengths[slot[1]]:
            return prompt
        return *prompt, slot[0].read(slot[1])

    # Static caches.

    def static_reasons(self) -> list[Reason]:
        """Why there can be no static cache with this content; empty if there can."""
        if any(self.was_materialized(layer) for layer in range(len(self.prompts))):
            return [Reason("MATERIALIZED", "the model materializes its keys")]
        kinds: dict[bool, set[tuple]] = {True: set(), False: set()}
        for layer, slot in enumerate(self._slots):
            present = self._present(layer)
            if not present:
                return [LAYER_EMPTY]
            kinds[slot is None].add(tuple(_shapes(pair, None) for pair in present))
        differ = any(len(one) > 1 for one in kinds.values()) or not kinds[False]
        return [Reason("LAYERS_DIFFER", "the layers of the cache differ in shape, dtype or device")] if differ else []

    def content(
        self, batch_index: Tensor | None = None, rows: Tensor | None = None, drop_last: bool = False
    ) -> KVCache:
        """What is there, as views, to be loaded into a static cache: of these inputs and rows only, or of all.

        drop_last: without the position that was added last.
        """
        chosen = KVCache(self.rows // self.rows_per_input, self.rows_per_input)
        growing = [slot for slot in self._slots if slot is not None]
        prompts, pairs = [], []
        for layer, slot in enumerate(self._slots):
            present = self._present(layer)
            if batch_index is not None:
                present = tuple(self._of_rows(pair, batch_index, rows) for pair in present)
            if slot is not None and slot[0].lengths[slot[1]]:
                pairs.append(tuple(states[:, :, :-1] for states in present[-1]) if drop_last else present[-1])
                present = present[:-1]
            prompts.append(present)
        if batch_index is not None and rows is not None:
            chosen.rows, chosen.rows_per_input = rows.shape[0], rows.shape[0] // batch_index.shape[0]
        chosen.add_layers(prompts[: len(growing)], 0)
        chosen.add_layers(prompts[len(growing) :], None)
        generated = chosen.generated[0]
        if pairs:
            generated.by_layer, generated.lengths = pairs, [pairs[0][0].shape[2]] * len(pairs)
            generated.unmoved = growing[0][0].unmoved
        return chosen

    def spec(self, most: int, exact_lengths: bool = False) -> Spec:
        """Of a static cache for this `content`: shapes with capacities, types and devices, the key of a captured graph.

        most: positions that a row can generate. exact_lengths: prompts are not padded to lengths that others have.
        """
        capacity = capacity_for(self.generated[0].lengths[0] + 1, most)
        has_cross, layers = self._slots[-1] is None, []
        for slot, prompt in zip(self._slots, self.prompts):
            pads = not exact_lengths and (slot is None or not has_cross)
            shapes = [_shapes(pair, rounded if pads and not which else None) for which, pair in enumerate(prompt)]
            generated = None if slot is None else _shapes(slot[0].by_layer[slot[1]], lambda _: capacity)
            layers.append((tuple(shapes), generated))
        return self.rows, self.rows_per_input, tuple(layers)

    def to_static(self, spec: Spec) -> KVCache:
        """A static cache of this spec, to `load` this content, or others with the same spec."""
        rows, rows_per_input, layers = spec
        static = KVCache(rows // rows_per_input, rows_per_input)
        prompts = [tuple(tuple(map(_empty, pair)) for pair in prompt) for prompt, _ in layers]
        growing = [generated for _, generated in layers if generated is not None]
        shape, *_ = growing[0][0]
        static.add_layers(prompts[: len(growing)], shape[2], is_static=True)
        static.add_layers(prompts[len(growing) :], None)
        static.generated[0].use([_empty(one, len(growing)) for one in growing[0]])
        device = static.generated[0].buffers[0].device
        static.is_static, static.capacity = True, shape[2]
        static.write_position = torch.zeros(1, dtype=torch.int64, device=device)
        static.seq_lengths = torch.zeros(len(growing), dtype=torch.int64, device=device)
        return static

    def to_growable(self, limit: int) -> KVCache:
        """The same content in memory of its own, to which positions can be added, up to `limit` for each row."""
        content = self.content()
        copied = KVCache(self.rows // self.rows_per_input, self.rows_per_input)
        prompts = [tuple(tuple(states.clone() for states in pair) for pair in prompt) for prompt in content.prompts]
        growing = sum(slot is not None for slot in content._slots)
        copied.add_layers(prompts[:growing], limit)
        copied.add_layers(prompts[growing:], None)
        for layer, pair in enumerate(content.generated[0].by_layer):
            copied.generated[0].append(layer, *pair)
        copied.generated[0].unmoved = content.generated[0].unmoved
        return copied

    def load(self, content: KVCache) -> None:
        """Copies this content, and zeros around it: what is hidden has the weight 0, which NaN would survive."""
        for layer, (prompt, source) in enumerate(zip(self.prompts, content.prompts)):
            for pair, other in zip(prompt, source):
                for states, given in zip(pair, other):
                    padding = states.shape[2] - given.shape[2]
                    states[:, :, :padding] = 0
                    states[:, :, padding:] = given
            if prompt:
                self._paddings[layer] = prompt[0][0].shape[2] - source[0][0].shape[2]
        self.padding = self._paddings[-1]
        self.prompt_length = sum(keys.shape[2] for keys, _ in self.prompts[0]) - self._paddings[0]
        generated, loaded = self.generated[0], content.generated[0]
        length = loaded.lengths[0]
        for pair, other in zip(generated.by_layer, loaded.by_layer):
            for states, given in zip(pair, other):
                states[:, :, :length] = given
                states[:, :, length:] = 0
        generated.unmoved, generated.lengths = loaded.unmoved, list(loaded.lengths)
        self.rewind()

    @property
    def generated_length(self) -> int:
        return self.generated[0].lengths[0]

    @property
    def tensors(self) -> list[Tensor]:
        buffers = [buffer for generated in self.generated for buffer in generated.buffers]
        return [*buffers, *(states for prompt in self.prompts for pair in prompt for states in pair)]

    @property
    def nbytes(self) -> int:
        """Of what is there, of a `content` as well."""
        return sum(states.nbytes for layer in range(len(self.prompts)) for kv in self._present(layer) for states in kv)

    def rewind(self) -> None:
        """Sets the tensors for the next position: before it is added, or added once more."""
        length = self.generated[0].lengths[0]
        self.write_position.fill_(length)
        self.seq_lengths.fill_(self.prompt_length + length)

    def advance(self) -> None:
        """Counts the position that was added to each layer."""
        generated = self.generated[0]
        generated.lengths = [generated.lengths[0] + 1] * len(generated.lengths)
        self.rewind()

    def mask(self) -> Tensor:
        """What self-attention may see once the next position is added, bool `[1, 1, 1, …]`."""
        prompt = sum(keys.shape[2] for keys, _ in self.prompts[0])
        positions = torch.arange(prompt + self.capacity, device=self.write_position.device)
        seen = (positions >= self._paddings[0]) & (positions <= prompt + self.generated_length)
        return seen[None, None, None]


def _shapes(pair: KV, capacity_of: Callable[[int], int] | None) -> tuple:
    """The shapes, with this capacity for their length or as they are, types and devices of keys and values."""
    shapes = []
    for states in pair:
        rows, heads, length, width = states.shape
        length = length if capacity_of is None else capacity_of(length)
        shapes.append(((rows, heads, length, width), states.dtype, states.device))
    return tuple(shapes)


def _empty(shape: tuple, *layers: int) -> Tensor:
    sizes, dtype, device = shape
    return torch.empty((*layers, *sizes), dtype=dtype, device=device)


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
