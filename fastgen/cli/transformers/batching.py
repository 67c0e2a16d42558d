"""From lines to batches: lines of about the same length together, none larger than asked for.

A batch costs as many steps as its longest output and as many positions as its longest input for each of its rows, so
lines of one length go together: read ahead a window of lines, sort, cut. The cut depends on INPUT and on flags only,
never on what a device could hold: every run, also one that goes on, has the same batches under the same numbers.
Prompts of decoder-only models that begin alike get batches of their own, and their beginning is kept between them.

Tests: tests/cli/transformers/test_cli_batches.py, tests/cli/transformers/test_cli_default_batch.py,
tests/cli/transformers/test_cli_heads.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.cli.transformers.args import RunConfig
from fastgen.cli.transformers.files import Line

if TYPE_CHECKING:
    import numpy as np
    import torch

    from fastgen.cli.transformers.model import Loaded

# Lines that need no model wait for a batch that takes them along, but no more than this many: then they go alone.
MOST_NOT_GENERATED = 1 << 14
BATCHES_PER_WINDOW = 16
LINES_PER_WINDOW = 1 << 12  # at most, where batches are cut by tokens only
LEAST_HEAD = 32  # tokens that inputs begin with: fewer are not kept, and inputs are not batched by them
HEAD_GROWTH = 1.25  # lengths of heads are LEAST_HEAD times a power of it
LEAST_INPUTS = 8  # however many beams they have: FastSeq's default
SHARE = 4  # one part of so many for keys and values: layers at work need some, and other programs
# Rows of generate (inputs × beams), and tokens of inputs. CPU: as a small and a base model gained; GPU: not measured.
MOST = {"cpu": (256, 1 << 14), "cuda": (1024, 1 << 17)}
COPIES_OF_SCORES = 8  # of a row's scores for every token of the vocabulary, in float32, while a beam is chosen
NEW_TOKENS = 256  # where nothing limits an output
UNKNOWN_MEMORY = 8 << 30  # of a system that does not say
UNKNOWN_VALUES = 32 * 4096  # layers × width of a model of seven billion parameters
LIMITS_OF_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(slots=True)
class Item:
    """A line of INPUT on its way through the stages.

    arrays: what the model takes, without a batch dimension; None where there is nothing to generate.
    length: tokens of text, frames of sound; 0 where there are none. group: items share a batch only within a group.
    error: why there are no outputs. outputs: as JSON. is_written: by an earlier run, which has left the rest out.
    """

    line: Line
    arrays: dict[str, np.ndarray] | None = None
    length: int = 0
    group: Any = None
    error: str | None = None
    outputs: list[dict[str, Any]] = field(default_factory=list)
    is_written: bool = False


@dataclass(slots=True)
class Batch:
    """Items for one call of generate, and others that need none but are to be written with them.

    number: counts the batches that have items, from 0 on. inputs: of the items, [B, N, …], padded. head: how many
    tokens all items of the batch, and others of its window, begin with; 0 where that is of no use.
    """

    items: list[Item]
    others: list[Item]
    number: int
    ends_window: bool = True  # of items that were sorted by length, longest first
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    head: int = 0

    @property
    def is_written(self) -> bool:
        """Whether an earlier run has written all of it."""
        return all(item.is_written for item in (*self.items, *self.others))


@dataclass(slots=True)
class Generated:
    """What came of some items. R outputs per item stand in a row, best first."""

    items: list[Item]  # B
    sequences: np.ndarray | None = None  # int64 [B * R, T]: what was generated, without the prompt of a causal LM
    scores: list[float] | None = None  # [B * R], of beam search where they were asked for
    sounds: list[np.ndarray] | None = None  # B times float32 [S] where the model speaks
    segments: list[list[tuple[float, float, list[int]]]] | None = None  # [B * R] times (start, end, tokens)


@dataclass(frozen=True)
class Limits:
    """How large a batch may be. rows: inputs; cells: inputs × the longest one's length. None: any number."""

    rows: int | None
    cells: int | None

    def allow(self, rows: int, length: int) -> bool:
        """One input is always allowed."""
        fits = (self.rows is None or rows <= self.rows) and (self.cells is None or rows * length <= self.cells)
        return fits or rows == 1


