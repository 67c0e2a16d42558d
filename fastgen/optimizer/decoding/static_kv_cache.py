"""Static KV cache: keys and values at fixed addresses, so that a decode step can be captured.

    KVCache ──content──> KVContent ──spec──> StaticKVCache(spec)     the spec is a part of the graph's key
                             │                    ^   │
                             └────────load────────┘   └──content──> KVContent, for a larger cache or one with fewer rows

    prompt      | padding | positions        |     `append` writes at `write_position`, a tensor; `read` returns the
    generated   | positions | spare capacity |     whole capacity, and a mask hides what is not filled

On a GPU, `reorder` may write a table of ancestors instead of moving rows: position p of row r is then in row
`ancestors[r, p]` of the buffer, where the steps' kernel finds it (`Bounds`); `content` and `copy` move rows first.

Writers: a step, with `append`, and states in place; the loop, with `reorder` and `advance`; `CapturedGraph.begin`, with
`load`; and who takes a run back, with `rewind` or `advance(0)`: `CapturedStep`, and drafts. Static caches follow
Seamless, "Updating and retrieving KV cache". This module knows no host library.

Tests: tests/optimizer/decoding/test_kv_cache.py, tests/optimizer/decoding/test_graphs.py,
tests/optimizer/decoding/test_row_states.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fastgen.ops.beams import Ancestors, follow, move_rows, on_device
from fastgen.ops.shared_attention import Bounds, can_follow_ancestors
from fastgen.ops.tracing import UnderAutocast
from fastgen.optimizer.decoding.report import STEPS, LeaveAlone, Reason, check
from fastgen.optimizer.decoding.segmented_kv import KV, cut, in_segments, length_of, materialized

SMALLEST_CAPACITY = 32

MOST_TOKENS = 12  # of one step

PairSpec = tuple[tuple[Any, ...], ...]  # sizes, dtype and device, for keys and for values
# Rows, rows per input, the number of growing layers, the generated pair of each; then the segments of each layer's
# prompt; then sizes, dtype and device of each state.
Spec = tuple[int, int, int, PairSpec, tuple[tuple[PairSpec, ...], ...], PairSpec]

_kind = attrgetter("shape", "dtype", "device")
_nbytes = attrgetter("nbytes")


def capacity_for(needed: int, most: int) -> int:
    """Returns a capacity for twice the needed positions, or for `most` if that is less, rounded.

    So a short call never grows its cache: the steps afterwards would often be too few for another graph.
    """
    return max(SMALLEST_CAPACITY, rounded(max(needed, min(most, 2 * max(needed, SMALLEST_CAPACITY)))))


def rounded(length: int) -> int:
    """Rounds a length up to one of a few sizes, four to eight between powers of two, so that lengths share graphs."""
    step = max(SMALLEST_CAPACITY // 2, 1 << max((length - 1).bit_length() - 3, 0))
    return -(-length // step) * step


@dataclass(frozen=True)
class KVContent:
    """Keys and values of all layers as views, to be loaded into a static cache.

    prompts: the segments of each layer that no step writes. generated: `[rows, kv_heads, length, head_dim]` for each
    layer that steps write, of equal length; layers that do not grow come last. A prompt that is stored for each row is
    a part of it. unmoved: how many of the first generated positions are equal in all rows of an input. states: `[rows,
    …]`, of layers without keys. dropped: for each layer that steps write, how many positions before its prompt a window
    has dropped; empty if none.
    """

    rows: int
    rows_per_input: int
    prompts: Sequence[tuple[KV, ...]]
    generated: Sequence[KV]
    unmoved: int = 0
    states: Sequence[Tensor] = ()
    dropped: Sequence[int] = ()

    @property
    def generated_length(self) -> int:
        return int(self.generated[0][0].shape[2])

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, chain(*chain(*self.prompts), *self.generated, self.states)))

    @check(STEPS)
    def require_alike(self) -> None:
        """Raises LeaveAlone if what steps write differs between layers."""
        if len({tuple(map(_kind, pair)) for pair in self.generated}) != 1:
            raise LeaveAlone([Reason("LAYERS_DIFFER", "the layers of the cache differ in shape, dtype or device")])

    def without_last(self, count: int = 1) -> KVContent:
        """Returns the content without the last `count` positions; states stay as they are."""
        return replace(self, generated=[cut(pair, 0, self.generated_length - count) for pair in self.generated])

    def of_rows(self, batch_index: Tensor, rows: Tensor) -> KVContent:
        """Returns the content of the inputs at `batch_index`; its row i is row `rows[i]` (int64 both)."""
        prompts = [tuple(rows_of(pair, self.rows, batch_index, rows) for pair in prompt) for prompt in self.prompts]
        generated = [rows_of(pair, self.rows, batch_index, rows) for pair in self.generated]
        return replace(
            self,
            rows=len(rows),
            rows_per_input=len(rows) // len(batch_index),
            prompts=prompts,
            generated=generated,
            states=[state.index_select(0, rows.to(state.device)) for state in self.states],
        )

    def spec(self, most: int, exact_lengths: bool = False, for_all: bool = False) -> Spec:
        """Returns the shapes, capacities, dtypes and devices of a static cache for this content.

        most: the most positions that a row can generate; for_all: whether there is capacity for all of them, so that
        the cache never grows. exact_lengths: whether prompts are not padded to common sizes.
        """
        growing = len(self.generated)
        is_padded = growing == len(self.prompts)  # whether self-attention is, and not cross-attention
        prompts = []
        for layer, prompt in enumerate(self.prompts):
            lengths = [keys.shape[2] for keys, _ in prompt]
            if prompt and (layer >= growing or is_padded) and not exact_lengths:
                lengths[0] = rounded(lengths[0])
            prompts.append(tuple(map(_spec_of, prompt, lengths)))
        needed = max(most * for_all, self.generated_length + 1)
        generated = _spec_of(self.generated[0], capacity_for(needed, most))
        states = tuple((*state.shape, state.dtype, state.device) for state in self.states)
        return self.rows, self.rows_per_input, growing, generated, tuple(prompts), states


class StaticKVCache:
    """What a `KVCache` holds, at fixed addresses with spare capacity, see the drawing above.

    prompts: as in `KVContent`, but the first segment begins with padding: in cross-attention if there is any, otherwise
    in self-attention. paddings: the number of its positions in each layer; padding: the largest. growing: the number
    of layers that steps write. buffers: their keys and values, `[layers, rows, kv_heads, capacity, head_dim]`.
    prompt_lengths: of each layer, without padding; dropped: see `KVContent`. capacity: the most generated positions of
    a row; generated_length: the present number.

    A step reads write_positions, first_positions and seq_lengths, and adds to seq_lengths; `advance` counts afterwards.
    write_positions: the indices of the next positions, int64 `[MOST_TOKENS]`; write_position: the first of them, `[1]`.
    A step of several tokens writes several; those that are not counted are overwritten. first_positions: the first
    position of each growing layer after its padding; seq_lengths: the number of its positions, with those that were
    dropped; both int64 `[layers]`. bounds: see `Bounds`, of each growing layer in a step of one token; None on a CPU.

    by_table: whether reorders write a table of ancestors instead of moving rows, if the kernel of the steps reads it.

    states: of layers of linear attention and state spaces, `[rows, …]`, at fixed addresses. A step overwrites all of a
    state, but only one position of keys. So a run that may be discarded (a capture, its comparison, a replay that may
    diverge) is preceded by `save_states`, and `rewind` restores them. can_rewind: whether it can.
    """

    def __init__(self, spec: Spec, by_table: bool = False) -> None:
        self.rows, self.rows_per_input, self.growing, generated, prompts, states = spec
        self.usage: Counter[str] = Counter()
        self.prompts: list[tuple[KV, ...]] = [tuple(tuple(map(_empty, pair)) for pair in prompt) for prompt in prompts]
        self.buffers = [_empty(states, self.growing) for states in generated]
        self.by_layer: list[KV] = list(zip(*map(torch.unbind, self.buffers)))
        self._loaded: list[tuple[KV, ...]] = []  # prompts without padding
        self.padding = self.generated_length = self.unmoved = 0
        self.paddings = [0] * len(self.prompts)
        self.prompt_lengths = [0] * len(self.prompts)
        self.dropped: Sequence[int] = [0] * self.growing
        self.capacity = self.buffers[0].shape[3]
        # `_counted`: what `advance` sets in one launch. `_at_first`: the same when nothing is generated.
        self._counted = torch.zeros(MOST_TOKENS + self.growing, dtype=torch.int64, device=self.buffers[0].device)
        positions = self._counted.new_zeros(MOST_TOKENS + 2 * self.growing)
        torch.arange(MOST_TOKENS, out=positions[:MOST_TOKENS])
        self._at_first, self.first_positions = positions.split((MOST_TOKENS + self.growing, self.growing))
        self._of_prompts = positions[MOST_TOKENS:]  # what `load` sets in one launch
        self.write_positions, self.seq_lengths = self._counted[:MOST_TOKENS], self._counted[MOST_TOKENS:]
        self.write_position = self.write_positions[:1]
        self.bounds: list[Bounds | None] = [None] * len(self.prompts)
        self._ancestors: Ancestors | None = None
        if self.write_position.is_cuda:
            if by_table and can_follow_ancestors(*self.buffers):
                self._ancestors = Ancestors(self.rows, self.capacity, self.write_position.device)
            table = None if self._ancestors is None else self._ancestors.table
            for layer, first in enumerate(self.first_positions.split(1)):
                self.bounds[layer] = Bounds(first, self.write_position, table)
        self._is_in_order = True  # False: keys and values of a row are in other rows
        stacks = {spec: _empty(spec, count) for spec, count in Counter(states).items()}
        views = {spec: iter(stack.unbind()) for spec, stack in stacks.items()}
        self.states = [next(views[spec]) for spec in states]
        self._stacks = [*stacks.values()]  # states of one shape and dtype move together
        self._saved: list[Tensor] = []
        own = KVContent(self.rows, self.rows_per_input, self.prompts, self.by_layer, states=self.states)
        self.nbytes = own.nbytes

    def load(self, content: KVContent) -> None:
        """Copies this content, and zeros around it: hidden positions have the weight 0, and 0 times NaN is NaN."""
        self._loaded = [tuple(map(_copy_in, *prompts)) for prompts in zip(self.prompts, content.prompts)]
        self._reset_ancestors()
        for pair, source in zip(self.by_layer, content.generated):
            _copy_in(pair, source, 0)
        self.dropped = content.dropped or [0] * self.growing
        self.prompt_lengths = [length_of(prompt) for prompt in content.prompts]
        self.paddings = [length_of(prompt) - length for prompt, length in zip(self.prompts, self.prompt_lengths)]
        seq_lengths = [length + dropped for length, dropped in zip(self.prompt_lengths, self.dropped)]
        positions = [*seq_lengths, *self.paddings[: self.growing]]
        self._of_prompts.copy_(on_device(positions, self._of_prompts.device))
        self.padding = max(self.paddings)
        self.unmoved, self.generated_length = content.unmoved, content.generated_length
        for state, source in zip(self.states, content.states, strict=True):
            state.copy_(source)
        self._saved = []
        self.advance(0)

    def save_states(self) -> None:
        """Keeps the states for `rewind`."""
        self._saved = [stack.clone() for stack in self._stacks]

    @property
    def can_rewind(self) -> bool:
        """Whether the states before the present run were saved, or there are none."""
        return len(self._saved) == len(self._stacks)

    def rewind(self) -> None:
        """Undoes a run that does not count: resets the write position, and restores states that were saved."""
        self.advance(0)
        for stack, saved in zip(self._stacks, self._saved):
            stack.copy_(saved)

    def advance(self, count: int = 1) -> None:
        """Counts the positions added to each layer; 0 resets the write position after a discarded attempt."""
        if count:
            self._saved = []
        self.generated_length += count
        torch.add(self._at_first, self.generated_length, out=self._counted)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Appends positions of each row, `[rows, kv_heads, 1 to MOST_TOKENS, head_dim]`, to a layer.

        Raises UnderAutocast if the dtype differs, which a growable cache supports.
        """
        if torch.is_autocast_enabled(keys.device.type):
            raise UnderAutocast("autocast begins inside the forward")
        for buffer, added in zip(self.by_layer[layer], (keys, values)):
            buffer.index_copy_(2, self.write_positions[: added.shape[2]], added)
        self.seq_lengths[layer].add_(keys.shape[2])

    def segments(self, layer: int) -> tuple[KV, ...]:
        """Returns what attention sees: the prompt's segments, and the buffer `[rows, kv_heads, capacity, head_dim]`."""
        prompt = self.prompts[layer]
        return (*prompt, self.by_layer[layer]) if layer < self.growing else prompt

    def read(self, layer: int, tokens: int = 1) -> KV:
        """Returns keys and values `[rows, kv_heads, length, head_dim]` with padding and spare capacity.

        tokens: of the step. For several, the library would copy keys for all heads that share them: segments stop it.
        """
        bounds = self.bounds[layer]
        if bounds is not None and tokens > 1:
            bounds = bounds._replace(last=self.write_positions[tokens - 1 : tokens])
        return in_segments(self.segments(layer), self.rows, self.usage, bounds, is_plain=tokens == 1)

    def mask(self) -> Tensor:
        """Returns the mask of self-attention for the next position, bool `[1, 1, 1, …]`, true for visible positions.

        For layers that have the same number of positions and no window.
        """
        first = self.paddings[0]
        length = first + self.prompt_lengths[0]
        positions = torch.arange(length + self.capacity, device=self.write_position.device)
        return ((positions >= first) & (positions <= length + self.generated_length))[None, None, None]

    def reorder(self, beam_idx: Tensor, layer: int | None = None) -> None:
        """Overwrites row i with row `beam_idx[i]` of the same input, in all layers or in one with keys."""
        if layer is None and self._stacks:
            move_rows([stack.flatten(2)[:, :, None, None] for stack in self._stacks], beam_idx)
        if self.generated_length <= self.unmoved or (layer is not None and layer >= self.growing):
            return
        positions = slice(self.unmoved, self.generated_length)
        if layer is None and self._ancestors is not None:
            self._ancestors.reorder(beam_idx, positions)
            self._is_in_order = False
            return
        if not self._is_in_order:
            self._apply_ancestors()
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        keys, values = self.buffers
        move_rows([keys[layers, :, :, positions], values[layers, :, :, positions]], beam_idx)

    def _apply_ancestors(self) -> None:
        """Moves keys and values to the rows that they belong to, in memory that is allocated before the first move."""
        if self._is_in_order or self._ancestors is None:
            return
        for buffer, moved in [(buffer, torch.empty_like(buffer[0])) for buffer in self.buffers]:
            for states in buffer:
                states.copy_(follow(self._ancestors.table, states, out=moved))
        self._reset_ancestors()

    def _reset_ancestors(self) -> None:
        self._is_in_order = True
        if self._ancestors is not None:
            self._ancestors.reset()

    def content(self) -> KVContent:
        """Returns the content, without padding and spare capacity."""
        self._apply_ancestors()
        generated = [cut(pair, 0, self.generated_length) for pair in self.by_layer]
        return KVContent(
            self.rows, self.rows_per_input, self._loaded, generated, self.unmoved, self.states, self.dropped
        )

    def length(self, layer: int) -> int:
        """Returns the number of positions in the layer."""
        return self.prompt_lengths[layer] + (self.generated_length if layer < self.growing else 0)

    def copy(self, layer: int) -> KV:
        """Returns keys and values `[rows, kv_heads, length, head_dim]` in memory of their own."""
        self._apply_ancestors()
        generated = [cut(pair, 0, self.generated_length) for pair in self.by_layer[layer : layer + 1]]
        return tuple(materialized(segments, self.rows) for segments in zip(*self._loaded[layer], *generated))


