"""Attention of many queries, `csrc/flash_attention.cpp`: the numbers of torch, for any number of rows and threads."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from attention_cases import COPIES, MASKS, WIDTHS, check_attention, random_case
from host_compiler import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from x86_kernels import needs_library, torch_threads, use_wide_registers

from fastgen.ops import flash_attention, x86
from fastgen.ops.flash_attention import FlashAttention
from fastgen.ops.shared_attention import attention_by_products, shared_attention
from fastgen.testing import watched

QUERIES = st.sampled_from((32, 33, 47, 96, 130))
LENGTHS = st.sampled_from((32, 33, 63, 128, 129, 300))


check = partial(check_attention, flash_attention)


@needs_library
@settings(max_examples=150, deadline=None)
@given(
    COPIES, LENGTHS, LENGTHS, st.sampled_from((1, 2)), st.sampled_from((1, 3)), QUERIES,
    WIDTHS, WIDTHS, MASKS, st.sampled_from(x86.DTYPES), st.integers(1, 3), st.integers(0, 99),
)  # fmt: skip
def test_many_queries_see_what_they_see_in_torch(
    copies, first, second, groups, kv_heads, length, width, value_width, mask, dtype, threads, seed
):
    lengths = (first, second, 3)
    with torch_threads(threads):
        check(*random_case(copies, lengths, groups, kv_heads, length, width, value_width, mask, dtype, seed=seed))


@needs_library
@settings(max_examples=60, deadline=None)
@given(QUERIES, LENGTHS, st.sampled_from((1, 3)), WIDTHS, st.sampled_from(x86.DTYPES))
def test_causal_queries_see_what_they_see_in_torch(length, keys, groups, width, dtype):
    """From the upper left corner, as torch's."""
    check(*random_case((1,), (keys,), groups, 2, length, width, width, None, dtype), is_causal=True)


@needs_compiler
@needs_library
def test_flash_attention_in_wider_registers_is_right_as_well(tmp_path, monkeypatch):
    use_wide_registers(tmp_path, monkeypatch)
    for dtype in x86.DTYPES:
        for width in (20, 64, 80):
            check(*random_case((4, 1), (133, 17), 1, 3, 65, width, width, "added", dtype))
            check(*random_case((1,), (133,), 2, 3, 65, width, width, None, dtype), is_causal=True)


@needs_library
@pytest.mark.parametrize("dtype", x86.DTYPES)
def test_bits_depend_neither_on_rows_nor_on_threads(dtype):
    query, keys, values, mask = random_case((2, 1), (200, 40), 2, 3, 700, 64, 64, "added", dtype, inputs=2)
    with torch.no_grad():
        found = flash_attention.attention(query, keys, values, mask, 0.2)
        with torch_threads(1):
            of_one = [keys[0][1:2], keys[1][3:4]], [values[0][1:2], values[1][3:4]], mask[3:4, ..., 100:132, :]
            alone = flash_attention.attention(query[3:4, :, 100:132], *of_one, 0.2)
    assert torch.equal(found[3:4, :, 100:132], alone)


@needs_library
def test_what_many_queries_do_not_see_and_what_is_no_number_is_as_in_torch():
    query, keys, values, mask = random_case((1,), (70,), 1, 2, 40, 64, 64, "added", torch.float32, inputs=4)
    mask[0, :, 3] = -torch.inf  # zeros
    mask[0, :, 4] = torch.finfo(torch.float32).min  # equal weights
    query[1, :, 5] = torch.nan
    keys[0][2, :, 7], mask[2, ..., 7] = torch.nan, 0.0
    keys[0][3, :, 9], mask[3, ..., 9] = torch.inf, 0.0
    with torch.no_grad():
        found = flash_attention.attention(query, keys, values, mask, 0.3)
        expected = functional.scaled_dot_product_attention(query, keys[0], values[0], mask, scale=0.3)
    assert (found[0, :, 3] == 0).all() and found[1, :, 5].isnan().all() and found[2].isnan().all()
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=1e-5)


