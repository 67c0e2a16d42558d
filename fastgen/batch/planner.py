"""Planning of batches: lines of similar length share a batch, up to the sizes in the settings.

A batch costs the steps of its longest output, and for each of its rows the positions of its longest input. So a window
of lines is read ahead, sorted by length and cut. The cuts depend on INPUT and flags only: every run, also a resumed
one, has the same batches with the same numbers.

Tests: tests/batch/test_planner.py, tests/batch/test_default_batch.py, tests/batch/test_heads.py
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator
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
MOST_FIRSTS = 1 << 15  # inputs whose outputs are kept for later, equal inputs
LINES_PER_WINDOW = 1 << 12  # the limit if batches are cut by tokens only
LEAST_HEAD = 32  # common first tokens of inputs: fewer are not kept, and inputs are not batched by them
HEAD_GROWTH = 1.25  # lengths of heads are LEAST_HEAD times a power of it
LEAST_INPUTS = 8  # for any number of beams: FastSeq's default
SHARE = 4  # keys and values get this fraction of the memory; layers and other programs need the rest
# Rows of generate (inputs × beams), and tokens of inputs. CPU: measured with two models; GPU: not measured.
MOST = {"cpu": (256, 1 << 14), "cuda": (1024, 1 << 17)}
COPIES_OF_SCORES = 8  # of a row's scores for every token of the vocabulary, in float32, while a beam is chosen
NEW_TOKENS = 256  # if nothing limits outputs
UNKNOWN_MEMORY = 8 << 30  # if the system does not say
UNKNOWN_VALUES = 32 * 4096  # layers × width of a model of seven billion parameters
LIMITS_OF_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(slots=True)
class Item:
    """A line of INPUT on its way through the stages.

    arrays: the model's inputs, without a batch dimension; None if there is nothing to generate. length: tokens of text
    or frames of sound; 0 if there are none. group: items share a batch only within a group. error: why there are no
    outputs. outputs: as JSON. is_written: whether its record is written, by this run or an earlier one. seed: of its
    samples, instead of the run's seed and the line's number. key: equal for equal items. first: an earlier item with
    this key, whose outputs this one gets. copies: items that wait for the outputs of this one.
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
    """Items for one call of generate, and items that need no call but are written with them.

    number: counts the batches with items, from the first line of their window on. inputs: the items' inputs, padded,
    [B, N, …]. head: the number of first tokens that all items of the batch, and other items of its window, have in
    common; 0 if that is not used.
    """

    items: list[Item]
    skipped: list[Item]
    number: int
    ends_window: bool = True  # the window of items that were sorted by length, longest first
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    head: int = 0


Plan = Callable[[Iterable[Item]], Iterator[Batch]]  # cuts items, in the order of INPUT, into batches


@dataclass(slots=True)
class GeneratedBatch:
    """The model's outputs for some items. The R outputs of an item are adjacent, the best first."""

    items: list[Item]  # B
    sequences: np.ndarray | None = None  # int64 [B * R, T]: generated tokens, without the prompt of a causal LM
    scores: list[float] | None = None  # [B * R], from beam search, if the run has scores
    sounds: list[np.ndarray] | None = None  # B times float32 [S], if the model speaks
    segments: list[list[tuple[float, float, list[int]]]] | None = None  # [B * R] times (start, end, tokens)