def rows_of(pair: KV, count: int, batch_index: Tensor, rows: Tensor) -> KV:
    """Returns these rows of a pair for `count` rows, which is stored once per row, once per input or once."""
    copies = pair[0].shape[0]
    if copies == 1 or (copies != count and copies == len(batch_index)):  # all inputs remain
        return pair
    index = (rows if copies == count else batch_index).to(pair[0].device)
    return tuple(states.index_select(0, index) for states in pair)


def _spec_of(pair: KV, length: int) -> PairSpec:
    """Returns the sizes of keys and values with this length, their dtypes and devices."""
    return tuple((*states.shape[:2], length, states.shape[3], states.dtype, states.device) for states in pair)


def _empty(spec: tuple[Any, ...], *layers: int) -> Tensor:
    *sizes, dtype, device = spec
    return torch.empty((*layers, *sizes), dtype=dtype, device=device)


def _copy_in(pair: KV, source: KV, start: int | None = None) -> KV:
    """Copies keys and values into `pair` from `start` on, or to its end, and returns views of the copies."""
    length = source[0].shape[2]
    start = pair[0].shape[2] - length if start is None else start
    for states, copied in zip(pair, source):
        states[:, :, :start] = 0
        states[:, :, start : start + length] = copied
        states[:, :, start + length :] = 0
    return cut(pair, start, start + length)