@needs_library
def test_keys_that_no_query_of_a_tile_sees_are_not_computed():
    query, keys, values, _ = random_case((1,), (256,), 1, 2, 256, 64, 64, None, torch.float32)
    with torch.no_grad():
        expected = flash_attention.attention(query, keys, values, None, 0.3, is_causal=True)
        keys[0][:, :, 192:], values[0][:, :, 192:] = torch.nan, torch.nan
        found = flash_attention.attention(query, keys, values, None, 0.3, is_causal=True)
    assert torch.equal(found[:, :, :180], expected[:, :, :180]) and found[:, :, 192:].isnan().all()


@needs_library
def test_large_scores_in_later_blocks_keep_their_weights():
    query = torch.tensor([0.0, 1.0, 88.0, 1000.0, -1000.0]).view(1, 1, 5, 1).repeat(1, 1, 8, 1)
    keys = torch.linspace(-1, 1, 400).view(1, 1, 400, 1)
    check(query, [keys], [keys], None, scale=1.0)


def sdpa(*args, **kwargs):
    usage = Counter()
    with torch.no_grad():
        expected = functional.scaled_dot_product_attention(*args, **kwargs)
        with FlashAttention(usage):
            found = functional.scaled_dot_product_attention(*args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    return usage["flash attention"]


@needs_library
def test_inside_the_context_torch_s_function_is_computed_here_where_it_can_be():
    query, [keys], [values], mask = random_case((1,), (64,), 2, 3, 48, 64, 64, "bool", torch.float32)
    assert sdpa(query, keys, values, mask, enable_gqa=True) == 1
    assert sdpa(query, keys, values, is_causal=True, scale=0.5, enable_gqa=True) == 1
    assert sdpa(query[:, :3], keys, values, mask[0, 0]) == 1
    assert sdpa(query[:, :3], keys, values, mask[:, :, :1]) == 1
    assert sdpa(query[:, :3, :8], keys, values) == 0, "few queries"
    assert sdpa(query[:, :3].double(), keys.double(), values.double()) == 0
    assert sdpa(query[0, :3], keys[0], values[0]) == 0, "three dimensions"
    assert sdpa(query[:, :3], keys[:1], values[:1]) == 0, "rows are broadcast"
    with sdpa_kernel(SDPBackend.MATH):
        assert sdpa(query[:, :3], keys, values) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(query[:, :3], keys, values) == 0


@needs_library
def test_torch_says_what_is_wrong_with_a_call():
    query, [keys], [values], mask = random_case((1,), (64,), 2, 3, 48, 64, 64, "bool", torch.float32)
    for args, kwargs in (
        ((query, keys, values), {}),  # twice as many heads
        ((query[:, :3], keys, values, mask[..., :5]), {}),
        ((query[:, :3, :, :8], keys, values), {}),
    ):
        with torch.no_grad(), FlashAttention(Counter()), pytest.raises(RuntimeError):
            functional.scaled_dot_product_attention(*args, **kwargs)


@needs_library
def test_a_mode_of_the_program_sees_torch_s_function():
    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            noted.append(func)
            return func(*args, **(kwargs or {}))

    noted, usage = [], Counter()
    query, [keys], [values], _ = random_case((1,), (64,), 1, 3, 48, 64, 64, None, torch.float32)
    with torch.no_grad(), Noting(), FlashAttention(usage):
        functional.scaled_dot_product_attention(query, keys, values)
    assert functional.scaled_dot_product_attention in noted and not usage


@needs_library
def test_shared_attention_uses_it_for_many_queries():
    case = random_case((4, 1), (64, 48), 1, 2, 40, 64, 64, "added", torch.float32)
    with torch.no_grad():
        expected = attention_by_products(*case, 0.125)
        with watched("attention, many queries") as calls:
            torch.testing.assert_close(shared_attention(*case), expected, rtol=0, atol=1e-5)
    assert calls


@pytest.mark.parametrize("has_amx", [True, False])
def test_where_torch_has_tiles_bf16_is_left_to_it(has_amx, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx, raising=False)
    is_faster = flash_attention._is_faster.__wrapped__
    assert is_faster(torch.bfloat16) is not has_amx and is_faster(torch.float32)
