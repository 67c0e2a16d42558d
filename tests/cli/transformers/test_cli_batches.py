"""Batches hold every line once, within their limits, sorted by length inside of a window only."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.cli.transformers.stages.batches import MOST_NOT_GENERATED, Limits, Planner, pad_text
from fastgen.cli.transformers.stages.items import Batch, Line, Prepared

COLLATE = pad_text(pad_token_id=7, left=False)


def lines_of(lengths: list[int]) -> tuple[list[Line], list[Prepared]]:
    """A line for each length; nothing to generate for those of length 0."""
    lines = [Line(number, b"") for number in range(1, len(lengths) + 1)]
    arrays = [Prepared({"input_ids": np.full(n, 1)}) if n else Prepared() for n in lengths]
    return lines, arrays


def plan(lengths: list[int], limits: Limits, window: int, chunk: int = 3) -> Iterator[Batch]:
    planner = Planner(limits, window, COLLATE)
    lines, prepared = lines_of(lengths)
    for start in range(0, len(lines), chunk):
        yield from planner.add(lines[start : start + chunk], prepared[start : start + chunk])
    yield from planner.rest()


def numbers(batch: Batch) -> list[int]:
    return [line.number for line in batch.lines]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=60),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 30),
    st.integers(0, 12),
)
def test_every_line_is_in_one_batch_within_the_limits(
    lengths: list[int], rows: int | None, cells: int | None, window: int
) -> None:
    batches = list(plan(lengths, Limits(rows, cells), window))
    generated = [number for batch in batches for number in numbers(batch)]
    skipped = [each.line.number for batch in batches for each in batch.not_generated]
    assert sorted(generated + skipped) == list(range(1, len(lengths) + 1))
    assert all(lengths[number - 1] == 0 for number in skipped)
    for batch in batches:
        assert batch.lengths == [lengths[number - 1] for number in numbers(batch)]
        if len(batch) > 1:
            assert rows is None or len(batch) <= rows
            assert cells is None or len(batch) * max(batch.lengths) <= cells
    if window == 0:
        assert generated == sorted(generated)
    else:
        places = {number: place for place, number in enumerate(n for n in range(1, len(lengths) + 1) if lengths[n - 1])}
        windows = [places[number] // window for number in generated]
        assert windows == sorted(windows)  # no line is moved out of its window


def test_lines_of_one_length_go_together() -> None:
    batches = list(plan([3, 9, 3, 9, 3, 9], Limits(3, None), 6))
    assert [batch.lengths for batch in batches] == [[9, 9, 9], [3, 3, 3]]


def test_file_order_makes_the_batches_of_a_plain_loop() -> None:
    batches = list(plan([3, 0, 9, 4, 4, 0, 1], Limits(2, None), 0))
    assert [numbers(batch) for batch in batches] == [[1, 3], [4, 5], [7]]
    assert [[each.line.number for each in batch.not_generated] for batch in batches] == [[2], [], [6]]


def test_tokens_limit_a_batch_of_any_number_of_rows() -> None:
    batches = list(plan([1] * 12 + [6, 6, 20], Limits(None, 12), 15))
    assert [batch.lengths for batch in batches] == [[20], [6, 6], [1] * 12]


def test_lines_without_text_do_not_pile_up() -> None:
    planner = Planner(Limits(8, None), 99, COLLATE)
    lines, prepared = lines_of([4] + [0] * MOST_NOT_GENERATED)
    (batch,) = planner.add(lines, prepared)
    assert (len(batch), len(batch.not_generated)) == (1, MOST_NOT_GENERATED)


@pytest.mark.parametrize(("left", "rows"), [(False, [[1, 2, 3], [4, 7, 7]]), (True, [[1, 2, 3], [7, 7, 4]])])
def test_text_is_padded(left: bool, rows: list[list[int]]) -> None:
    padded = pad_text(7, left)([{"input_ids": np.array([1, 2, 3])}, {"input_ids": np.array([4])}])
    assert padded["input_ids"].tolist() == rows
    assert torch.equal(padded["attention_mask"], (torch.tensor(rows) != 7).long())


def test_a_window_has_fewer_lines_where_they_are_long() -> None:
    planner = Planner(Limits(2, None), 99, COLLATE, window_cells=10)
    lines, prepared = lines_of([4, 5, 1, 1, 9, 2, 3])
    batches = [*planner.add(lines, prepared), *planner.rest()]
    assert [batch.lengths for batch in batches] == [[5, 4], [1], [9, 1], [3, 2]]
