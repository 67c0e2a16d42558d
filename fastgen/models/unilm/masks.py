"""The three kinds of self-attention masks of UniLM (Figure 1 and §2.3 of the paper).

Tests: tests/models/unilm/test_unilm_masks.py
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("bidirectional", "left-to-right", "sequence-to-sequence")


def visible(queries: Tensor, keys: Tensor, source_end: Tensor | int) -> Tensor:
    """Returns whether each query sees each key: all see the source, and later tokens see earlier ones and themselves.

    queries `[…, L, 1]`, keys `[…, 1, N]`: their indices in the sequence; source_end: the index where the source ends,
    broadcasting to `[…, L, N]`. Result `[…, L, N]`, boolean.

    The source comes before the target, so it sees nothing of the target.
    """
    return (keys <= queries) | (keys < source_end)


def attention_masks(kind: str, lengths: Tensor, source_lengths: Tensor | None = None) -> Tensor:
    """Returns the masks of sequences padded at their ends: which token (second axis) sees which (third axis).

    kind: one of `KINDS`.
        "bidirectional": every token sees all tokens of its sequence.
        "left-to-right": every token sees itself and the tokens before it.
        "sequence-to-sequence": a source token sees the source; a target token sees the source, itself, and earlier
        tokens of the target.
    lengths `[rows]`, int64: tokens of each sequence, source and target together.
    source_lengths `[rows]`, int64: tokens of each source; for "sequence-to-sequence" only.
    Result `[rows, longest, longest]`, boolean, True for visible tokens. Padding is never visible.

    The paper's right-to-left mask is not supported. Raises ValueError for another kind, and if `source_lengths` is
    missing or not needed.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: choose from {', '.join(KINDS)}")
    if (source_lengths is None) == (kind == "sequence-to-sequence"):
        raise ValueError(f'source_lengths={source_lengths} for kind={kind!r}: only "sequence-to-sequence" needs them')
    ends = source_lengths
    if ends is None:
        ends = lengths if kind == "bidirectional" else torch.zeros_like(lengths)
    positions = torch.arange(int(lengths.max()), device=lengths.device)
    is_token = positions < lengths[:, None]  # [rows, longest]
    return visible(positions[:, None], positions, ends[:, None, None]) & is_token[:, None]
