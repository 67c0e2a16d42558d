"""What rows share is kept once; what they generate is written in place, and a reorder moves nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.optimizer.decoding import decoding_cache
from fastgen.optimizer.decoding.decoding_cache import DecodingCache
from fastgen.optimizer.decoding.gain import sharing_pays
from fastgen.optimizer.decoding.layer_states import LayerStates
from fastgen.optimizer.decoding.segmented_kv import SegmentedKV

HEADS, WIDTH, LAYERS = 2, 4, 3


def random_states(rows: int, length: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values; values may be of another width."""
    return torch.randn(rows, HEADS, length, WIDTH), torch.randn(rows, HEADS, length, WIDTH + 1)


def one_layer(keys: torch.Tensor, values: torch.Tensor, fan_out: int, limit: int, kept: bool = True) -> LayerStates:
    cache = DecodingCache(1, fan_out, limit)
    cache.shared[0] = (keys, values)
    if not kept:
        cache.repeat_shared(0)
    return LayerStates(cache, 0, torch.arange(len(keys)).repeat_interleave(fan_out), Counter())


def two_layers() -> tuple[DecodingCache, list[LayerStates]]:
    """A cache of one input with two rows, of which each has one position of its own."""
    cache = DecodingCache(2, 2, 10)
    layers = []
    for layer in range(2):
        cache.shared[layer] = random_states(1, 5)
        layers.append(LayerStates(cache, layer, torch.zeros(2, dtype=torch.int64), Counter()))
        layers[-1].append(*random_states(2))
    return cache, layers


def test_tokens_are_written_in_place_until_the_buffer_is_full():
    cache = DecodingCache(1, 2, limit=100)
    addresses, written = set(), []
    for _ in range(40):
        written.append(random_states(2))
        cache.append(0, *written[-1])
        addresses.add(cache.own(0)[0].data_ptr())
    for found, parts in zip(cache.own(0), zip(*written)):
        assert torch.equal(found, torch.cat(parts, dim=2))
    assert len(addresses) == 2  # it has grown once, at the 34th token


def test_buffers_start_small_and_never_grow_past_the_length_that_generation_can_reach():
    cache = DecodingCache(LAYERS, 1, limit=5000)
    cache.append(0, *random_states(2))
    assert cache.buffers[0].shape[3] < 100
    cache = DecodingCache(1, 1, limit=5)
    for _ in range(5):
        cache.append(0, *random_states(2))
    assert cache.buffers[0].shape[3] == 5
    cache.append(0, *random_states(2))  # unless they have to
    assert cache.own(0)[0].shape[2] == 6


@pytest.mark.parametrize("looked_at", (0, 1 << 30), ids=("only rows that move", "all rows"))
@pytest.mark.parametrize("limit", (40, 3), ids=("grows", "limit too small"))
@pytest.mark.parametrize("kept", (True, False), ids=("shared", "repeated"))
def test_all_layers_hold_what_concatenation_and_index_select_give(monkeypatch, looked_at, limit, kept):
    monkeypatch.setattr(decoding_cache, "MIN_ELEMENTS_TO_LOOK_AT", looked_at)
    torch.manual_seed(0)
    inputs, fan_out = 4, 3
    cache, expected = DecodingCache(LAYERS, fan_out, limit), []
    for layer in range(LAYERS):
        cache.shared[layer] = random_states(inputs, 5)
        expected.append([states.repeat_interleave(fan_out, dim=0) for states in cache.shared[layer]])
        if not kept:
            cache.repeat_shared(layer)
    for step in range(38):
        for layer in range(LAYERS):
            added = random_states(inputs * fan_out)
            cache.append(layer, *added)
            expected[layer] = [torch.cat(pair, dim=2) for pair in zip(expected[layer], added)]
            found = cache.own(layer)
            if kept:
                shared = [states.repeat_interleave(fan_out, dim=0) for states in cache.shared[layer]]
                found = [torch.cat(pair, dim=2) for pair in zip(shared, found)]
            assert all(map(torch.equal, found, expected[layer]))
        places = torch.arange(inputs)
        if step in (10, 30):
            places = torch.tensor([0, 2, 3][: inputs - 1])
        order = (places[:, None] * fan_out + torch.randint(fan_out, (len(places), fan_out))).flatten()
        if len(places) < inputs:
            cache.keep(places, order)
            inputs = len(places)
        else:
            cache.reorder(order)
        expected = [[states.index_select(0, order) for states in layer] for layer in expected]


def test_a_reorder_moves_nothing_that_is_equal_in_all_rows_of_an_input():
    cache = DecodingCache(1, 3, 10)
    cache.shared[0] = random_states(2, 3)
    cache.repeat_shared(0)
    before = cache.own(0)[0].clone()
    cache.append(0, *(torch.arange(6.0).view(6, 1, 1, 1).expand(6, HEADS, 1, WIDTH + more) for more in (0, 1)))
    buffer = cache.buffers[0]
    cache.reorder(torch.tensor([4, 1, 2, 3, 4, 5]))  # of another input, to see that the first three stay
    assert cache.buffers[0] is buffer and torch.equal(buffer[0, :, :, :3], before)
    assert buffer[0, :, 0, 3, 0].tolist() == [4, 1, 2, 3, 4, 5]


