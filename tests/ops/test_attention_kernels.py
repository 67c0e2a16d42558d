"""Attention of few queries and of many, `csrc/few_queries.cpp` and `csrc/flash_attention.cpp`: the numbers of torch.

The bits depend on no other rows and threads; inside a context torch's own function runs these kernels.
"""

import functools
import inspect
from collections import Counter
from unittest import mock

import pytest
import torch
from attention_cases import COPIES, MASKS, WIDTHS, check_attention, random_case
from hooks import watched
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_kernels import needs_library, torch_threads
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fastgen.ops import cpu_attention, simd
from fastgen.ops.cpu_attention import FlashAttention
from fastgen.ops.shared_attention import FEW, MANY, attention_by_products, shared_attention

KERNELS = pytest.mark.parametrize("kernel", [FEW, MANY], ids=["few queries", "many queries"])
QUERIES = {FEW: st.sampled_from((1, 2, 9, 16)), MANY: st.sampled_from((32, 33, 47, 96, 130))}
LENGTHS = {
    FEW: st.sampled_from((1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257)),
    MANY: st.sampled_from((32, 33, 63, 128, 129, 300)),
}


@pytest.fixture(autouse=True, scope="module")
def also_with_amx():
    """Computes in bf16 with fastgen's kernel also where torch's is faster."""
    with mock.patch.object(cpu_attention, "_is_faster", functools.wraps(cpu_attention._is_faster)(lambda dtype: True)):
        yield


@needs_library
@KERNELS
@settings(max_examples=200, deadline=None)
@given(
    st.data(), COPIES, st.sampled_from((1, 2)), st.sampled_from((1, 3)), WIDTHS, WIDTHS, MASKS,
    st.sampled_from(simd.DTYPES), st.integers(1, 3), st.integers(0, 99),
)  # fmt: skip
def test_queries_see_what_they_see_in_torch(
    kernel, data, copies, groups, kv_heads, width, value_width, mask, dtype, threads, seed
):
    first, second, length = map(data.draw, (LENGTHS[kernel], LENGTHS[kernel], QUERIES[kernel]))
    most = cpu_attention.MOST_QUERIES if len(copies) == 1 else cpu_attention.MOST_IN_SEGMENTS
    if kernel is FEW and copies[0] * groups * length > most:
        groups = length = 1
    if mask is None:
        first += cpu_attention.MIN_KEYS_WITHOUT_MASK
    case = random_case(copies, (first, second, 3), groups, kv_heads, length, width, value_width, mask, dtype, seed=seed)
    with torch_threads(threads):
        check_attention(kernel, *case)


@needs_library
@settings(max_examples=60, deadline=None)
@given(QUERIES[MANY], LENGTHS[MANY], st.sampled_from((1, 3)), WIDTHS, st.sampled_from(simd.DTYPES))
def test_causal_queries_see_what_they_see_in_torch(length, keys, groups, width, dtype):
    """From the upper left corner, as torch's."""
    case = random_case((1,), (keys,), groups, 2, length, width, width, None, dtype)
    check_attention(MANY, *case, is_causal=True)


@needs_library
@pytest.mark.parametrize("dtype", simd.DTYPES)
@pytest.mark.parametrize(("kernel", "length", "part"), [(FEW, 1, slice(1)), (MANY, 700, slice(100, 132))])
def test_bits_depend_neither_on_rows_nor_on_threads(kernel, length, part, dtype):
    query, keys, values, mask = random_case((4, 1), (100, 9), 2, 3, length, 64, 64, "added", dtype)
    with torch.no_grad():
        output = kernel.run(query, keys, values, mask, 0.2)
        with torch_threads(1):
            one_row = [keys[0][1:2], keys[1][5:6]], [values[0][1:2], values[1][5:6]], mask[5:6, :, part]
            alone = kernel.run(query[5:6, :, part], *one_row, 0.2)
    assert torch.equal(output[5:6, :, part], alone)


@needs_library
@pytest.mark.parametrize("dtype", simd.DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("copies", [(1,), (4,), (4, 1), (6, 3, 1), (1, 1)])
def test_few_queries_are_divided_among_many_threads(copies, kv_heads, dtype):
    case = random_case(copies, (70, 40, 9), 4, kv_heads, 4, 64, 72, "added", dtype, inputs=1)
    outputs = []
    for threads in (1, 2, 3, 7):
        with torch.no_grad(), torch_threads(threads):
            outputs.append(FEW.run(*case, 0.2))
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])
    check_attention(FEW, *case)


@needs_library
@pytest.mark.parametrize(("kernel", "length"), [(FEW, 1), (MANY, 40)])
def test_hidden_keys_and_nan_are_as_in_torch(kernel, length):
    query, keys, values, mask = random_case((1,), (70,), 1, 2, length, 64, 64, "added", torch.float32, inputs=5)
    mask[0, :, 0] = torch.finfo(torch.float32).min  # equal weights
    mask[1] = -torch.inf  # zeros
    query[2] = torch.nan
    keys[0][3, :, 7], mask[3, ..., 7] = torch.nan, 0.0
    keys[0][4, :, 5], mask[4, ..., 5] = torch.inf, 0.0
    with torch.no_grad():
        output = kernel.run(query, keys, values, mask, 0.3)
        expected = functional.scaled_dot_product_attention(query, keys[0], values[0], mask, scale=0.3)
    assert (output[1] == 0).all() and output[2:4].isnan().all()
    torch.testing.assert_close(output, expected, equal_nan=True, rtol=0, atol=1e-5)