class Planner:
    """Takes items in the order of INPUT and gives batches.

    window: how many items are sorted by length, longest first: what does not fit into memory shows at once. 0: batches
        of items as they stand in INPUT. window_cells: their tokens, of which there are fewer where they are long.
    by_head: batches have heads, and items that begin alike share batches, if they fill one.
    """

    def __init__(self, limits: Limits, window: int, window_cells: int | None = None, by_head: bool = False) -> None:
        self._limits, self._by_head = limits, by_head
        self._window = window
        self._window_cells = math.inf if window_cells is None else window_cells
        self._waiting: list[Item] = []  # to be sorted
        self._open: list[Item] = []  # the batch that is not full
        self._cells = self._longest = self._number = 0
        self._others: list[Item] = []
        self._last: Item | None = None  # the first of the batch before

    def add(self, items: list[Item]) -> Iterator[Batch]:
        """The batches that are complete with these items."""
        for item in items:
            if not item.length:
                self._others += [] if item.is_written else [item]
                if len(self._others) >= MOST_NOT_GENERATED:
                    yield self._batch([])
            elif self._window == 0:
                yield from self._placed(item)
            else:
                self._waiting.append(item)
                self._cells += item.length
                if len(self._waiting) >= self._window or self._cells >= self._window_cells:
                    yield from self._sorted()

    def rest(self) -> Iterator[Batch]:
        """What there is, however little: at the end of INPUT."""
        yield from self._sorted()
        if self._others:
            yield self._batch([])

    def _sorted(self) -> Iterator[Batch]:
        items, self._waiting, self._cells = self._waiting, [], 0
        batches = []
        for alike in self._alike(items):
            alike.sort(key=lambda item: (repr(item.group), -item.length))
            found = [batch for item in alike for batch in self._placed(item)]
            found += [self._batch(self._open)] if self._open else []
            if alike and self._by_head:
                head = common_head(alike)
                for batch in found:
                    batch.head = head
            batches += found
        for batch in batches[:-1]:
            batch.ends_window = False
        yield from batches

    def _alike(self, items: list[Item]) -> list[list[Item]]:
        """Items that begin with the same `LEAST_HEAD` tokens, if they fill a batch; then all others."""
        by_beginning: dict[bytes, list[Item]] = {}
        for item in items if self._by_head else ():
            if item.arrays is not None and item.length > LEAST_HEAD:
                beginning = item.arrays["input_ids"][:LEAST_HEAD].tobytes()
                by_beginning.setdefault(beginning, []).append(item)
        alike = [found for found in by_beginning.values() if len(found) >= (self._limits.rows or LEAST_INPUTS)]
        taken = {id(item) for found in alike for item in found}
        others = [item for item in items if id(item) not in taken]
        return [*alike, others]

    def _placed(self, item: Item) -> Iterator[Batch]:
        """Puts an item into the open batch, and gives the batch that is complete with it or without it."""
        longest = max(self._longest, item.length)
        if self._open and (self._open[0].group != item.group or not self._limits.allow(len(self._open) + 1, longest)):
            yield self._batch(self._open)
        self._open.append(item)
        self._longest = max(self._longest, item.length)
        if len(self._open) == self._limits.rows:
            yield self._batch(self._open)

    def _batch(self, items: list[Item]) -> Batch:
        others, self._others = self._others, []
        batch = Batch(items, others, self._number)
        if self._by_head and items:  # those of a window get the head of them all
            batch.head = common_head(items[:1] + items if self._last is None else [self._last, *items])
            self._last = items[0]
        self._number += bool(items)
        if items:
            self._open, self._longest = [], 0
        return batch


