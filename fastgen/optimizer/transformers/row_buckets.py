"""Rows with a common beginning, and buckets of such groups that take their forwards together, for `token_log_probs`.

Rows may be in any order, and a beginning may end in the prompt or in the completions. Padding on the left belongs to a
row: rows that begin in different columns have nothing in common.

Tests: tests/optimizer/transformers/test_row_buckets.py
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from fastgen.optimizer.decoding.report import PREFILL, LeaveAlone, Reason, check
from fastgen.optimizer.transformers.context_groups import prefix_groups


class Bucket(NamedTuple):
    """Rows of groups of one size, those of a group adjacent.

    split: the number of first columns that are computed once for each group; 0 for rows in no group. The column after
    them has the same token in all rows of a group, so that each token of a beginning predicts a common one. end: the
    number of columns up to the last visible one.
    """

    rows: list[int]
    groups: int
    split: int
    end: int

    @property
    def rows_per_group(self) -> int:
        return len(self.rows) // self.groups

    @property
    def saved(self) -> int:
        """The number of columns that need not be computed."""
        return (len(self.rows) - self.groups) * self.split


@check(PREFILL)
def buckets_sync(input_ids: Tensor, mask: Tensor, gains: Callable[[int], bool]) -> list[Bucket]:
    """Returns buckets that hold all rows of `[rows, length]`. Raises LeaveAlone if nothing is gained.

    gains: returns whether saving so many tokens is worth an additional forward.
    """
    tokens = input_ids.cpu().numpy()
    visible = (mask != 0).cpu().numpy()
    starts = visible.argmax(axis=1)
    ends = visible.shape[1] - visible[:, ::-1].argmax(axis=1)
    if (visible.sum(axis=1) != ends - starts).any():
        raise LeaveAlone([Reason("PADDING_INSIDE", "the mask hides tokens between visible ones, or all of a row")])
    # The first item keeps rows apart that begin in different columns.
    rows = [[start, *row[start:end]] for row, start, end in zip(tokens, starts, ends)]
    groups, alone = [], []
    for numbers, length in prefix_groups(rows, gains):
        group = Bucket(numbers, 1, int(starts[numbers[0]]) + length - 2, int(ends[numbers].max()))
        if len(numbers) > 1 and length > 2 and gains((length - 2) * (len(numbers) - 1)):
            groups.append(group)
        else:
            alone += numbers
    if not groups:
        raise LeaveAlone([Reason("PREFIX_SHORT", "no rows begin with as many equal tokens as sharing them would need")])
    buckets = _merged(groups, gains)
    if alone:
        buckets.append(Bucket(alone, len(alone), 0, int(ends[alone].max())))
    return buckets


def _merged(groups: list[Bucket], gains: Callable[[int], bool]) -> list[Bucket]:
    """Merges groups of one size if what they have in common beyond the shortest beginning is worth no forward."""
    buckets: list[Bucket] = []
    lost = 0
    for group in sorted(groups, key=attrgetter("rows_per_group", "split")):
        merged = buckets[-1] if buckets else group
        lost += (group.split - merged.split) * (len(group.rows) - 1)
        is_alike = merged is not group and merged.rows_per_group == group.rows_per_group
        if not is_alike or (lost and gains(lost)):
            buckets.append(group)
            lost = 0
        else:
            rows = merged.rows + group.rows
            end = max(merged.end, group.end)
            buckets[-1] = Bucket(rows, merged.groups + 1, merged.split, end)
    return buckets