@needs_library
@pytest.mark.parametrize(("kernel", "length"), [(FEW, 1), (MANY, 40)])
def test_large_and_small_scores_keep_their_weights(kernel, length):
    query = torch.tensor([0.0, 1.0, 88.0, 1000.0, -1000.0]).view(5, 1, 1, 1).repeat(1, 1, length, 1)
    keys = torch.linspace(-1, 1, 400).view(1, 1, 400, 1).repeat(5, 1, 1, 1)
    check_attention(kernel, query, [keys], [keys], None, scale=1.0)


@needs_library
@pytest.mark.parametrize("dtype", simd.DTYPES)
@pytest.mark.parametrize("kind", ["lowest", "-inf", "bool"])
def test_keys_after_the_last_visible_one_are_not_read(kind, dtype):
    """The unused part of a static cache is such keys."""
    query, keys, values, _ = random_case((4, 1), (40, 100), 2, 3, 1, 64, 64, None, dtype, inputs=2)
    last = torch.tensor([30, 41, 139, 60, 57, 50, 44, 48])  # visible key of each row
    sees = torch.arange(140) <= last[:, None, None, None]
    hidden = -torch.inf if kind == "-inf" else torch.finfo(dtype).min
    mask = sees if kind == "bool" else torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, hidden)
    check_attention(FEW, query, keys, values, mask)
    with torch.no_grad():
        expected = FEW.run(query, keys, values, mask, 0.3)
        for states in keys[1], values[1]:
            states[4:, :, 32:] = torch.nan  # the last four rows see at most 18 keys of the second segment
        output = FEW.run(query, keys, values, mask, 0.3)
    assert torch.equal(output, expected)


@needs_library
def test_a_query_that_sees_no_key_has_the_result_of_torch():
    query, keys, values, _ = random_case((2, 1), (24, 40), 1, 2, 1, 64, 64, None, torch.float32, inputs=1)
    mask = torch.zeros(2, 1, 1, 64).masked_fill(torch.arange(64) > 30, torch.finfo(torch.float32).min)
    mask[1] = torch.finfo(torch.float32).min  # equal weights for all
    check_attention(FEW, query, keys, values, mask)


@needs_library
def test_keys_that_no_query_of_a_tile_sees_are_not_computed():
    query, keys, values, _ = random_case((1,), (256,), 1, 2, 256, 64, 64, None, torch.float32)
    with torch.no_grad():
        expected = MANY.run(query, keys, values, None, 0.3, is_causal=True)
        keys[0][:, :, 192:], values[0][:, :, 192:] = torch.nan, torch.nan
        output = MANY.run(query, keys, values, None, 0.3, is_causal=True)
    assert torch.equal(output[:, :, :180], expected[:, :, :180]) and output[:, :, 192:].isnan().all()


@needs_library
@pytest.mark.parametrize(
    ("queries", "length", "part"),
    [
        (cpu_attention.MOST_IN_SEGMENTS, 1, "attention, few queries"),
        (cpu_attention.MOST_IN_SEGMENTS + 1, 1, None),
        (4, 40, "attention, many queries"),
    ],
)
def test_shared_attention_uses_the_kernel_for_so_many_queries(queries, length, part):
    case = random_case((queries, 1), (64, 48), 1, 2, length, 64, 64, "added", torch.float32)
    with torch.no_grad(), watched("attention, few queries") as few, watched("attention, many queries") as many:
        expected = attention_by_products(*case, 0.125)
        torch.testing.assert_close(shared_attention(*case), expected, rtol=0, atol=1e-5)
    assert (bool(few), bool(many)) == (part == "attention, few queries", part == "attention, many queries")


@needs_library
def test_gradients_strides_and_other_types_are_left_alone():
    query, [keys], values, mask = random_case((2,), (64,), 1, 2, 1, 64, 64, "added", torch.float32)
    assert not cpu_attention.can_attend_few(query, [keys], values, mask), "gradients are recorded"
    with torch.no_grad():
        assert not cpu_attention.can_attend_few(query, [keys[..., ::2]], values, mask)
        assert not cpu_attention.can_attend_few(query.double(), [keys], values, mask.double())


def sdpa(*args, **kwargs):
    usage = Counter()
    with torch.no_grad():
        expected = functional.scaled_dot_product_attention(*args, **kwargs)
        with FlashAttention(usage):
            output = functional.scaled_dot_product_attention(*args, **kwargs)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    return usage["flash attention"]


@needs_library
def test_inside_the_context_the_kernel_computes_torchs_function():
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
def test_invalid_calls_have_the_error_of_torch():
    query, [keys], [values], mask = random_case((1,), (64,), 2, 3, 48, 64, 64, "bool", torch.float32)
    for args, kwargs in (
        ((query, keys, values), {}),  # twice as many heads
        ((query[:, :3], keys, values, mask[..., :5]), {}),
        ((query[:, :3, :, :8], keys, values), {}),
    ):
        with torch.no_grad(), FlashAttention(Counter()), pytest.raises(RuntimeError):
            functional.scaled_dot_product_attention(*args, **kwargs)


@needs_library
def test_a_torch_function_mode_of_user_code_sees_the_call():
    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            noted.append(func)
            return func(*args, **(kwargs or {}))

    noted, usage = [], Counter()
    query, [keys], [values], _ = random_case((1,), (64,), 1, 3, 48, 64, 64, None, torch.float32)
    with torch.no_grad(), Noting(), FlashAttention(usage):
        functional.scaled_dot_product_attention(query, keys, values)
    assert functional.scaled_dot_product_attention in noted and not usage


@pytest.mark.parametrize("has_amx", [True, False])
def test_bf16_is_left_to_torch_if_it_has_amx_tiles(has_amx, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx, raising=False)
    is_faster = inspect.unwrap(cpu_attention._is_faster)
    assert is_faster(torch.bfloat16) is not has_amx and is_faster(torch.float32)
