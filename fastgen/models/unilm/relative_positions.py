"""Relative positions of UniLM's version 2: what is added to scores for how far a key is from a query.

Tests: tests/models/unilm/test_unilm_generate.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RelativePositions(nn.Linear):
    """One number for each head and bin, the same in all layers; its weight is `[heads, bins]`, as published."""

    def __init__(self, bins: int, heads: int, most: int) -> None:
        super().__init__(bins, heads, bias=False)
        self.most = most

    def forward(self, distances: Tensor) -> Tensor:
        """What is added to the scores, `[heads, L, N]`, for distances from query to key `[L, N]`, int64."""
        return self.weight[:, bins_of(distances, self.in_features, self.most)]


def bins_of(distances: Tensor, bins: int, most: int) -> Tensor:
    """The bins `[…]` of distances `[…]`, int64, positive where the key comes after the query.

    Half of the bins is for each direction. In each half the near distances have a bin of their own, those up to `most`
    share bins in logarithmic steps, and all beyond share the last (T5, arXiv:1910.10683, §2.1).
    """
    half, alone = bins // 2, bins // 4
    away = distances.abs()
    steps = torch.log(away.clamp(min=alone).float() / alone) / math.log(most / alone) * (half - alone)
    far = (alone + steps.long()).clamp(max=half - 1)
    return torch.where(away < alone, away, far) + (distances > 0) * half


def distances_of(seen: Tensor, cached: int | Tensor, append_mask: bool) -> Tensor:
    """How far each key is from each query, `[L, N]`, for masks `[rows, 1, L, N]`; of a `[MASK]` behind them, too.

    cached: how many keys come before those of the queries. For a single query that is asked from the mask: the last key
    that it sees is its own, also where keys are preceded by hidden ones that are not counted.
    """
    length, count = seen.shape[-2:]
    keys = torch.arange(count, device=seen.device)
    first = cached if length > 1 else (seen[0, 0, 0] * keys).amax()
    return keys - (torch.arange(length + append_mask, device=seen.device) + first)[:, None]