def common_head(items: list[Item]) -> int:
    """How many tokens all items begin with, of which each has at least one more; 0 if they are fewer than `LEAST_HEAD`.

    Rounded down, so that windows whose items have a token more in common by chance have the same head.
    """
    rows = [item.arrays["input_ids"] for item in items if item.arrays is not None]
    head = min(map(len, rows), default=1) - 1
    for row in rows[1:]:
        differs = row[:head] != rows[0][:head]
        head = int(differs.argmax()) if differs.any() else head
    rounded = 0.0
    while max(LEAST_HEAD, rounded * HEAD_GROWTH) <= head:
        rounded = max(LEAST_HEAD, rounded * HEAD_GROWTH)
    return int(rounded)


def make_planner(args: RunConfig, loaded: Loaded, in_order: bool, by_head: bool) -> Planner:
    """As the flags say; in_order: batches are to keep the order of INPUT."""
    # --batch_tokens counts every row of the batch that generate makes of an input.
    cells = None if args.batch_tokens is None else max(1, args.batch_tokens // rows_per_input(loaded))
    limits = Limits(args.bs, cells)
    if in_order:
        return Planner(limits, 0, by_head=by_head)
    if args.window is None and cells is not None:
        window = LINES_PER_WINDOW if args.bs is None else BATCHES_PER_WINDOW * args.bs
        return Planner(limits, window, BATCHES_PER_WINDOW * cells, by_head)
    window = BATCHES_PER_WINDOW * (args.bs or 0) if args.window is None else args.window
    # Recordings of any length: as many frames as that many recordings of the length that Whisper hears at once have.
    at_once = getattr(loaded.feature_extractor, "nb_max_frames", None)
    return Planner(limits, window, None if at_once is None else max(1, window) * at_once, by_head)


def with_batch_size(args: RunConfig, loaded: Loaded) -> RunConfig:
    """`args`, with --bs and --batch_tokens where neither is given.

    A batch is as large as a quarter of the memory beside the model allows, counted in the keys and values of its
    tokens, but not larger than what still gains: a larger one has more padding, and all of it waits for the longest
    output. All memory of the machine counts, not what is free: a seed is to give the same samples again.
    """
    if args.bs is not None or args.batch_tokens is not None:
        return args
    if loaded.feature_extractor is not None or args.audio_out:  # frames, most of which a model joins at once
        return replace(args, bs=LEAST_INPUTS)
    config = loaded.model.config.get_text_config(decoder=True)
    rows = rows_per_input(loaded)
    most_rows, most_tokens = MOST.get(loaded.model.device.type, MOST["cpu"])
    weights = sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())
    memory = max(0, total_memory(loaded.model.device) - weights) // SHARE
    token = key_value_bytes(config, loaded.model.dtype)
    new_tokens = loaded.value("max_new_tokens") or loaded.value("max_length")
    output = 4 * COPIES_OF_SCORES * config.vocab_size + token * (new_tokens or NEW_TOKENS)
    inputs = max(1, min(max(LEAST_INPUTS, most_rows // rows), memory // (output * rows)))
    return replace(args, bs=inputs, batch_tokens=rows * max(1, min(most_tokens, memory // (token * rows))))


def rows_per_input(loaded: Loaded) -> int:
    """How many rows generate makes of an input: beams or outputs."""
    return max(loaded.value(name) or 1 for name in ("num_beams", "num_return_sequences"))


def key_value_bytes(config: Any, dtype: torch.dtype) -> int:
    """Of one token, in all layers of a decoder."""
    try:
        heads = config.num_attention_heads or 1
        width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
        values = config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width
    except Exception:  # of a config without these, or with others for each layer
        values = UNKNOWN_VALUES
    return 2 * values * dtype.itemsize


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU, or that this process's machine or container has."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    sizes = [UNKNOWN_MEMORY]
    with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in LIMITS_OF_CONTAINERS:
        with suppress(OSError, ValueError):  # "max" is no limit
            sizes.append(int(Path(path).read_text()))
    return min(sizes)
