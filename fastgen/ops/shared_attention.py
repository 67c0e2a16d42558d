"""Attention of many rows to keys and values in segments, each stored once for the rows that have it in common.

A segment is a tensor `[copies, kv_heads, length, head_dim]`; copy `c` belongs to the `rows // copies` rows from
`c * rows // copies` on. So a common prefix has one copy, a prompt one copy for its beams or samples, and generated
tokens one copy per row. The queries of a copy's rows, together with the query heads that share a key head, are folded
into the query length of one product with the copy (FastSeq §4.1, MultiGen §3.3, grouped heads as in "Fast Transformer
Decoding"); all segments share one softmax (FastSeq eq. 3).

Tests: tests/ops/test_shared_attention.py
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops import cpu_attention, prompt_attention, simd
from fastgen.ops.beams import follow
from fastgen.ops.folding import fold, fold_mask, unfold
from fastgen.ops.kernel import Kernel, first_supported, triton_reasons
from fastgen.ops.probes import probe

_TRITON = "fastgen.ops.triton_attention"

FEW_QUERIES = 8
MANY_KEYS = 256
MOST_SCORES = 1 << 24  # computed together; 64 MB in fp32


class Bounds(NamedTuple):
    """What a step sees of a static cache, in tensors on the device, for kernels on a GPU.

    first, last: int64 `[1]`: the mask hides keys of the first segment before `first` and of the last segment after
    `last`, of all queries, which kernels may skip. ancestors: int32 `[rows, N]`: the row of the last segment's copy
    that has the keys and values of each row and position, see `Ancestors`; None if each row has its own.
    """

    first: Tensor
    last: Tensor
    ancestors: Tensor | None = None


def follow_ancestors(segments: Sequence[Tensor], bounds: Bounds | None) -> tuple[Tensor, ...]:
    """Returns the segments, the last one in the order of the rows, see `Bounds`."""
    if bounds is None or bounds.ancestors is None:
        return tuple(segments)
    *first_segments, last = segments
    return (*first_segments, follow(bounds.ancestors, last))


def can_follow_ancestors(*states: Tensor) -> bool:
    """Whether the kernel of steps reads such keys and values through a table; its first call must not be captured."""
    device = states[0].device
    if device.type != "cuda" or triton_reasons() or (kernels := _triton_attention(device)) is None:
        return False
    return all(state.dtype in kernels.DTYPES and state.shape[-1] <= kernels.LARGEST_WIDTH for state in states)


def query_key_scores(query: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Returns the products of each query with the keys of its row, not scaled.

    query `[rows, H, L, D]`, keys: segments `[copies, H_kv, N, D]`; result `[rows, H, L, sum of N]`.
    """
    rows, heads = query.shape[:2]
    scores = []
    for segment in keys:
        rows_per_copy = rows // segment.shape[0]
        products = _products(fold(query, rows_per_copy, segment.shape[1]), segment)
        scores.append(unfold(products, rows_per_copy, heads))
    return scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Computes `queries @ keys.T`: `[B, H, L, D]` and `[B, H, N, D]` to `[B, H, L, N]`."""
    if _is_skinny(queries, keys):
        products = torch.bmm(keys.flatten(0, 1), queries.flatten(0, 1).transpose(1, 2))  # [B*H, N, L]
        return products.transpose(1, 2).unflatten(0, queries.shape[:2])
    return queries @ keys.transpose(-1, -2)


def _is_skinny(queries: Tensor, keys: Tensor) -> bool:
    """Whether few queries meet many keys in fp32 on a CPU, where BLAS repacks the keys and flash attention is slow.

    5 queries, 48 heads, 1500 keys, one thread: 10.7 ms in `scaled_dot_product_attention`, 7.2 ms in two products; the
    first takes 2.5 instead of 4.4 ms with its operands swapped. From 64 queries on, all take the same time.
    """
    few = queries.shape[-2] <= FEW_QUERIES and keys.shape[-2] >= MANY_KEYS
    return bool(few and queries.device.type == "cpu" and queries.dtype == torch.float32)


def weighted_values(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Returns the weighted sums of the values of each row.

    weights `[rows, H, L, sum of N]`, values: segments `[copies, H_kv, N, D]`; result `[rows, H, L, D]`.
    """
    rows, heads = weights.shape[:2]
    parts = weights.split([segment.shape[2] for segment in values], dim=-1) if len(values) > 1 else [weights]
    result = None
    for part, segment in zip(parts, values):
        rows_per_copy = rows // segment.shape[0]
        product = unfold(fold(part, rows_per_copy, segment.shape[1]) @ segment, rows_per_copy, heads)
        result = product if result is None else result + product
    return result


