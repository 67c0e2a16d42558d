"""Attention of few queries, `csrc/few_queries.cpp`: the numbers of torch, whatever other rows and threads there are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_cases import COPIES, MASKS, WIDTHS, check_attention, random_case
from host_compiler import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from x86_kernels import needs_library, torch_threads, use_wide_registers

from fastgen.ops import few_queries, x86
from fastgen.ops.shared_attention import attention_by_products, shared_attention
from fastgen.testing import watched

LENGTHS = st.sampled_from((1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257))


check = partial(check_attention, few_queries)


@needs_library
@settings(max_examples=250, deadline=None)
@given(
    COPIES, LENGTHS, LENGTHS, st.sampled_from((1, 2)), st.sampled_from((1, 3)), st.sampled_from((1, 2)),
    WIDTHS, WIDTHS, MASKS, st.sampled_from(x86.DTYPES), st.integers(1, 3), st.integers(0, 99),
)  # fmt: skip
def test_few_queries_see_what_they_see_in_torch(
    copies, first, second, groups, kv_heads, length, width, value_width, mask, dtype, threads, seed
):
    if copies[0] * groups * length > few_queries.MOST_QUERIES:
        groups = length = 1
    if mask is None:
        first += few_queries.MIN_KEYS_WITHOUT_MASK
    lengths = (first, second, 3)
    with torch_threads(threads):
        check(*random_case(copies, lengths, groups, kv_heads, length, width, value_width, mask, dtype, seed=seed))


@needs_compiler
@needs_library
def test_attention_in_wider_registers_is_right_as_well(tmp_path, monkeypatch):
    use_wide_registers(tmp_path, monkeypatch)
    for copies in ((1,), (4, 1), (6, 3, 1)):
        for dtype in x86.DTYPES:
            for width in (20, 64, 80):
                check(*random_case(copies, (33, 17, 3), 1, 3, 1, width, width, "added", dtype))


@needs_library
@pytest.mark.parametrize("dtype", x86.DTYPES)
def test_bits_do_not_depend_on_rows_and_threads(dtype):
    query, keys, values, mask = random_case((4, 1), (100, 9), 2, 3, 1, 64, 64, "added", dtype, inputs=3)
    with torch.no_grad():
        found = few_queries.attention(query, keys, values, mask, 0.2)
        with torch_threads(1):
            alone = few_queries.attention(
                query[5:6], [keys[0][1:2], keys[1][5:6]], [values[0][1:2], values[1][5:6]], mask[5:6], 0.2
            )
    assert torch.equal(found[5:6], alone)


@needs_library
def test_what_is_hidden_and_what_is_no_number_is_as_in_torch():
    query, keys, values, mask = random_case((1,), (24,), 1, 2, 1, 64, 64, "added", torch.float32, inputs=5)
    mask[1] = -torch.inf  # zeros
    query[2] = torch.nan
    keys[0][3, :, 7] = torch.nan
    mask[3, ..., 7] = 0.0
    mask[4, ..., 5], keys[0][4, :, 5] = 0.0, torch.inf
    with torch.no_grad():
        found = few_queries.attention(query, keys, values, mask, 0.3)
        expected = functional.scaled_dot_product_attention(query, keys[0], values[0], mask, scale=0.3)
    assert (found[1] == 0).all() and found[2:4].isnan().all()
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=1e-5)
    mask[3] = -torch.inf
    keys[0][3] = torch.nan
    with torch.no_grad():
        found = few_queries.attention(query, keys, values, mask, 0.3)
    assert found[3].isnan().all()  # NaN + -inf


@needs_library
@pytest.mark.parametrize("dtype", x86.DTYPES)
@pytest.mark.parametrize("kind", ["lowest", "-inf", "bool"])
def test_keys_behind_the_last_that_is_seen_are_not_read(kind, dtype):
    """As in a cache of fixed size."""
    query, keys, values, _ = random_case((4, 1), (40, 100), 2, 3, 1, 64, 64, None, dtype, inputs=2)
    last = torch.tensor([30, 41, 139, 60, 57, 50, 44, 48])  # of each row's keys that it sees
    sees = torch.arange(140) <= last[:, None, None, None]
    hidden = -torch.inf if kind == "-inf" else torch.finfo(dtype).min
    mask = sees if kind == "bool" else torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, hidden)
    check(query, keys, values, mask)
    with torch.no_grad():
        expected = few_queries.attention(query, keys, values, mask, 0.3)
        for states in keys[1], values[1]:
            states[4:, :, 32:] = torch.nan  # of the last four rows none sees more than 18 of the second segment
        found = few_queries.attention(query, keys, values, mask, 0.3)
    assert torch.equal(found, expected)


@needs_library
def test_a_query_that_sees_no_key_has_torch_s_result_beside_others():
    query, keys, values, _ = random_case((2, 1), (24, 40), 1, 2, 1, 64, 64, None, torch.float32, inputs=1)
    mask = torch.zeros(2, 1, 1, 64).masked_fill(torch.arange(64) > 30, torch.finfo(torch.float32).min)
    mask[1] = torch.finfo(torch.float32).min  # equal weights for all
    check(query, keys, values, mask)


@needs_library
def test_large_and_small_scores_keep_their_weights():
    query = torch.tensor([0.0, 1.0, 88.0, 1000.0, -1000.0]).view(5, 1, 1, 1)
    keys = torch.linspace(-1, 1, 40).view(1, 1, 40, 1).expand(5, 1, 40, 1).contiguous()
    check(query, [keys], [keys], None, scale=1.0)


@needs_library
def test_it_is_used_for_few_queries_only():
    with torch.no_grad(), watched("attention, few queries") as calls:
        for queries, is_used in ((few_queries.MOST_QUERIES, True), (few_queries.MOST_QUERIES + 1, False)):
            case = random_case((queries,), (64,), 1, 2, 1, 64, 64, "added", torch.float32)
            expected = attention_by_products(*case, 0.125)
            torch.testing.assert_close(shared_attention(*case), expected)
            assert bool(calls) is is_used
            calls.clear()
    case = random_case((2,), (64,), 1, 2, 1, 64, 64, "added", torch.float32)
    assert not few_queries.can_attend(*case), "gradients are recorded"
    with torch.no_grad():
        assert not few_queries.can_attend(case[0], [case[1][0][..., ::2]], case[2], case[3]), "strided keys"
        assert not few_queries.can_attend(*(one.double() if torch.is_tensor(one) else one for one in case))
