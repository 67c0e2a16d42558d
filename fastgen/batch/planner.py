"""Batches of lines: lines of about the same length together, none larger than asked for.

A batch costs as many steps as its longest output and as many positions as its longest input for each of its rows, so
lines of one length go together: read ahead a window of lines, sort, cut. The cut depends on INPUT and on flags only:
every run, also one that resumes, has the same batches under the same numbers.

Tests: tests/batch/test_planner.py, tests/batch/test_default_batch.py, tests/batch/test_heads.py
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, repeat, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.batch.config import BatchConfig
from fastgen.batch.files import Line

if TYPE_CHECKING:
    import numpy as np
    import torch

    from fastgen.batch.model import Loaded

BATCHES_PER_WINDOW = 16
MOST_FIRSTS = 1 << 15  # inputs that later ones may equal: so many outputs are kept
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
    error: why there are no outputs. outputs: as JSON. is_written: its record is, by this run or an earlier one.
    seed: of its samples, in place of the run's seed and its line's number. key: the same for equal items. first: an
    earlier item with this key, whose outputs are this one's, too. copies: items that wait for the outputs of this one.
    """

    line: Line
    arrays: dict[str, np.ndarray] | None = None
    length: int = 0
    group: Any = None
    error: str | None = None
    outputs: list[dict[str, Any]] = field(default_factory=list)
    is_written: bool = False
    seed: tuple[int, int] | None = None
    key: str | None = None
    first: Item | None = None
    copies: list[Item] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """Items for one call of generate, and others that need none but are to be written with them.

    number: counts the batches that have items, from the first line of their window on. inputs: of the items,
    [B, N, …], padded. head: how many tokens all items of the batch, and others of its window, begin with; 0 where that
    is of no use.
    """

    items: list[Item]
    others: list[Item]
    number: int
    ends_window: bool = True  # of items that were sorted by length, longest first
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    head: int = 0


@dataclass(slots=True)
class GeneratedBatch:
    """What came of some items. R outputs per item stand in a row, best first."""

    items: list[Item]  # B
    sequences: np.ndarray | None = None  # int64 [B * R, T]: what was generated, without the prompt of a causal LM
    scores: list[float] | None = None  # [B * R], of beam search where they were asked for
    sounds: list[np.ndarray] | None = None  # B times float32 [S] where the model speaks
    segments: list[list[tuple[float, float, list[int]]]] | None = None  # [B * R] times (start, end, tokens)


