"""Which dimension of an argument holds its rows, and how rows are taken and repeated."""

from __future__ import annotations

import pytest
import torch

from fastgen.optimizer.transformers import row_groups
from fastgen.optimizer.transformers.row_groups import RowGroups


@pytest.mark.parametrize("axes", [3, 4, 6])
def test_position_ids_of_several_axes_have_their_rows_second(axes):
    position_ids = torch.arange(axes * 6 * 5).view(axes, 6, 5)  # with 6 axes as many axes as rows
    given = row_groups.take({"position_ids": position_ids}, 6, RowGroups([3, 3]).firsts)["position_ids"]
    assert torch.equal(given, position_ids[:, [0, 3]])
    repeated = row_groups.repeat({"position_ids": given}, RowGroups([3, 3]))["position_ids"]
    assert torch.equal(repeated, position_ids[:, [0, 0, 0, 3, 3, 3]])


def test_rows_of_position_ids_are_compared_row_by_row():
    position_ids = torch.arange(3 * 3 * 5).view(3, 3, 5)
    assert not row_groups.groups_are_equal_sync({"position_ids": position_ids}, RowGroups([3]))
    assert row_groups.groups_are_equal_sync({"position_ids": position_ids[:, :1].expand(3, 3, 5)}, RowGroups([3]))
