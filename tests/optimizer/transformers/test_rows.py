"""Which dimension of an argument holds its rows, and how rows are taken and repeated."""

from __future__ import annotations

import pytest
import torch

from fastgen.optimizer.transformers import rows


@pytest.mark.parametrize("axes", [3, 4, 6])
def test_position_ids_of_several_axes_have_their_rows_second(axes):
    position_ids = torch.arange(axes * 6 * 5).view(axes, 6, 5)  # with 6 axes as many axes as rows
    given = rows.one_per_group({"position_ids": position_ids}, rows.Groups([3, 3]))["position_ids"]
    assert torch.equal(given, position_ids[:, [0, 3]])
    assert torch.equal(rows.repeat("position_ids", given, rows.Groups([3, 3])), position_ids[:, [0, 0, 0, 3, 3, 3]])


def test_rows_of_position_ids_are_compared_row_by_row():
    position_ids = torch.arange(3 * 3 * 5).view(3, 3, 5)
    assert not rows.groups_are_equal_sync({"position_ids": position_ids}, rows.Groups([3]))
    assert rows.groups_are_equal_sync({"position_ids": position_ids[:, :1].expand(3, 3, 5)}, rows.Groups([3]))