@dataclass(frozen=True)
class Planner:
    """Cuts INPUT into batches.

    rows: inputs of a batch at most. padded_tokens: inputs × the longest one's length at most; one is always allowed.
    window: so many lines are planned by themselves, and their batches count from the index of the first on. sorts: by
    length, longest first, so that what does not fit into memory shows immediately. window_tokens: those sorted
    together, if lines are long. by_head: batches have heads, and items that begin alike share batches, if they fill
    one. merges: an item that equals an earlier one is not generated, of the last `MOST_FIRSTS` different ones.
    """

    rows: int | None
    padded_tokens: int | None
    window: int
    sorts: bool = True
    window_tokens: float = math.inf
    by_head: bool = False
    merges: bool = False

    def __call__(self, items: Iterable[Item]) -> Iterator[Batch]:
        """Yields the batches of all items, each as soon as it is complete."""
        firsts: dict[str, Item] = {}
        for window, lines in groupby(items, key=lambda item: (item.line.number - 1) // self.window):
            number = window * self.window
            others: list[Item] = []  # which need no model, and wait for a batch that takes them along
            for batch in self._batches(self._generated(lines, others, firsts)):
                batch.number, batch.others = number, others[:]
                yield batch
                others.clear()
                number += 1
            if others:
                yield Batch([], others, number)

    def _generated(self, items: Iterable[Item], others: list[Item], firsts: dict[str, Item]) -> Iterator[Item]:
        """Yields items to generate for; the rest, except for what is written, goes to `others`."""
        for item in items:
            if self.merges and item.length and not item.is_written:
                item.key = key_of(item)
            if item.key is not None:
                item.first = firsts.get(item.key)
            if item.first is not None:
                item.arrays = None
                others.append(item)
            elif item.length:
                yield item
                if item.key is not None:
                    firsts[item.key] = item
                    if len(firsts) > MOST_FIRSTS:
                        del firsts[next(iter(firsts))]
            elif not item.is_written:
                others.append(item)

    def _batches(self, items: Iterator[Item]) -> Iterator[Batch]:
        """Yields batches without their numbers."""
        waiting: list[Item] = []
        if not self.sorts:
            for batch in self._cut(items):
                head = common_head([*(waiting or batch)[:1], *batch]) if self.by_head else 0
                yield Batch(batch, [], 0, head=head)
                waiting = batch
            return
        tokens = 0
        for item in items:
            waiting.append(item)
            tokens += item.length
            if tokens >= self.window_tokens:
                yield from self._sorted(waiting)
                waiting, tokens = [], 0
        yield from self._sorted(waiting)

    def _sorted(self, items: list[Item]) -> list[Batch]:
        """Returns the batches of items that begin alike, if they fill one; then those of all others."""
        by_beginning: dict[bytes, list[Item]] = {}
        for item in items if self.by_head else ():
            if item.arrays is not None and item.length > LEAST_HEAD:
                by_beginning.setdefault(item.arrays["input_ids"][:LEAST_HEAD].tobytes(), []).append(item)
        sets = [alike for alike in by_beginning.values() if len(alike) >= (self.rows or LEAST_INPUTS)]
        taken = {id(item) for alike in sets for item in alike}
        batches: list[Batch] = []
        for alike in [*sets, [item for item in items if id(item) not in taken]]:
            head = common_head(alike) if self.by_head else 0
            alike.sort(key=lambda item: (repr(item.group), -item.length))
            batches += [Batch(batch, [], 0, ends_window=False, head=head) for batch in self._cut(alike)]
        for batch in batches[-1:]:
            batch.ends_window = True
        return batches

    def _cut(self, items: Iterable[Item]) -> Iterator[list[Item]]:
        """Yields batches: as many items of one group, next to each other, as a batch may have."""
        batch: list[Item] = []
        longest = 0
        for item in items:
            padded_tokens = (len(batch) + 1) * max(longest, item.length)
            is_full = self.padded_tokens is not None and padded_tokens > self.padded_tokens
            if batch and (batch[0].group != item.group or is_full):
                yield batch
                batch, longest = [], 0
            batch.append(item)
            longest = max(longest, item.length)
            if len(batch) == self.rows:
                yield batch
                batch, longest = [], 0
        if batch:
            yield batch


def key_of(item: Item) -> str | None:
    """Returns a digest of what the model takes for an item; None if that is sampled, so that equal items may differ."""
    if item.arrays is None or (isinstance(item.group, list) and dict(item.group).get("do_sample")):
        return None
    digest = hashlib.blake2b(repr(item.group).encode(), digest_size=16)
    for name, array in item.arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def common_head(items: list[Item]) -> int:
    """How many tokens all items begin with, of which each has at least one more; 0 if they are fewer than `LEAST_HEAD`.

    Rounded down, so that windows whose items have a token more in common by chance have the same head.
    """
    rows = [item.arrays["input_ids"] for item in items if item.arrays is not None]
    head = min(map(len, rows), default=1) - 1
    for row in rows[1:]:
        differs = row[:head] != rows[0][:head]
        head = int(differs.argmax()) if differs.any() else head
    lengths = accumulate(repeat(HEAD_GROWTH), operator.mul, initial=float(LEAST_HEAD))
    return int(max(takewhile(lambda length: length <= head, lengths), default=0))


def make_planner(args: BatchConfig, loaded: Loaded, in_order: bool, by_head: bool) -> Planner:
    """Returns the planner that the settings ask for; in_order: batches are to keep the order of INPUT."""
    # batch_tokens counts every row of the batch that generate makes of an input.
    padded_tokens = None if args.batch_tokens is None else max(1, args.batch_tokens // rows_per_input(loaded))
    window, window_tokens = lines_per_window(args), math.inf
    if args.window is None and padded_tokens is not None:
        window_tokens = BATCHES_PER_WINDOW * padded_tokens
    # Recordings of any length: as many frames as that many recordings of the length that Whisper hears at once have.
    if (at_once := getattr(loaded.feature_extractor, "nb_max_frames", None)) is not None:
        window_tokens = min(window_tokens, window * at_once)
    merges = not in_order and not loaded.value("do_sample")
    return Planner(args.bs, padded_tokens, window, not in_order, window_tokens, by_head, merges)


def lines_per_window(args: BatchConfig) -> int:
    """Returns the number of lines that are planned together."""
    return args.window or (LINES_PER_WINDOW if args.bs is None else BATCHES_PER_WINDOW * args.bs)


def with_batch_size(args: BatchConfig, loaded: Loaded, inputs: int | None) -> BatchConfig:
    """`args`, with --bs and --batch_tokens where neither is given: `inputs`, or None for what is chosen here.

    A batch is as large as a part of the memory beside the model allows, counted in the keys and values of its tokens,
    but not larger than what still gains. All memory of the machine counts, not what is free, so that a run that is
    repeated has the same batches.
    """
    if args.bs is not None or args.batch_tokens is not None:
        return args
    if inputs is not None:
        return replace(args, bs=inputs)
    config = loaded.model.config.get_text_config(decoder=True)
    rows = rows_per_input(loaded)
    most_rows, most_tokens = MOST.get(loaded.device.type, MOST["cpu"])
    here = (weight for weight in loaded.model.parameters() if weight.device == loaded.device)
    weights = sum(weight.numel() * weight.element_size() for weight in here)
    memory = max(0, total_memory(loaded.device) - weights) // SHARE
    token = key_value_bytes(config, loaded.model.dtype)
    new_tokens = loaded.value("max_new_tokens") or loaded.value("max_length")
    output = 4 * COPIES_OF_SCORES * config.vocab_size + token * (new_tokens or NEW_TOKENS)
    inputs = max(1, min(max(LEAST_INPUTS, most_rows // rows), memory // (output * rows)))
    return replace(args, bs=inputs, batch_tokens=rows * max(1, min(most_tokens, memory // (token * rows))))


def rows_per_input(loaded: Loaded) -> int:
    """How many rows generate makes of an input: beams or outputs."""
    return max(loaded.value(name) or 1 for name in ("num_beams", "num_return_sequences"))


def key_value_bytes(config: Any, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one token, in all layers of a decoder."""
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
