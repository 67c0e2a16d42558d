"""Folding: the queries of all rows that share keys become queries of one row.

Rows that share keys, and query heads that share a key head, are folded into the query length of one product with these
keys (FastSeq §4.1, MultiGen §3.3, grouped heads as in "Fast Transformer Decoding").

Tests: tests/ops/test_shared_attention.py
"""

from __future__ import annotations

from torch import Tensor


def fold(rows: Tensor, rows_per_copy: int, kv_heads: int) -> Tensor:
    """Folds `[B*M, H, L, X]` to `[B, H_kv, M*G*L, X]`, where `H = H_kv * G` and `M = rows_per_copy`."""
    row_count, heads, length, width = rows.shape
    copies, groups = row_count // rows_per_copy, heads // kv_heads
    if rows_per_copy == 1:
        return rows.reshape(copies, kv_heads, groups * length, width)
    split = rows.reshape(copies, rows_per_copy, kv_heads, groups * length, width)  # [B, M, H_kv, G*L, X]
    return split.transpose(1, 2).reshape(copies, kv_heads, rows_per_copy * groups * length, width)


def unfold(folded: Tensor, rows_per_copy: int, heads: int) -> Tensor:
    """Unfolds `[B, H_kv, M*G*L, X]` to `[B*M, H, L, X]`, the inverse of `fold`."""
    copies, kv_heads, _, width = folded.shape
    if rows_per_copy == 1:
        return folded.reshape(copies, heads, -1, width)
    split = folded.reshape(copies, kv_heads, rows_per_copy, -1, width).transpose(1, 2)  # [B, M, H_kv, G*L, X]
    return split.reshape(copies * rows_per_copy, heads, -1, width)


def fold_mask(mask: Tensor, rows_per_copy: int, kv_heads: int, heads: int, length: int) -> Tensor:
    """Folds a mask that broadcasts to `[B*M, H, L, S]`: the result broadcasts to scores `[B, H_kv, M*G*L, S]`."""
    if mask.dim() < 4:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    rows, mask_heads, mask_length, width = mask.shape
    if rows == 1 and mask_heads == 1 and mask_length == 1:
        return mask
    groups = heads // kv_heads
    copies = max(rows // rows_per_copy, 1)
    mask = mask.expand(max(rows, rows_per_copy), mask_heads, length, width)
    if mask_heads == 1:
        split = mask.reshape(copies, rows_per_copy, 1, length, width)
        split = split.expand(-1, -1, groups, -1, -1)  # [B, M, G, L, S]
        return split.reshape(copies, 1, rows_per_copy * groups * length, width)
    return fold(mask, rows_per_copy, kv_heads)
