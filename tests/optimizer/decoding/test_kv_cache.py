"""Shared keys are stored once; generated keys are written in place, and a reorder moves only these."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hooks import without

from fastgen.optimizer.decoding.kv_cache import KVCache
from fastgen.optimizer.decoding.segmented_kv import SegmentedKV
from fastgen.optimizer.decoding.static_kv_cache import StaticKVCache

HEADS, WIDTH, LAYERS = 2, 4, 3


def random_states(rows: int, length: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values; values may be of another width."""
    return torch.randn(rows, HEADS, length, WIDTH), torch.randn(rows, HEADS, length, WIDTH + 1)


def empty_cache(layers: int, rows: int, limit: int) -> KVCache:
    cache = KVCache(rows, 1)
    cache.add_layers([()] * layers, limit)
    return cache


def one_layer(prompt: tuple, rows_per_input: int, limit: int, shares: bool = True) -> KVCache:
    cache = KVCache(len(prompt[0]), rows_per_input)
    cache.add_layers([(prompt,)], limit)
    if not shares:
        cache.repeat_prompt(0)
    return cache


def two_layers() -> KVCache:
    """A cache of one input with two rows, of which each has generated one position."""
    cache = KVCache(1, 2)
    cache.add_layers([(random_states(1, 5),), (random_states(1, 5),)], 10)
    for layer in range(2):
        cache.append(layer, *random_states(2))
    return cache


def test_tokens_are_written_in_place_until_the_buffer_is_full():
    cache = empty_cache(1, 2, limit=100)
    addresses, written = set(), []
    for _ in range(40):
        written.append(random_states(2))
        cache.append(0, *written[-1])
        addresses.add(cache.read(0)[0].data_ptr())
    for held, parts in zip(cache.read(0), zip(*written)):
        assert torch.equal(held, torch.cat(parts, dim=2))
    assert len(addresses) == 2  # it has grown once, at the 34th token


def test_buffers_start_small_and_grow_to_the_calls_length():
    cache = empty_cache(LAYERS, 2, limit=5000)
    cache.append(0, *random_states(2))
    assert cache.generated[0].buffers[0].shape[3] < 100
    cache = empty_cache(1, 2, limit=5)
    for _ in range(5):
        cache.append(0, *random_states(2))
    assert cache.generated[0].buffers[0].shape[3] == 5
    cache.append(0, *random_states(2))  # unless they have to
    assert cache.read(0)[0].shape[2] == 6


@pytest.mark.parametrize("has_kernel", (True, False), ids=("kernel", "torch"))
@pytest.mark.parametrize("limit", (40, 3), ids=("grows", "limit too small"))
@pytest.mark.parametrize("prompt", ("prefix and prompt", "prompt", "repeated prompt"))
@pytest.mark.parametrize("rows_per_input", (1, 3))
@pytest.mark.parametrize("materialize_at", (None, 0, 20))
def test_all_layers_hold_the_concatenation(has_kernel, limit, prompt, rows_per_input, materialize_at):
    with nullcontext() if has_kernel else without("C++"):
        check_concatenation(limit, prompt, rows_per_input, materialize_at)


def check_concatenation(limit: int, prompt: str, rows_per_input: int, materialize_at: int | None) -> None:
    torch.manual_seed(0)
    inputs = 4
    rows = inputs * rows_per_input
    cache, prompts = KVCache(inputs, rows_per_input), []
    for _ in range(LAYERS):
        prompts.append((random_states(1, 2), random_states(inputs, 5))[prompt != "prefix and prompt" :])
    repeat = partial(repeated, rows=rows)
    expected = [[torch.cat(parts, dim=2) for parts in zip(*map(repeat, layer))] for layer in prompts]
    cache.add_layers(prompts, limit)
    cross = [random_states(inputs, 6)]
    crosses = cache.add_layers([tuple(cross)], None)
    if prompt == "repeated prompt":
        for layer in range(LAYERS):
            cache.repeat_prompt(layer)
    expected.append(repeat(cross[0]))
    for step in range(38):
        for layer in range(LAYERS):
            added = random_states(inputs * rows_per_input)
            cache.append(layer, *added)
            expected[layer] = [torch.cat(pair, dim=2) for pair in zip(expected[layer], added)]
        if step == materialize_at:
            assert torch.equal(cache.read(0)[0] + 0, expected[0][0])
        for layer in (*range(LAYERS), *crosses):
            assert all(map(torch.equal, cache.copy(layer), expected[layer]))
            assert cache.length(layer) == expected[layer][0].shape[2]
        batch_index = torch.arange(inputs)
        if step in (10, 30):
            batch_index = torch.tensor([0, 2, 3][: inputs - 1])
        order = torch.randint(rows_per_input, (len(batch_index), rows_per_input))
        order = (batch_index[:, None] * rows_per_input + order).flatten()
        if len(batch_index) < inputs:
            cache.compact(batch_index, order)
            inputs = len(batch_index)
        else:
            cache.reorder(order)
        expected = [[states.index_select(0, order) for states in layer] for layer in expected]