def test_one_layer_can_be_moved_alone():
    cache = DecodingCache(2, 2, 10)
    for layer in range(2):
        cache.append(layer, *random_states(2))
    before = [cache.own(layer)[0].clone() for layer in range(2)]
    cache.reorder(torch.tensor([1, 1]), slice(0, 1))
    assert torch.equal(cache.own(0)[0], before[0][[1, 1]]) and torch.equal(cache.own(1)[0], before[1])


@settings(max_examples=40, deadline=None)
@given(
    inputs=st.integers(1, 3),
    fan_out=st.integers(1, 4),
    kept=st.booleans(),
    expand_at=st.integers(0, 8),
    seed=st.integers(0, 1000),
)
def test_any_course_of_steps_of_a_layer_is_what_concatenation_and_index_select_give(
    inputs, fan_out, kept, expand_at, seed
):
    torch.manual_seed(seed)
    prompt = random_states(inputs, 3)
    expected = [states.repeat_interleave(fan_out, dim=0) for states in prompt]
    layer = one_layer(*prompt, fan_out, 8, kept)
    for step in range(8):
        added = random_states(inputs * fan_out)
        layer.append(*added)
        expected = [torch.cat(pair, dim=2) for pair in zip(expected, added)]
        if step == expand_at and layer.shared is not None:
            layer.expand()
        beam_idx = (torch.randint(fan_out, (inputs, fan_out)) + fan_out * torch.arange(inputs)[:, None]).flatten()
        layer.reorder(beam_idx)
        expected = [states.index_select(0, beam_idx) for states in expected]
        assert layer.length == 4 + step
        assert all(map(torch.equal, layer.whole(), expected))


def test_a_shared_prompt_is_stored_once_per_input_and_never_written():
    keys, values = random_states(2, 50)
    layer = one_layer(keys, values, 8, 10)
    before = keys.clone()
    for _ in range(3):
        layer.append(*random_states(16))
        layer.reorder(torch.arange(16).flip(0) // 8 * 8)
    assert layer.shared[0].data_ptr() == keys.data_ptr()
    assert torch.equal(layer.shared[0], before)
    assert [type(states) for states in layer.states()] == [SegmentedKV, SegmentedKV]


def test_states_that_were_read_whole_are_repeated_at_the_next_step():
    layer = one_layer(*random_states(2, 5), 3, 10)
    layer.append(*random_states(6))
    whole = layer.states()[0] + 0
    assert torch.equal(layer.states()[0], whole)
    assert layer.shared is None and type(layer.states()[0]) is torch.Tensor


def test_states_stand_for_the_content_until_it_changes_and_for_themselves_afterwards():
    layer = one_layer(*random_states(2, 5), 3, 10)
    layer.append(*random_states(6))
    old, _ = layer.states()
    assert layer.states()[0] is old
    expected = layer.whole()[0].clone()
    for _ in range(2):
        layer.append(*random_states(6))
        layer.reorder(torch.tensor([1, 1, 0, 5, 3, 3]))
    assert torch.equal(old + 0, expected)
    old.zero_()
    keys, _ = layer.states()
    assert keys is not old and keys.shape[2] == 8 and bool((keys != 0).all())
    keys.mul_(2)
    assert torch.equal(layer.states()[0], keys + 0) and layer.shared is None


def test_a_layer_that_was_read_whole_keeps_what_was_written_while_others_move():
    cache, layers = two_layers()
    layers[1].states()[0].zero_()
    buffer = cache.buffers[0]
    layers[0].reorder(torch.tensor([1, 0]))
    layers[1].reorder(torch.tensor([1, 0]))
    assert not layers[1].states()[0].any() and layers[1].cache is not cache
    layers[0].states()
    layers[0].append(*random_states(2))
    assert cache.buffers[0] is not buffer  # what was read whole still held it


def test_buffers_are_moved_in_place_while_nobody_else_holds_them():
    cache, layers = two_layers()
    buffer = cache.buffers[0]
    for layer in layers:
        layer.states()
    for layer in layers:
        layer.reorder(torch.tensor([1, 0]))
    assert (cache.buffers[0] is buffer) == hasattr(torch._C, "_storage_Use_Count")  # torch 2.4 does not tell who holds
    held, buffer = cache.own(0)[0], cache.buffers[0]
    cache.reorder(torch.tensor([1, 0]))
    assert cache.buffers[0] is not buffer and torch.equal(held, buffer[0, :, :, :1])


def test_sharing_is_for_prompts_that_are_long_enough():
    assert not sharing_pays(torch.empty(1, 12, 64, 64), fan_out=4)
    assert sharing_pays(torch.empty(1, 12, 512, 64), fan_out=4)
    assert sharing_pays(torch.empty(1, 12, 64, 64), fan_out=16)
