"""Attention of many rows to keys and values that a group of rows has in common.

Rows come in groups of `fan_out` (the beams or samples of one input): row `b * fan_out + m` belongs to input `b`. What
a group shares is stored once, `[inputs, kv_heads, shared_length, head_dim]`, and the queries of the group, together
with the query heads that share a key head, are folded into the query length of one product with it (FastSeq §4.1,
MultiGen §3.3, grouped heads as in "Fast Transformer Decoding"). What each row has for itself is
`[rows, kv_heads, own_length, head_dim]`; both parts meet in one softmax (FastSeq eq. 3).

Tests: tests/ops/test_shared_attention.py
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

FEW_QUERIES = 8
MOST_NUMBERS_OF_A_VECTOR = 16  # 512 bits of fp32
MANY_KEYS = 256


def fold(rows: Tensor, fan_out: int, kv_heads: int) -> Tensor:
    """`[B*M, H, L, X]` to `[B, H_kv, M*G*L, X]`, where `H = H_kv * G` and `M = fan_out`."""
    row_count, heads, length, width = rows.shape
    inputs, groups = row_count // fan_out, heads // kv_heads
    split = rows.reshape(inputs, fan_out, kv_heads, groups * length, width)  # [B, M, H_kv, G*L, X]
    return split.transpose(1, 2).reshape(inputs, kv_heads, fan_out * groups * length, width)


def unfold(folded: Tensor, fan_out: int, heads: int) -> Tensor:
    """`[B, H_kv, M*G*L, X]` back to `[B*M, H, L, X]`, the inverse of `fold`."""
    inputs, kv_heads, _, width = folded.shape
    split = folded.reshape(inputs, kv_heads, fan_out, -1, width).transpose(1, 2)  # [B, M, H_kv, G*L, X]
    return split.reshape(inputs * fan_out, heads, -1, width)


def fold_mask(mask: Tensor, fan_out: int, kv_heads: int, heads: int, length: int) -> Tensor:
    """A mask that broadcasts to `[B*M, H, L, S]`, made to broadcast to the folded scores `[B, H_kv, M*G*L, S]`."""
    if mask.dim() < 4:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    rows, mask_heads, mask_length, width = mask.shape
    if rows == 1 and mask_heads == 1 and mask_length == 1:
        return mask
    groups = heads // kv_heads
    inputs = max(rows // fan_out, 1)
    mask = mask.expand(max(rows, fan_out), mask_heads, length, width)
    if mask_heads == 1:
        split = mask.reshape(inputs, fan_out, 1, length, width).expand(-1, -1, groups, -1, -1)  # [B, M, G, L, S]
        return split.reshape(inputs, 1, fan_out * groups * length, width)
    return fold(mask, fan_out, kv_heads)


def query_key_scores(query: Tensor, shared_keys: Tensor, own_keys: Tensor | None, fan_out: int) -> Tensor:
    """Products of each query with the shared and the own keys of its row, not scaled.

    query `[B*M, H, L, D]`, shared_keys `[B, H_kv, N, D]`, own_keys `[B*M, H_kv, T, D]` or None; result
    `[B*M, H, L, N+T]`.
    """
    rows, heads, length, _ = query.shape
    kv_heads = shared_keys.shape[1]
    scores = unfold(_products(fold(query, fan_out, kv_heads), shared_keys), fan_out, heads)
    if own_keys is None:
        return scores
    grouped = query.reshape(rows, kv_heads, -1, query.shape[-1])  # [B*M, H_kv, G*L, D]
    own = (grouped @ own_keys.transpose(-1, -2)).view(rows, heads, length, -1)
    return torch.cat([scores, own], dim=-1)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """`queries @ keys.T`; `[B, H, L, D]` and `[B, H, N, D]` to `[B, H, L, N]`."""
    if _is_skinny(queries, keys):
        products = torch.bmm(keys.flatten(0, 1), queries.flatten(0, 1).transpose(1, 2))  # [B*H, N, L]
        return products.transpose(1, 2).unflatten(0, queries.shape[:2])
    return queries @ keys.transpose(-1, -2)


def _is_skinny(queries: Tensor, keys: Tensor) -> bool:
    """Whether few queries meet many keys in fp32 on a CPU, where BLAS repacks the keys and flash attention is slow.

    5 queries, 48 heads, 1500 keys, one thread: 10.7 ms in `scaled_dot_product_attention`, 7.2 ms in two products, of
    which the first takes 2.5 instead of 4.4 ms with its operands swapped. From 64 queries on all are equal.
    """
    few = queries.shape[-2] <= FEW_QUERIES and keys.shape[-2] >= MANY_KEYS
    return few and queries.device.type == "cpu" and queries.dtype == torch.float32


def weighted_values(weights: Tensor, shared_values: Tensor, own_values: Tensor | None, fan_out: int) -> Tensor:
    """Sums of the shared and the own values of each row, weighted.

    weights `[B*M, H, L, N+T]`, shared_values `[B, H_kv, N, D]`, own_values `[B*M, H_kv, T, D]` or None; result
    `[B*M, H, L, D]`.
    """
    rows, heads, length, _ = weights.shape
    kv_heads, shared_length = shared_values.shape[1], shared_values.shape[2]
    folded = fold(weights[..., :shared_length], fan_out, kv_heads)
    result = unfold(folded @ shared_values, fan_out, heads)
    if own_values is None:
        return result
    grouped = weights[..., shared_length:].reshape(rows, kv_heads, heads // kv_heads * length, -1)
    return result + (grouped @ own_values).view(rows, heads, length, -1)


def shared_attention(
    query: Tensor,
    keys: tuple[Tensor, Tensor | None],
    values: tuple[Tensor, Tensor | None],
    fan_out: int,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """What `scaled_dot_product_attention` returns for keys and values given as (shared, own) parts.

    query `[B*M, H, L, D]`; shared parts `[B, H_kv, N, D]`, own parts `[B*M, H_kv, T, D]` or None; attn_mask boolean or
    additive, broadcasting to `[B*M, H, L, N+T]`; scale defaults to `D ** -0.5`. Result `[B*M, H, L, D]`; zeros where
    the mask leaves nothing, as in torch from 2.5 on, and where torch takes NaN for hidden.
    """
    shared_keys, own_keys = keys
    heads, length = query.shape[1], query.shape[2]
    kv_heads = shared_keys.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if own_keys is None:
        folded = fold(query, fan_out, kv_heads)
        if attn_mask is not None:
            attn_mask = fold_mask(attn_mask, fan_out, kv_heads, heads, length)
        if _is_skinny(folded, shared_keys):
            weights = _softmax(_products(folded * scale, shared_keys), attn_mask, query.dtype)
            output = _zero_where_hidden(weights @ values[0], attn_mask)
        else:
            output = functional.scaled_dot_product_attention(
                folded, shared_keys, values[0], attn_mask=attn_mask, scale=scale
            )
        return unfold(output, fan_out, heads)
    scores = query_key_scores(query * scale, shared_keys, own_keys, fan_out)
    weights = _softmax(scores, attn_mask, query.dtype)
    if attn_mask is None and _hides_nan(scores):
        weights.masked_fill_(~(scores > float("-inf")).any(dim=-1, keepdim=True), 0.0)
    return _zero_where_hidden(weighted_values(weights, *values, fan_out), attn_mask)


def _softmax(scores: Tensor, attn_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weights from scores, which it overwrites."""
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores.masked_fill_(~attn_mask, float("-inf"))
        else:
            scores += attn_mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(dtype)


