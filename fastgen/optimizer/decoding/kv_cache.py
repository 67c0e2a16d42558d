"""Keys and values of one layer during decoding: what a group of rows shares is kept once, the rest is written in place.

FastSeq §4.1.1 (self-attention of decoder-only models), §4.1.2 (cross-attention); the preallocated part follows the
static caches of Seamless §"Optimizing SeamlessM4T". Knows no host library.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from fastgen.optimizer.decoding import gain
from fastgen.optimizer.decoding.two_part_states import TwoPartStates

# A shared prompt costs a second attention product for every layer and step. It pays where it saves at least this many
# elements of keys per layer (on a 2-core CPU the break-even is near 0.5 million, see benchmarks/bench_attention.py).
MIN_SAVED_ELEMENTS = 1 << 19

# From here on it pays, on a CPU, to write what rows generate in place instead of copying all keys at every step: beams
# break even near 0.2 million elements, samples near 0.03 million.
MIN_ELEMENTS_TO_WRITE_IN_PLACE = 1 << 17

# From here on it pays, on a CPU, to find the rows that a reorder moves.
MIN_ELEMENTS_TO_LOOK_AT = 1 << 16

FIRST_CAPACITY = 32


class RowBuffer:
    """States `[rows, kv_heads, length, head_dim]` of each row, appended in place to a buffer that grows by doubling.

    The first `fixed` positions are equal for all rows of a group, so that a reorder has no need to move them.
    """

    def __init__(self, limit: int, states: Tensor | None = None) -> None:
        self.limit = limit  # the length that generation can reach; the buffer never grows past it without need
        self.length = 0
        self.fixed = 0
        self.buffer: Tensor | None = None
        if states is not None:
            self.append(states)
            self.fixed = self.length

    def append(self, states: Tensor) -> None:
        """Writes states `[rows, kv_heads, new_length, head_dim]` behind those that are there."""
        rows, heads, new_length, width = states.shape
        end = self.length + new_length
        if self.buffer is None or end > self.buffer.shape[2]:
            capacity = max(end, min(self.limit, end + max(FIRST_CAPACITY, self.length - self.fixed)))
            grown = states.new_empty((rows, heads, capacity, width))
            if self.buffer is not None:
                grown[:, :, : self.length] = self.view()
            self.buffer = grown
        self.buffer[:, :, self.length : end] = states
        self.length = end

    def view(self) -> Tensor:
        """What was appended, `[rows, kv_heads, length, head_dim]`, not copied."""
        return self.buffer[:, :, : self.length]

    def reorder(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` (int64 or int32, `[rows]`) was; moves only what was generated."""
        if self.length == self.fixed:
            return
        if _is_held_elsewhere(self.buffer):  # by a model that remembers its keys
            self.buffer = self.buffer.clone()
        generated = self.buffer[:, :, self.fixed : self.length]
        if beam_idx.device.type != "cpu" or generated.numel() < MIN_ELEMENTS_TO_LOOK_AT:
            generated.copy_(generated.index_select(0, beam_idx))
            return
        moved = (beam_idx != torch.arange(beam_idx.shape[0])).nonzero().squeeze(1)
        if moved.numel():
            generated[moved] = generated.index_select(0, beam_idx[moved])

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (int64)."""
        if self.buffer is not None:
            self.buffer = self.buffer.index_select(0, rows)


class SharedKeyValues:
    """The keys and values of one layer for `inputs * fan_out` rows, of which the first part is equal in each group.

    keys, values: `[inputs, kv_heads, shared_length, head_dim]`, as computed by a prefill with one row per input.
    fan_out: rows (beams or samples) per input.
    limit: the length that each row can reach in what it generates itself; 0 for cross-attention.
    keep_shared: keep the first part once per input; otherwise it is repeated for each row, in the rows' buffer.
    usage: counts the operations on this layer's states, see `TwoPartStates`.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, fan_out: int, limit: int, keep_shared: bool, usage: Counter[str]
    ) -> None:
        self.shared: tuple[Tensor, Tensor] | None = (keys.contiguous(), values.contiguous())
        self.fan_out = fan_out
        self.group = torch.arange(keys.shape[0], device="cpu").repeat_interleave(fan_out)  # the input of each row
        self.limit = limit
        self.usage = usage
        self.own = (RowBuffer(limit), RowBuffer(limit))
        self._given: tuple[TwoPartStates, TwoPartStates] | None = None  # what stands for the present content
        if not keep_shared:
            self.expand()

    @property
    def length(self) -> int:
        return self.own[0].length + (0 if self.shared is None else self.shared[0].shape[2])

    @property
    def was_read_whole(self) -> bool:
        """Whether somebody has asked for the present keys or values in one piece, and may have written into them."""
        return self._given is not None and not all(states.in_parts for states in self._given)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Adds what each row has computed for itself: `[inputs * fan_out, kv_heads, new_length, head_dim]`."""
        self._take_back()
        self.own[0].append(keys)
        self.own[1].append(values)

    def drop(self, count: int) -> bool:
        """Forgets the first `count` positions; False if that would leave nothing of the shared part."""
        self._take_back()
        if self.shared is None or count >= self.shared[0].shape[2]:
            return False
        self.shared = tuple(shared[:, :, count:] for shared in self.shared)
        return True

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[inputs * fan_out, kv_heads, length, head_dim]`; the same tensors until the next change."""
        if self.was_read_whole:
            self.expand()
        if self.shared is None:
            return self.own[0].view(), self.own[1].view()
        if self._given is None:
            self._given = self._in_two_parts()
        return self._given

    def keeps_groups(self, beam_idx: Tensor) -> bool:
        """Whether `beam_idx` takes for each row a row of the same input; indices on a device are trusted, not read."""
        if beam_idx.device.type != "cpu":
            return True
        return torch.equal((beam_idx // self.fan_out).to(self.group.dtype), self.group)

    def reorder(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` of the same input was."""
        self._take_back()
        for own in self.own:
            own.reorder(beam_idx)

    def keep(self, places: Tensor, rows: Tensor) -> None:
        """Drops the inputs that are not at `places`; `rows` are theirs (int64 both)."""
        self._take_back()
        if self.shared is not None:
            self.shared = tuple(shared.index_select(0, places) for shared in self.shared)
        self.group = self.group[: rows.shape[0]]
        for own in self.own:
            own.keep(rows)

    def expand(self) -> None:
        """Keeps the shared part for each row, for code that cannot work on two parts or where sharing is no gain."""
        repeated = self.shared[0].shape[2]
        own = tuple(RowBuffer(self.limit + repeated, states) for states in self.whole())
        for buffer in own:
            buffer.fixed = repeated
        self.shared, self.own, self._given = None, own, None

    def whole(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[inputs * fan_out, kv_heads, length, head_dim]`, in memory of their own."""
        if self.shared is None:
            return self.own[0].view().clone(), self.own[1].view().clone()
        return tuple(states.whole() for states in self._given or self._in_two_parts())

    def _in_two_parts(self) -> tuple[TwoPartStates, TwoPartStates]:
        return tuple(
            TwoPartStates(shared, own.view() if own.length else None, self.fan_out, self.usage)
            for shared, own in zip(self.shared, self.own)
        )

    def _take_back(self) -> None:
        """What was given out stands for itself from here on, and no longer for the content."""
        if self.was_read_whole:
            self.expand()
        self._given = None


def _is_held_elsewhere(buffer: Tensor) -> bool:
    """Whether a tensor other than `buffer` stands on its storage."""
    use_count = getattr(torch._C, "_storage_Use_Count", None)  # not in every version of torch
    storage = buffer.untyped_storage()  # counted as well
    return use_count is not None and use_count(storage._cdata) > 2


def sharing_pays(keys: Tensor, fan_out: int, is_cross: bool = False) -> bool:
    """Whether keeping these keys `[inputs, kv_heads, length, head_dim]` once per input is faster.

    is_cross: they are those of a cross-attention, which has one part only. Where they are repeated instead, they are
    still never reordered.
    """
    asked = gain.sharing_is_asked_for()
    if asked is not None:
        return asked
    least = MIN_SAVED_ELEMENTS // 4 if is_cross else MIN_SAVED_ELEMENTS
    return keys.numel() * (fan_out - 1) >= least


def writing_in_place_pays(keys: Tensor, fan_out: int, limit: int) -> bool:
    """Whether keys `[inputs, kv_heads, length, head_dim]`, repeated and then `limit` longer, are worth a buffer."""
    inputs, kv_heads, length, width = keys.shape
    return inputs * fan_out * kv_heads * (length + limit // 2) * width >= MIN_ELEMENTS_TO_WRITE_IN_PLACE
