"""Attention to segments equals `scaled_dot_product_attention` to the concatenated keys and values."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fastgen.ops import shared_attention as module
from fastgen.ops.shared_attention import (
    attention_by_products,
    query_key_scores,
    shared_attention,
    weighted_values,
)


def whole(segments: list[torch.Tensor], rows: int, groups: int) -> torch.Tensor:
    repeated = [segment.repeat_interleave(rows // segment.shape[0], dim=0) for segment in segments]
    return torch.cat(repeated, dim=2).repeat_interleave(groups, dim=1)


@settings(max_examples=100, deadline=None)
@given(
    inputs=st.integers(1, 3),
    rows_per_input=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    length=st.integers(1, 3),
    prefix=st.sampled_from([0, 5]),
    prompt=st.sampled_from([1, 7, 300]),
    generated=st.integers(0, 4),
    mask_kind=st.sampled_from(["none", "rows", "heads", "one", "plain", "added", "hidden"]),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 1000),
)
def test_segments_of_any_shape_equal_one_tensor(
    inputs, rows_per_input, kv_heads, groups, length, prefix, prompt, generated, mask_kind, scale, seed
):
    generator = torch.Generator().manual_seed(seed)
    rows, heads, total = inputs * rows_per_input, kv_heads * groups, prefix + prompt + generated

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, sizes = random(rows, heads, length, 8), ((1, prefix), (inputs, prompt), (rows, generated))
    keys, values = ([random(copies, kv_heads, size, 8) for copies, size in sizes if size] for _ in range(2))
    shape = {
        "none": None,
        "rows": (rows, 1, length, total),
        "heads": (rows, heads, length, total),
        "one": (1, 1, 1, total),
        "plain": (length, total),
        "added": (1, heads, length, total),
        "hidden": (rows, 1, length, total),
    }[mask_kind]
    mask = None if shape is None else random(*shape)
    if mask_kind in ("rows", "one", "plain"):
        mask = mask > 0
    elif mask_kind == "hidden":
        mask = mask.masked_fill(torch.arange(rows).view(-1, 1, 1, 1) % 2 == 0, -torch.inf)  # every key of some rows
    output = shared_attention(query, keys, values, mask, scale=scale)
    whole_keys, whole_values = whole(keys, rows, groups), whole(values, rows, groups)
    expected = functional.scaled_dot_product_attention(query, whole_keys, whole_values, attn_mask=mask, scale=scale)
    if expected.isnan().any():  # rows without a visible key, in torch before 2.5
        output, expected = output.nan_to_num(), expected.nan_to_num()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("copies", [(1, 2, 6), (2, 6), (6,)], ids=str)
def test_attention_sinks_take_their_part_of_the_weights(copies):
    """With a learned score per head, as in GPT-OSS, whose weight is dropped after the softmax."""
    query, sinks = torch.randn(6, 4, 1, 8), torch.randn(4)
    keys, values = ([torch.randn(count, 2, 3 + count, 8) for count in copies] for _ in range(2))

    def attended(scores: torch.Tensor) -> torch.Tensor:
        with_sinks = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(6, 4, 1, 1)], dim=-1)
        return with_sinks.softmax(dim=-1)[..., :-1]

    output = weighted_values(attended(query_key_scores(query, keys)), values)
    scores = query @ whole(keys, 6, 2).transpose(2, 3)
    torch.testing.assert_close(output, attended(scores) @ whole(values, 6, 2))


NO_NUMBERS = ("every query", "queries of a row", "every key", "a key", "a key and a value", "every query and a value")


@pytest.mark.parametrize("own_length", (1, 8, 9, 40), ids="{} generated".format)
@pytest.mark.parametrize("which", (*NO_NUMBERS, "infinite queries of a row"))
@pytest.mark.parametrize("hidden", (None, 0, 5), ids="hidden {}".format)
@pytest.mark.parametrize("width", (8, 4), ids="values of {}".format)
def test_nan_in_queries_and_keys_is_as_in_torch(which, own_length, hidden, width):
    query, keys, values = torch.randn(4, 6, 1, 8).abs(), torch.randn(2, 3, 7, 8).abs(), torch.randn(2, 3, 7, width)
    own_keys, own_values = torch.randn(4, 3, own_length, 8).abs(), torch.randn(4, 3, own_length, width)
    if "infinite" in which:  # all its scores are -inf
        query[1:2, :, :, 0], keys[..., 0], own_keys[..., 0] = torch.inf, -1, -1
    elif "quer" in which:
        query[slice(None) if which.startswith("every") else slice(1, 2)] = torch.nan
        values[0, :, 3, 1] = torch.nan if "value" in which else 0.5
    elif which == "every key":
        keys[:], own_keys[:] = torch.nan, torch.nan
    else:
        keys[0, :, 3], values[0, :, 3] = torch.nan, torch.nan if "value" in which else 0.5
    mask = None if hidden is None else (torch.arange(7 + own_length) >= hidden).expand(4, 1, 1, -1)
    output = shared_attention(query, [keys, own_keys], [values, own_values], mask)
    expected = functional.scaled_dot_product_attention(
        query, whole([keys, own_keys], 4, 2), whole([values, own_values], 4, 2), attn_mask=mask
    )
    torch.testing.assert_close(output, expected, equal_nan=True)


def test_few_queries_meet_shared_keys_in_one_product(monkeypatch):
    products = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: products.append((a, b)) or bmm(a, b))
    keys, values = torch.randn(2, 3, 300, 8), torch.randn(2, 3, 300, 8)
    shared_attention(torch.randn(8, 3, 1, 8), [keys], [values])
    assert [product[0].data_ptr() for product in products] == [keys.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_its_softmax_in_fp32(dtype):
    query, keys, own = (torch.randn(shape).to(dtype) for shape in [(4, 2, 1, 64), (2, 2, 20, 64), (4, 2, 3, 64)])
    output = shared_attention(query, [keys, own], [keys, own])
    assert output.dtype == dtype
    exact = shared_attention(query.double(), [keys.double(), own.double()], [keys.double(), own.double()])
    torch.testing.assert_close(output.double(), exact, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("mask_of", ("each query", "all queries", "nobody"))
def test_many_queries_get_their_scores_in_parts(mask_of, monkeypatch):
    query = torch.randn(4, 6, 11, 8)
    keys, values = ([torch.randn(1, 2, 7, 8), torch.randn(4, 2, 11, 8)] for _ in range(2))
    mask = {"each query": torch.ones(4, 1, 11, 18), "all queries": torch.ones(1, 1, 1, 18)}.get(mask_of)
    mask = None if mask is None else torch.randn_like(mask) > -1
    expected = functional.scaled_dot_product_attention(query, whole(keys, 4, 3), whole(values, 4, 3), attn_mask=mask)
    module, lengths = sys.modules[shared_attention.__module__], []
    softmax = module._softmax
    monkeypatch.setattr(module, "MOST_SCORES", 3 * 4 * 6 * 18)
    monkeypatch.setattr(module, "_softmax", lambda *args: lengths.append(args[0].shape[2]) or softmax(*args))
    torch.testing.assert_close(shared_attention(query, keys, values, mask), expected)
    assert lengths == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("attention", "is_used"),
    [
        (lambda query, *others: attention_by_products(query, *others), True),
        (lambda query, *others: torch.zeros_like(query), False),
        (lambda *arguments: 1 / 0, False),
    ],
    ids=("right", "wrong", "raises"),
)
def test_triton_attention_is_used_if_it_agrees_with_torch(monkeypatch, attention, is_used):
    kernels = SimpleNamespace(attention=attention)
    monkeypatch.setattr(module, "import_module", lambda name: kernels)
    state = torch.get_rng_state()
    monkeypatch.setattr(module._is_triton_right, "_answers", {})
    assert (module._triton_attention(torch.device("cpu")) is kernels) is is_used
    assert torch.equal(state, torch.get_rng_state())
