"""Row states: what layers of linear attention and state spaces remember of a row's tokens, at fixed addresses.

    tensors     one per state, `[rows, …]`: views of buffers `[states, rows, …]`, one per shape and dtype
    save ──> a run ──> commit      the run counts
              └──────> rewind      the run is discarded: the tensors hold again what they held before it

A step overwrites all of a state, but only one position of keys. So a run that may be discarded (a capture, its
comparison, a replay that may diverge) is preceded by `save`, which copies. This module knows no host library.

Tests: tests/optimizer/decoding/test_row_states.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.ops.beams import move_rows

StateSpec = tuple[tuple[int, ...], torch.dtype, torch.device]  # sizes, with those of rows first


def specs_of(states: Sequence[Tensor]) -> tuple[StateSpec, ...]:
    """Returns the sizes, dtypes and devices of states."""
    return tuple((tuple(state.shape), state.dtype, state.device) for state in states)


class RowStates:
    """States at fixed addresses, see the drawing above; there may be none. tensors: in the order of the specs."""

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self._buffers: list[Tensor] = []
        views: dict[StateSpec, list[Tensor]] = {}
        for spec, count in Counter(specs).items():
            sizes, dtype, device = spec
            self._buffers.append(torch.empty((count, *sizes), dtype=dtype, device=device))
            views[spec] = list(self._buffers[-1].unbind()[::-1])
        self.tensors: list[Tensor] = [views[spec].pop() for spec in specs]
        self._saved: list[Tensor] = []

    @property
    def can_rewind(self) -> bool:
        """Whether the content before the present run is known."""
        return len(self._saved) == len(self._buffers)

    def load(self, states: Sequence[Tensor]) -> None:
        """Copies these states."""
        for tensor, state in zip(self.tensors, states, strict=True):
            tensor.copy_(state)
        self._saved = []

    def save(self) -> None:
        """Keeps the content for `rewind`."""
        self._saved = [buffer.clone() for buffer in self._buffers]

    def rewind(self) -> None:
        """Restores the content of the last `save`, unless there was none since the last run that counts."""
        for buffer, saved in zip(self._buffers, self._saved):
            buffer.copy_(saved)

    def commit(self) -> None:
        """Counts the run since `save`."""
        self._saved = []

    def reorder(self, beam_idx: Tensor) -> None:
        """Overwrites row i with row `beam_idx[i]`."""
        if self._buffers:
            move_rows([buffer.flatten(2)[:, :, None, None] for buffer in self._buffers], beam_idx)


def rows_of_states(states: Sequence[Any], rows: Tensor) -> list[Tensor]:
    """Returns copies of these rows (int64) of each state."""
    return [state.index_select(0, rows.to(state.device)) for state in states]
