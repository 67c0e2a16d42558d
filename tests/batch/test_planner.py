"""Batches hold every line once, within their limits, sorted by length inside a window only."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.batch.files import Line
from fastgen.batch.planner import Batch, Item, Planner
from fastgen.batch.text import pad_text


def items_of(lengths: list[int]) -> list[Item]:
    """Returns an item for each length; those of length 0 need no model."""
    return [Item(Line(number, b""), length=length) for number, length in enumerate(lengths, start=1)]


def plan(lengths: list[int], rows: int | None, tokens: int | None, window: int) -> Iterator[Batch]:
    return planner_of(rows, tokens, window)(items_of(lengths))


def planner_of(rows: int | None, tokens: int | None, window: int, **others: Any) -> Planner:
    """Returns a planner; a window of 0 means batches in the order of lines."""
    return Planner(rows, tokens, window or 100, sorts=window > 0, **others)


def numbers(batch: Batch) -> list[int]:
    return [item.line.number for item in batch.items]


def lengths_of(batch: Batch) -> list[int]:
    return [item.length for item in batch.items]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=60),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 30),
    st.integers(0, 12),
)
def test_every_line_is_in_one_batch_within_the_limits(lengths, rows, tokens, window):
    batches = list(plan(lengths, rows, tokens, window))
    generated = [number for batch in batches for number in numbers(batch)]
    skipped = [each.line.number for batch in batches for each in batch.skipped]
    assert sorted(generated + skipped) == list(range(1, len(lengths) + 1))
    assert all(lengths[number - 1] == 0 for number in skipped)
    for batch in batches:
        assert lengths_of(batch) == [lengths[number - 1] for number in numbers(batch)]
        if len(batch.items) > 1:
            assert rows is None or len(batch.items) <= rows
            assert tokens is None or len(batch.items) * max(lengths_of(batch)) <= tokens
    assert [batch.number for batch in batches] == sorted({batch.number for batch in batches})
    if window == 0:
        assert generated == sorted(generated)
    else:
        windows = [(number - 1) // window for number in generated]
        assert windows == sorted(windows)  # no line is moved out of its window


def test_lines_of_one_length_go_together_within_the_limits():
    assert [lengths_of(batch) for batch in plan([3, 9, 3, 9, 3, 9], 3, None, 6)] == [[9, 9, 9], [3, 3, 3]]
    assert [lengths_of(batch) for batch in plan([1] * 12 + [6, 6, 20], None, 12, 15)] == [[20], [6, 6], [1] * 12]


def test_file_order_has_the_batches_of_a_plain_loop():
    batches = list(plan([3, 0, 9, 4, 4, 0, 1], 2, None, 0))
    assert [numbers(batch) for batch in batches] == [[1, 3], [4, 5], [7]]
    assert [[each.line.number for each in batch.skipped] for batch in batches] == [[2], [], [6]]


def test_lines_without_text_are_at_the_end_of_their_window():
    planner = Planner(8, None, 6)
    first, second, third = planner(items_of([4] + [0] * 11 + [5]))
    assert (lengths_of(first), first.number, [each.line.number for each in first.skipped]) == ([4], 0, [2, 3, 4, 5, 6])
    assert (second.items, [each.line.number for each in second.skipped]) == ([], [7, 8, 9, 10, 11, 12])
    assert (lengths_of(third), third.number) == ([5], 12)


def test_written_lines_leave_other_batches_unchanged():
    lengths = [3, 0, 9, 4, 4, 0, 1, 8, 2, 2]
    for window in (0, 4):
        whole = list(plan(lengths, 2, None, window))
        for done in range(len(whole)):
            written = {number for batch in whole[:done] for number in numbers(batch)}
            items = items_of(lengths)
            for item in items:
                item.is_written = item.line.number in written
            planner = planner_of(2, None, window)
            again = list(planner(items))
            expected = [(batch.number, numbers(batch)) for batch in whole[done:] if batch.items]
            assert [
                (batch.number, numbers(batch)) for batch in again if batch.items and not batch.items[0].is_written
            ] == expected


def test_groups_share_no_batch():
    items = items_of([5, 6, 7, 8])
    items[1].group = items[2].group = "long"
    for window, expected in ((0, [[1], [2, 3], [4]]), (4, [[3, 2], [4, 1]])):
        planner = planner_of(4, None, window)
        assert [numbers(batch) for batch in [*planner(items)]] == expected


@pytest.mark.parametrize(("left", "rows"), [(False, [[1, 2, 3], [4, 7, 7]]), (True, [[1, 2, 3], [7, 7, 4]])])
def test_text_is_padded(left, rows):
    padded = pad_text([np.array([1, 2, 3]), np.array([4])], 7, left)
    assert padded["input_ids"].tolist() == rows
    assert torch.equal(padded["attention_mask"], (torch.tensor(rows) != 7).long())


def test_a_window_of_long_lines_has_fewer_lines():
    planner = Planner(2, None, 99, window_tokens=10)
    batches = [*planner(items_of([4, 5, 1, 1, 9, 2, 3]))]
    assert list(map(lengths_of, batches)) == [[5, 4], [1], [9, 1], [3, 2]]