def shared_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    bounds: Bounds | None = None,
) -> Tensor:
    """Returns what `scaled_dot_product_attention` returns, for keys and values in segments.

    query: `[rows, H, L, D]`. keys, values: one or more segments `[copies, H_kv, N, D]`, with the same copies and
    lengths. attn_mask: boolean or additive, broadcasting to `[rows, H, L, sum of N]`. scale: defaults to `D ** -0.5`.
    Result: `[rows, H, L, D]`; zeros for queries whose scores are all -inf, with or without a mask, as in torch from 2.5
    on, and where torch treats NaN as hidden.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kernel = first_supported(KERNELS, query.device.type, query, keys, values, attn_mask)
    if kernel is TRITON:
        return kernel.run(query, keys, values, attn_mask, scale, bounds)
    keys, values = follow_ancestors(keys, bounds), follow_ancestors(values, bounds)
    return kernel.run(query, keys, values, attn_mask, scale)


def _attend_with_gradients(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None, scale: float
) -> Tensor:
    structure = prompt_attention.structure_sync(mask, query, keys)
    if structure is None:
        return attention_by_products(query, keys, values, mask, scale)
    return prompt_attention.attention(query, keys, values, structure, scale)


def _can_attend_in_triton(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None) -> bool:
    kernels = _triton_attention(query.device)
    return kernels is not None and kernels.can_attend(query, keys, values, mask)


def _attend_in_triton(query: Tensor, *args: Any) -> Tensor:
    return _triton_attention(query.device).attention(query, *args)


def _triton_attention(device: torch.device) -> Any:
    """Returns the module of kernels in Triton, or None if it is missing, cannot compile, or gives other results."""
    return import_module(_TRITON) if _is_triton_right(device) else None


@probe("the results of a small case differ from torch's")
def _is_triton_right(device: torch.device) -> bool:
    """Whether Triton's kernel agrees with torch's products in a small case, without random numbers."""
    sizes = (4, 4, 1, 32), (2, 2, 40, 32), (4, 2, 7, 32)
    query, *segments = (torch.arange(math.prod(size), device=device).sin().half().view(size) for size in sizes)
    exact = [segment.float() for segment in segments]
    expected = attention_by_products(query.float(), exact, exact, None, 0.2)
    output = import_module(_TRITON).attention(query, segments, segments, None, 0.2).float()
    return bool(torch.allclose(output, expected, atol=0.01, rtol=0.01))


def attention_by_products(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], attn_mask: Tensor | None, scale: float
) -> Tensor:
    """Computes `shared_attention` with torch's own operations."""
    rows, heads, length, width = query.shape
    if len(keys) > 1 and length > (most := _most_queries(query, keys)):
        return in_parts(attention_by_products, query, keys, values, attn_mask, scale, most)
    copies, kv_heads = keys[0].shape[:2]
    if len(keys) > 1:
        scores = query_key_scores(query * scale, keys)
    else:
        query = fold(query, rows // copies, kv_heads)
        if attn_mask is not None:
            attn_mask = fold_mask(attn_mask, rows // copies, kv_heads, heads, length)
        if not _is_skinny(query, keys[0]):
            output = functional.scaled_dot_product_attention(query, keys[0], values[0], attn_mask, scale=scale)
            return unfold(output, rows // copies, heads)
        scores = _products(query * scale, keys[0])
    weights, hidden = _softmax(scores, attn_mask, query.dtype, width == values[0].shape[-1])
    output = weighted_values(weights, values) if len(keys) > 1 else weights @ values[0]
    if hidden is not None:
        output.masked_fill_(hidden, 0.0)
    return output if len(keys) > 1 else unfold(output, rows // copies, heads)


def in_parts(
    attention: Callable[..., Tensor],
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attn_mask: Tensor | None,
    scale: float,
    most: int,
) -> Tensor:
    """Returns the attention of all queries, computed for at most `most` of a row at a time."""
    parts = query.split(most, dim=2)
    masks = [attn_mask] * len(parts)
    if attn_mask is not None and attn_mask.shape[-2:-1] == (query.shape[2],):
        masks = attn_mask.split(most, dim=-2)
    return torch.cat([attention(part, keys, values, mask, scale) for part, mask in zip(parts, masks)], dim=2)


def _most_queries(query: Tensor, keys: Sequence[Tensor]) -> int:
    """Returns the number of queries per row whose scores fit into `MOST_SCORES`: for a long prompt after a prefix."""
    scores_per_query = query.shape[0] * query.shape[1] * sum(segment.shape[2] for segment in keys)
    return max(MOST_SCORES // int(scores_per_query), 1)


def _softmax(
    scores: Tensor, attn_mask: Tensor | None, dtype: torch.dtype, one_width: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns weights for scores `[…, L, S]`, which it overwrites, and which queries see nothing, `[…, L, 1]`, or None.

    None means that the weights of such queries are already 0, which gives NaN for values of NaN as in torch. That is
    done for few keys; for many it would take as long as the softmax. one_width: whether heads of keys and values have
    the same width.
    """
    if attn_mask is None and one_width and _hides_nan(scores):
        hidden = ~(scores > float("-inf")).any(dim=-1, keepdim=True)
        return scores.softmax(dim=-1, dtype=_softmax_dtype(scores)).to(dtype).masked_fill_(hidden, 0.0), None
    if attn_mask is not None:
        # Added as torch adds it: NaN where a hidden score is NaN or inf.
        scores += torch.where(attn_mask, 0.0, float("-inf")) if attn_mask.dtype == torch.bool else attn_mask
    hidden = scores.amax(dim=-1, keepdim=True) == float("-inf")
    return scores.softmax(dim=-1, dtype=_softmax_dtype(scores)).to(dtype), hidden


def _softmax_dtype(scores: Tensor) -> torch.dtype:
    return torch.promote_types(scores.dtype, torch.float32)


def _hides_nan(scores: Tensor) -> bool:
    """Whether torch's own attention treats rows of scores `[…, S]` that are all NaN as hidden, and returns zeros.

    Its flash attention does so on a CPU, for keys and values of one width, without a mask, for fewer keys than a vector
    register holds: it finds the largest score with comparisons, which are false for NaN.
    """
    few = scores.device.type == "cpu" and scores.shape[-1] < cpu_attention.MIN_KEYS_WITHOUT_MASK
    return few and _gives_zeros_for_nan(scores.shape[-1], scores.dtype, torch.backends.cuda.flash_sdp_enabled())


@probe("this torch returns NaN for scores that are all NaN")
def _gives_zeros_for_nan(keys: int, dtype: torch.dtype, flash: bool) -> bool:
    query = torch.full((1, 1, 1, 1), torch.nan, dtype=dtype)
    states = torch.zeros((1, 1, keys, 1), dtype=dtype)
    return not functional.scaled_dot_product_attention(query, states, states).isnan().any()


_COUNTED_AS = ("scaled_dot_product_attention", "matmul", "shared_attention")
_kernel = functools.partial(Kernel, task="rows that share keys and values", counted_as=_COUNTED_AS)
_on_cpu = functools.partial(_kernel, unsupported_reasons=simd.machine_reasons, device="cpu")
TRITON = _kernel("Triton", triton_reasons, _attend_in_triton, "cuda", _can_attend_in_triton)
MANY = _on_cpu("C++ many queries", run=cpu_attention.attend_many, supports=cpu_attention.can_attend_many)
FEW = _on_cpu("C++ few queries", run=cpu_attention.attend_few, supports=cpu_attention.can_attend_few)
KERNELS = (
    TRITON,
    MANY,
    FEW,
    _kernel("torch's flash", list, _attend_with_gradients, "cpu", prompt_attention.can_attend),
    _kernel("torch", list, attention_by_products),
)
