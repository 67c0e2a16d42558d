"""From prepared lines to padded batches: lines of about the same length together, none larger than asked for.

A batch costs as many steps as its longest output and as many positions as its longest input for each of its rows, so
lines of one length go together: read ahead a window of lines, sort, cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fastgen.cli.transformers.stages.audio import collate_long
from fastgen.cli.transformers.stages.items import Batch, Line, NotGenerated, Prepared

Arrays = dict[str, np.ndarray]
# Lines that need no model wait for a batch that takes them along, but no more than this many: then it is made.
MOST_NOT_GENERATED = 1 << 14


@dataclass(frozen=True)
class _Waiting:
    line: Line
    length: int
    arrays: Arrays
    is_long: bool


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
    """Takes lines in the order of INPUT and gives batches.

    window: how many lines are sorted by length, longest first: what does not fit into memory shows at once. 0: batches
        of lines as they stand in INPUT.
    collate: pads the arrays of some lines to tensors; those of long recordings are padded here.
    window_cells: the tokens of sorted lines, of which there are fewer where they are long.
    """

    def __init__(
        self,
        limits: Limits,
        window: int,
        collate: Callable[[list[Arrays]], dict[str, torch.Tensor]],
        window_cells: int | None = None,
    ) -> None:
        self._window_cells = math.inf if window_cells is None else window_cells
        self._cells = 0
        self._limits = limits
        self._window = window
        self._collate = collate
        self._waiting: list[_Waiting] = []
        self._longest = 0
        self._not_generated: list[NotGenerated] = []

    def add(self, lines: list[Line], prepared: list[Prepared]) -> Iterator[Batch]:
        """The batches that are complete with these lines."""
        for line, each in zip(lines, prepared, strict=True):
            if each.arrays is None:
                self._not_generated.append(NotGenerated(line, each.error))
                if len(self._not_generated) >= MOST_NOT_GENERATED:
                    yield from self.rest()
                continue
            waiting = _Waiting(line, _length(each.arrays), each.arrays, each.is_long)
            if self._window == 0:
                yield from self._in_order(waiting)
            else:
                self._waiting.append(waiting)
                self._cells += waiting.length
                if len(self._waiting) >= self._window or self._cells >= self._window_cells:
                    yield from self._sorted()

    def rest(self) -> Iterator[Batch]:
        """What there is, however little: at the end of INPUT."""
        if self._waiting:
            yield from self._sorted() if self._window else [self._batch(self._taken())]
        if self._not_generated:
            yield self._batch([])

    def _in_order(self, waiting: _Waiting) -> Iterator[Batch]:
        fits = self._limits.allow(len(self._waiting) + 1, max(self._longest, waiting.length))
        if not fits or (self._waiting and self._waiting[0].is_long != waiting.is_long):
            yield self._batch(self._taken())
        self._longest = max(self._longest, waiting.length)
        self._waiting.append(waiting)
        if len(self._waiting) == self._limits.rows:
            yield self._batch(self._taken())

    def _sorted(self) -> Iterator[Batch]:
        rows = sorted(self._taken(), key=lambda waiting: (not waiting.is_long, -waiting.length))
        start = 0
        for stop in range(1, len(rows) + 1):
            fits = stop < len(rows) and self._limits.allow(stop + 1 - start, rows[start].length)
            if not fits or rows[stop].is_long != rows[start].is_long:
                batch = self._batch(rows[start:stop])
                batch.ends_window = stop == len(rows)
                yield batch
                start = stop

    def _taken(self) -> list[_Waiting]:
        taken, self._waiting, self._longest, self._cells = self._waiting, [], 0, 0
        return taken

    def _batch(self, rows: list[_Waiting]) -> Batch:
        not_generated, self._not_generated = self._not_generated, []
        is_long = bool(rows) and rows[0].is_long
        collate = collate_long if is_long else self._collate
        inputs = collate([row.arrays for row in rows]) if rows else {}
        lines, lengths = [row.line for row in rows], [row.length for row in rows]
        return Batch(lines, lengths, inputs, not_generated, is_long=is_long)


def _length(arrays: Arrays) -> int:
    """Tokens of text; frames of sound, of which an attention mask counts those that are not padding."""
    if "attention_mask" in arrays:
        return int(arrays["attention_mask"].sum())
    first = next(iter(arrays.values()))
    return max(first.shape)


def pad_text(pad_token_id: int, left: bool) -> Callable[[list[Arrays]], dict[str, torch.Tensor]]:
    """A function that pads token ids [N] to input_ids [B, N], with the attention_mask that tells them from padding."""

    def collate(arrays: list[Arrays]) -> dict[str, torch.Tensor]:
        rows = [each["input_ids"] for each in arrays]
        shape = len(rows), max(map(len, rows))
        input_ids = np.full(shape, pad_token_id, np.int64)
        attention_mask = np.zeros(shape, np.int64)
        for number, row in enumerate(rows):
            columns = slice(shape[1] - len(row), None) if left else slice(len(row))
            input_ids[number, columns] = row
            attention_mask[number, columns] = 1
        return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(attention_mask)}

    return collate
