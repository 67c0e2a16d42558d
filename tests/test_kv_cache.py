"""What a row generates is written in place, and a reorder moves nothing else."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.optimizer.decoding.kv_cache import RowBuffer, SharedKeyValues, sharing_pays
from fastgen.optimizer.decoding.two_part_states import TwoPartStates


def test_tokens_are_written_in_place_until_the_buffer_is_full():
    buffer = RowBuffer(limit=100)
    addresses, written = set(), []
    for step in range(40):
        written.append(torch.full((2, 3, 1, 4), float(step)))
        buffer.append(written[-1])
        addresses.add(buffer.view().data_ptr())
    assert torch.equal(buffer.view(), torch.cat(written, dim=2))
    assert len(addresses) == 2  # it has grown once, at the 34th token


def test_a_buffer_never_grows_past_the_length_that_generation_can_reach():
    buffer = RowBuffer(limit=5)
    for _ in range(5):
        buffer.append(torch.randn(2, 3, 1, 4))
    assert buffer.buffer.shape[2] == 5
    buffer.append(torch.randn(2, 3, 1, 4))  # unless it has to
    assert buffer.view().shape[2] == 6


@settings(max_examples=40, deadline=None)
@given(
    inputs=st.integers(1, 3),
    fan_out=st.integers(1, 4),
    keep_shared=st.booleans(),
    expand_at=st.integers(0, 8),
    seed=st.integers(0, 1000),
)
def test_any_course_of_steps_and_reorders_is_what_concatenation_and_index_select_give(
    inputs, fan_out, keep_shared, expand_at, seed
):
    generator = torch.Generator().manual_seed(seed)
    prompt = [torch.randn(inputs, 2, 3, 4, generator=generator) for _ in range(2)]
    expected = [states.repeat_interleave(fan_out, dim=0) for states in prompt]
    cache = SharedKeyValues(*prompt, fan_out, 8, keep_shared, Counter())
    for step in range(8):
        added = [torch.randn(inputs * fan_out, 2, 1, 4, generator=generator) for _ in range(2)]
        cache.append(*added)
        expected = [torch.cat(pair, dim=2) for pair in zip(expected, added)]
        if step == expand_at and cache.shared is not None:
            cache.expand()
        beams = torch.randint(fan_out, (inputs, fan_out), generator=generator)
        beam_idx = (beams + fan_out * torch.arange(inputs)[:, None]).flatten()
        cache.reorder(beam_idx)
        expected = [states.index_select(0, beam_idx) for states in expected]
        assert cache.length == 4 + step
        for found, wanted in zip(cache.whole(), expected):
            assert torch.equal(found, wanted)


def test_a_shared_prompt_is_stored_once_per_input_and_never_written():
    keys, values = torch.randn(2, 3, 50, 4), torch.randn(2, 3, 50, 4)
    cache = SharedKeyValues(keys, values, 8, 10, True, Counter())
    before = keys.clone()
    for _ in range(3):
        cache.append(torch.randn(16, 3, 1, 4), torch.randn(16, 3, 1, 4))
        cache.reorder(torch.arange(16).flip(0) // 8 * 8)
    assert cache.shared[0].data_ptr() == keys.data_ptr()
    assert torch.equal(cache.shared[0], before)
    assert [type(states) for states in cache.states()] == [TwoPartStates, TwoPartStates]


def test_states_that_were_read_whole_are_repeated_at_the_next_step():
    cache = SharedKeyValues(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), 3, 10, True, Counter())
    cache.append(torch.randn(6, 3, 1, 4), torch.randn(6, 3, 1, 4))
    whole = cache.states()[0] + 0
    assert torch.equal(cache.states()[0], whole)
    assert cache.shared is None and type(cache.states()[0]) is torch.Tensor


def test_states_stand_for_the_content_until_it_changes_and_for_themselves_afterwards():
    cache = SharedKeyValues(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), 3, 10, True, Counter())
    cache.append(torch.randn(6, 3, 1, 4), torch.randn(6, 3, 1, 4))
    old, _ = cache.states()
    assert cache.states()[0] is old
    expected = cache.whole()[0].clone()
    for _ in range(2):
        cache.append(torch.randn(6, 3, 1, 4), torch.randn(6, 3, 1, 4))
        cache.reorder(torch.tensor([1, 1, 0, 5, 3, 3]))
    assert torch.equal(old + 0, expected)
    old.zero_()
    keys, _ = cache.states()
    assert keys is not old and keys.shape[2] == 8 and bool((keys != 0).all())
    keys.mul_(2)
    assert torch.equal(cache.states()[0], keys + 0) and cache.shared is None


def test_sharing_is_for_prompts_that_are_long_enough():
    assert not sharing_pays(torch.empty(1, 12, 64, 64), fan_out=4)
    assert sharing_pays(torch.empty(1, 12, 512, 64), fan_out=4)
    assert sharing_pays(torch.empty(1, 12, 64, 64), fan_out=16)
