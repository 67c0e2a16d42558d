"""Rows with a common beginning are found, and groups of one size are merged."""

from __future__ import annotations

import pytest
import torch

from fastgen.optimizer.decoding.report import LeaveAlone
from fastgen.optimizer.transformers.prefix_groups import Bucket, buckets_sync


def buckets(rows: list[str], gains=bool) -> list[Bucket]:
    """Returns the buckets of rows of letters, in which dots are padding."""
    input_ids = torch.tensor([[ord(letter) for letter in row] for row in rows])
    return buckets_sync(input_ids, (input_ids != ord(".")).long(), gains)


def test_equal_prompts_are_found_in_any_order():
    assert buckets(["abcdxy", "efghxy", "abcdyx", "efghyx"]) == [Bucket([0, 2, 1, 3], 2, 3, 6)]


def test_ragged_groups_are_in_buckets_of_their_own():
    rows = ["abcdxy", "efghxy", "abcdyx", "efghyx", "abcdzz", "uvwxyz"]
    assert buckets(rows) == [Bucket([1, 3], 1, 3, 6), Bucket([0, 2, 4], 1, 3, 6), Bucket([5], 1, 0, 6)]


def test_groups_are_merged_unless_that_loses_too_much():
    rows = ["abcdefgx", "abcdefgy", "ijklmnxx", "ijklmnyy"]
    assert buckets(rows) == [Bucket([2, 3], 1, 5, 8), Bucket([0, 1], 1, 6, 8)]
    assert buckets(rows, lambda tokens: tokens > 1) == [Bucket([2, 3, 0, 1], 2, 5, 8)]


def test_padding_on_the_left_is_no_beginning():
    assert buckets(["....axbc", "....aybc", "....azbd", "...qaxbc", "abcdaxyz", "abcdayxz"]) == [
        Bucket([4, 5], 1, 4, 8),
        Bucket([0, 1, 2, 3], 4, 0, 8),
    ]
    assert buckets(["..abcdxy", "..abcdyx", "abcdxy..", "abcdyz.."]) == [
        Bucket([2, 3], 1, 3, 6),
        Bucket([0, 1], 1, 5, 8),
    ]


def test_columns_end_with_the_last_visible_one():
    assert buckets(["abcdx...", "abcdyz.."]) == [Bucket([0, 1], 1, 3, 6)]


@pytest.mark.parametrize(
    "rows, code",
    (
        (["abcd", "efgh"], "PREFIX_SHORT"),
        (["abcd", "axyz"], "PREFIX_SHORT"),
        (["ab.dx", "ab.dy"], "PADDING_INSIDE"),
        (["abcdx", "....."], "PADDING_INSIDE"),
    ),
)
def test_nothing_is_shared_for_a_reason(rows, code):
    with pytest.raises(LeaveAlone) as left_alone:
        buckets(rows)
    assert [reason.code for reason in left_alone.value.reasons] == [code]