def repeated(pair: tuple, rows: int) -> list[torch.Tensor]:
    return [states.repeat_interleave(rows // len(states), dim=0) for states in pair]


def test_a_reorder_does_not_move_the_prompts_keys():
    cache = one_layer(random_states(2, 3), 3, 10, shares=False)
    before = cache.read(0)[0].clone()
    cache.append(0, *(torch.arange(6.0).view(6, 1, 1, 1).expand(6, HEADS, 1, WIDTH + more) for more in (0, 1)))
    buffer = cache.generated[0].buffers[0]
    cache.reorder(torch.tensor([4, 1, 2, 3, 4, 5]))  # row 4 is another input's: only its generated key moves
    assert cache.generated[0].buffers[0] is buffer and torch.equal(buffer[0, :, :, :3], before)
    assert buffer[0, :, 0, 3, 0].tolist() == [4, 1, 2, 3, 4, 5]


def test_one_layer_can_be_moved_alone():
    cache = empty_cache(2, 2, 10)
    for layer in range(2):
        cache.append(layer, *random_states(2))
    before = [cache.copy(layer)[0] for layer in range(2)]
    cache.reorder(torch.tensor([1, 1]), 0)
    assert torch.equal(cache.read(0)[0], before[0][[1, 1]]) and torch.equal(cache.read(1)[0], before[1])


def test_a_prompt_is_stored_once_per_input_and_never_written():
    keys, values = random_states(2, 50)
    cache = one_layer((keys, values), 8, 10)
    before = keys.clone()
    for _ in range(3):
        cache.append(0, *random_states(16))
        cache.reorder(torch.arange(16).flip(0) // 8 * 8)
    assert cache.prompts[0][0][0].data_ptr() == keys.data_ptr()
    assert torch.equal(cache.prompts[0][0][0], before)
    assert [type(states) for states in cache.read(0)] == [SegmentedKV, SegmentedKV]


def test_a_materialized_layer_stays_stored_for_each_row():
    cache = one_layer(random_states(2, 5), 3, 10)
    cache.append(0, *random_states(6))
    whole = cache.read(0)[0] + 0
    assert torch.equal(cache.read(0)[0], whole)
    assert not cache.prompts[0] and type(cache.read(0)[0]) is torch.Tensor


def test_read_views_are_invalidated_by_append():
    cache = one_layer(random_states(2, 5), 3, 10)
    cache.append(0, *random_states(6))
    old, _ = cache.read(0)
    assert cache.read(0)[0] is old
    expected = cache.copy(0)[0].clone()
    for _ in range(2):
        cache.append(0, *random_states(6))
        cache.reorder(torch.tensor([1, 1, 0, 5, 3, 3]))
    assert torch.equal(old + 0, expected)
    old.zero_()
    keys, _ = cache.read(0)
    assert keys is not old and keys.shape[2] == 8 and bool((keys != 0).all())
    keys.mul_(2)
    assert torch.equal(cache.read(0)[0], keys + 0) and not cache.prompts[0]


def test_a_materialized_layer_keeps_writes_while_others_move():
    cache = two_layers()
    cache.read(1)[0].zero_()
    buffer = cache.generated[0].buffers[0]
    cache.reorder(torch.tensor([1, 0]))
    assert not cache.read(1)[0].any() and len(cache.generated) == 2
    cache.read(0)
    cache.append(0, *random_states(2))
    assert not cache.read(1)[0].any() and cache.length(0) == 7 and cache.length(1) == 6
    assert cache.generated[0].buffers[0] is not buffer or hasattr(torch._C, "_storage_Use_Count")


def test_buffers_are_moved_in_place_while_nobody_else_holds_them():
    cache = two_layers()
    buffer = cache.generated[0].buffers[0]
    for layer in range(2):
        cache.read(layer)
    cache.reorder(torch.tensor([1, 0]))
    moved = cache.generated[0]
    assert (moved.buffers[0] is buffer) == hasattr(torch._C, "_storage_Use_Count")  # torch 2.4 cannot tell
    held, buffer = moved.read(0)[0], moved.buffers[0]
    cache.reorder(torch.tensor([1, 0]))
    assert moved.buffers[0] is not buffer and torch.equal(held, buffer[0, :, :, :1])


@pytest.mark.parametrize("drop_last", (False, True))
def test_a_static_cache_takes_over_some_inputs_of_another(drop_last):
    cache = KVCache(3, 2)
    cache.add_layers([(random_states(1, 2), random_states(3, 5))] * 2, 10)
    cache.add_layers([(random_states(3, 6),)], None)
    for layer in range(2):
        cache.append(layer, *random_states(6, 4))
    batch_index, rows = torch.tensor([0, 2]), torch.tensor([1, 1, 4, 5])
    content = cache.content().of_rows(batch_index, rows)
    content = content.without_last() if drop_last else content
    static = StaticKVCache(content.spec(10))
    static.load(content)
    assert static.rows == 4 and static.rows_per_input == 2
    for layer, length in ((0, 11 - drop_last), (1, 11 - drop_last), (2, 6)):
        expected = [states.index_select(0, rows)[:, :, :length] for states in cache.copy(layer)]
        grown = KVCache.of(static.content(), 20)
        for cache_of_two in (static, grown):
            assert all(map(torch.equal, cache_of_two.copy(layer), expected)) and cache_of_two.length(layer) == length