@dataclass(frozen=True)
class Planner:
    """Cuts INPUT into batches.

    rows: the most inputs of a batch. padded_tokens: the largest product of inputs and the longest one's length; one
    input is always allowed. window: the number of lines that are planned together; their batches count from the index
    of the first. sorts: whether by length, longest first, so that a lack of memory shows immediately. window_tokens:
    the most tokens that are sorted together. by_head: whether batches have heads, and items with common first tokens
    share batches, if they fill one. merges: whether items that equal one of the last `MOST_FIRSTS` are not generated.
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
            skipped: list[Item] = []  # items without generation, which are written with the next batch
            for batch in self._batches(self._generated(lines, skipped, firsts)):
                batch.number = number
                batch.skipped = skipped[:]
                yield batch
                skipped.clear()
                number += 1
            if skipped:
                yield Batch([], skipped, number)

    def _generated(self, items: Iterable[Item], skipped: list[Item], firsts: dict[str, Item]) -> Iterator[Item]:
        """Yields items to generate for; adds the rest, except written items, to `skipped`."""
        for item in items:
            if self.merges and item.length and not item.is_written:
                item.key = key_of(item)
            if item.key is not None:
                item.first = firsts.get(item.key)
            if item.first is not None:
                item.arrays = None
                skipped.append(item)
            elif item.length:
                yield item
                if item.key is not None:
                    firsts[item.key] = item
                    if len(firsts) > MOST_FIRSTS:
                        del firsts[next(iter(firsts))]
            elif not item.is_written:
                skipped.append(item)

    def _batches(self, items: Iterator[Item]) -> Iterator[Batch]:
        """Yields batches without their numbers."""
        if not self.sorts:
            # A copy of the last batch's first item, which loses its arrays when it is written.
            previous: list[Item] = []
            for batch in self._cut(items):
                head = common_head([*previous, *batch]) if self.by_head else 0
                previous = [replace(batch[0])]
                yield Batch(batch, [], 0, head=head)
            return
        waiting: list[Item] = []
        tokens = 0
        for item in items:
            waiting.append(item)
            tokens += item.length
            if tokens >= self.window_tokens:
                yield from self._sorted(waiting)
                waiting = []
                tokens = 0
        yield from self._sorted(waiting)

    def _sorted(self, items: list[Item]) -> list[Batch]:
        """Returns the batches of items with common first tokens, if they fill one; then those of the rest."""
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
        """Yields runs of items of one group, each at most one batch long."""
        batch: list[Item] = []
        longest = 0
        for item in items:
            padded_tokens = (len(batch) + 1) * max(longest, item.length)
            is_full = self.padded_tokens is not None and padded_tokens > self.padded_tokens
            if batch and (batch[0].group != item.group or is_full):
                yield batch
                batch = []
                longest = 0
            batch.append(item)
            longest = max(longest, item.length)
            if len(batch) == self.rows:
                yield batch
                batch = []
                longest = 0
        if batch:
            yield batch


def key_of(item: Item) -> str | None:
    """Returns a digest of an item's inputs; None if outputs are sampled, so that equal items may differ."""
    if item.arrays is None or (isinstance(item.group, list) and dict(item.group).get("do_sample")):
        return None
    digest = hashlib.blake2b(repr(item.group).encode(), digest_size=16)
    for name, array in item.arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def common_head(items: list[Item]) -> int:
    """Returns how many first tokens all items have in common, less than any has; 0 for fewer than `LEAST_HEAD`.

    It is rounded down, so that windows whose items share a few more tokens by chance have the same head.
    """
    rows = [item.arrays["input_ids"] for item in items if item.arrays is not None]
    head = min(map(len, rows), default=1) - 1
    for row in rows[1:]:
        differs = row[:head] != rows[0][:head]
        head = int(differs.argmax()) if differs.any() else head
    lengths = accumulate(repeat(HEAD_GROWTH), operator.mul, initial=float(LEAST_HEAD))
    return int(max(takewhile(lambda length: length <= head, lengths), default=0))


def make_planner(args: BatchConfig, loaded: Loaded, in_order: bool, by_head: bool) -> Planner:
    """Returns the planner for the settings; in_order: whether batches keep the order of INPUT."""
    # batch_tokens counts all rows that generate makes from an input.
    padded_tokens = None if args.batch_tokens is None else max(1, args.batch_tokens // rows_per_input(loaded))
    window = lines_per_window(args)
    window_tokens = math.inf
    if args.window is None and padded_tokens is not None:
        window_tokens = BATCHES_PER_WINDOW * padded_tokens
    # Long recordings: at most the frames that the same number of recordings of Whisper's window have.
    if (at_once := getattr(loaded.feature_extractor, "nb_max_frames", None)) is not None:
        window_tokens = min(window_tokens, window * at_once)
    merges = not in_order and not loaded.value("do_sample")
    return Planner(args.bs, padded_tokens, window, not in_order, window_tokens, by_head, merges)


def lines_per_window(args: BatchConfig) -> int:
    """Returns the number of lines that are planned together."""
    return args.window or (LINES_PER_WINDOW if args.bs is None else BATCHES_PER_WINDOW * args.bs)


def with_batch_size(args: BatchConfig, loaded: Loaded, inputs: int | None) -> BatchConfig:
    """Returns `args` with --bs and --batch_tokens, if neither is set: `inputs`, or sizes chosen here if that is None.

    The keys and values of a batch's tokens may take a part of the memory that the model leaves, but a batch is not
    larger than is faster. The machine's total memory counts, not the free memory, so that a repeated run has the same
    batches.
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
    """Returns how many rows generate makes from an input: beams or outputs."""
    return max(loaded.value(name) or 1 for name in ("num_beams", "num_return_sequences"))


def key_value_bytes(config: Any, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of one token, in all layers of a decoder."""
    try:
        heads = config.num_attention_heads or 1
        width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
        values = config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width
    except Exception:  # a config without these, or with other ones for each layer
        values = UNKNOWN_VALUES
    return 2 * values * dtype.itemsize


def total_memory(device: torch.device) -> int:
    """Returns the bytes of memory of a GPU, or of this process's machine or container."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    sizes = [UNKNOWN_MEMORY]
    with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in LIMITS_OF_CONTAINERS:
        with suppress(OSError, ValueError):  # "max" means no limit
            sizes.append(int(Path(path).read_text()))
    return min(sizes)
