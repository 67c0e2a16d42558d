"""What every row produced at every step, for rows that change places: written once and never moved.

A table of ancestors is moved instead: the value that belongs to row i at step s lies in row
`ancestors[i, s]` of step s.

Tests: tests/optimizer/fairseq/test_fairseq_caches.py
"""

from __future__ import annotations

import torch
from torch import Tensor


class StepHistory:
    """Values `[rows, width]` of up to `steps` steps, for at most `rows` rows."""

    def __init__(self, steps: int, values: Tensor, dtype: torch.dtype) -> None:
        rows, width = values.shape
        self.values = torch.empty((steps, rows, width), dtype=dtype, device=values.device)
        self.ancestors = torch.zeros((rows, steps), dtype=torch.int64, device=values.device)
        self.places = torch.arange(rows, device=values.device)

    def write(self, step: int, values: Tensor) -> None:
        """Values `[rows, width]` of the rows as they lie at this step."""
        rows = values.shape[0]
        self.values[step, :rows] = values
        self.ancestors[:, step] = self.places[:rows]

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row `order[i]` (int64) was; there may be fewer rows than before."""
        self.ancestors = self.ancestors.index_select(0, order)

    def read(self, rows: Tensor, steps: int) -> Tensor:
        """What belongs to these rows (int64) in the first `steps` steps, `[len(rows), width, steps]`."""
        ancestors = self.ancestors.index_select(0, rows)[:, :steps].t()  # [steps, rows]
        steps_of = torch.arange(steps, device=rows.device).unsqueeze(1)
        return self.values[steps_of, ancestors].permute(1, 2, 0).contiguous()