def _hides_nan(scores: Tensor) -> bool:
    """Whether torch's own attention takes rows of scores `[…, S]` without a number for hidden ones: it gives zeros.

    On a CPU, without a mask, for fewer keys than a vector of the machine has numbers: there the largest score is found
    with comparisons, which are false for NaN.
    """
    few = scores.device.type == "cpu" and scores.shape[-1] < MOST_NUMBERS_OF_A_VECTOR
    return few and _gives_zeros_for_nan(scores.shape[-1], scores.dtype, torch.backends.cuda.flash_sdp_enabled())


@functools.cache
def _gives_zeros_for_nan(keys: int, dtype: torch.dtype, flash: bool) -> bool:
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        query, states = torch.full((1, 1, 1, 1), torch.nan, dtype=dtype), torch.zeros((1, 1, keys, 1), dtype=dtype)
        return not functional.scaled_dot_product_attention(query, states, states).isnan().any()


def _zero_where_hidden(output: Tensor, attn_mask: Tensor | None) -> Tensor:
    """The output `[…, L, D]`, in place with zeros for queries of which the mask `[…, L, S]` hides every key."""
    if attn_mask is None:
        return output
    hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == float("-inf")
    return output.masked_fill_(hidden.all(dim=-1, keepdim=True), 0.0)
