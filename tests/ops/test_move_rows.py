"""Rows that change places, `csrc/move_rows.cpp`: the result of `index_select`, written in place."""

from contextlib import nullcontext

import pytest
import torch
from hooks import without
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_kernels import torch_threads

from fastgen.ops import simd
from fastgen.ops.beams import move_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 40),
    st.data(),
    st.integers(1, 3),
    st.sampled_from(DTYPES),
)
def test_rows_are_those_of_index_select(layers, rows, heads, length, width, data, threads, dtype):
    """Only some layers, rows and positions of a buffer are moved; the rest stays."""
    buffer = torch.randn(layers + 1, rows + 1, heads, length + 5, width).to(dtype)
    before = buffer.clone()
    beam_idx = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)))
    expected = buffer[1:, :rows, :, 3 : length + 3].index_select(1, beam_idx)
    with torch_threads(threads):
        moved = buffer[1:, :rows, :, 3 : length + 3]
        move_rows([moved], beam_idx.to(data.draw(st.sampled_from((torch.int32, torch.int64)))))
    assert torch.equal(buffer[1:, :rows, :, 3 : length + 3], expected)
    buffer[1:, :rows, :, 3 : length + 3] = before[1:, :rows, :, 3 : length + 3]
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("beam_idx", [[0, 2], [0, -1], [0, 1, 1]])
def test_a_row_that_does_not_exist_is_an_error(beam_idx):
    with pytest.raises((IndexError, RuntimeError)):
        move_rows([torch.randn(1, 2, 3, 4, 5)], torch.tensor(beam_idx))


@pytest.mark.parametrize("has_packed_rows", [True, False])
def test_other_states_are_moved_by_torch(has_packed_rows, monkeypatch):
    monkeypatch.setattr(simd, "function", None)
    states = torch.randn(2, 3, 4, 5, 6)
    states = states if has_packed_rows else states.transpose(3, 4)
    expected = states[:, [2, 0, 0]].clone()
    with without("C++") if has_packed_rows else nullcontext():
        move_rows([states], torch.tensor([2, 0, 0]))
    assert torch.equal(states, expected)
