"""Relative positions of UniLM's version 2: biases of scores that depend on the distance from query to key.

Tests: tests/models/unilm/test_unilm_generate.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RelativePositions(nn.Linear):
    """One number for each head and bin, shared by all layers; the weight is `[heads, bins]`, as published."""

    def __init__(self, bins: int, heads: int, most: int) -> None:
        super().__init__(bins, heads, bias=False)
        self.most = most

    def forward(self, distances: Tensor) -> Tensor:
        """Returns what is added to scores, `[heads, L, N]`, for distances from query to key `[L, N]`, int64."""
        return self.weight[:, bins_of(distances, self.in_features, self.most)]


def bins_of(distances: Tensor, bins: int, most: int) -> Tensor:
    """Returns the bins `[…]` of distances `[…]`, int64, positive if the key comes after the query.

    Half of the bins is for each direction. In each half, near distances have their own bins, those up to `most` share
    bins in logarithmic steps, and all larger ones share the last (T5, arXiv:1910.10683, §2.1).
    """
    half, alone = bins // 2, bins // 4
    away = distances.abs()
    steps = torch.log(away.clamp(min=alone).float() / alone) / math.log(most / alone) * (half - alone)
    far = (alone + steps.long()).clamp(max=half - 1)
    return torch.where(away < alone, away, far) + (distances > 0) * half


def distances_of(seen: Tensor, cached: int | Tensor, append_mask: bool) -> Tensor:
    """Returns the distance of each key from each query, `[L, N]`, for masks `[rows, 1, L, N]`; appends `[MASK]`'s.

    cached: the number of keys before those of the queries. For a single query it is read from the mask: the last key
    that it sees is its own, even if hidden keys, which are not counted, come first.
    """
    length, count = seen.shape[-2:]
    keys = torch.arange(count, device=seen.device)
    first = cached if length > 1 else (seen[0, 0, 0] * keys).amax()
    return keys - (torch.arange(length + append_mask, device=seen.device) + first)[:, None]
