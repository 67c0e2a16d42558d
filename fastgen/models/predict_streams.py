"""The streams of ProphetNet (Qi et al., 2020, §2.2): a main stream, and predict streams. Knows no host.

Every position of the main stream sees the main stream up to itself. Predict stream n, which predicts the n-th next
token, sees the main stream without its last n - 1 positions, and itself at its own position. That is one number in
addition to the main stream's scores, so nothing is appended to the keys.

Tests: tests/models/prophetnet/test_prophetnet.py, tests/optimizer/transformers/test_prophetnet.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Streams:
    """The common inputs of all layers of a forward, for `L` queries (all positions of a stream, then the next stream).

    buckets: int64 `[L, S + 1]`, the buckets of the distances to `S` keys of the main stream and to the query's own key.
    bias: `[L, S + 1]`, 0 or -inf, added to scores. length: the number of positions of a stream.
    """

    buckets: Tensor
    bias: Tensor
    length: int


def make_streams(
    position: Tensor, keys: int, predict: int, num_buckets: int, max_distance: int, like: Tensor
) -> Streams:
    """Returns the main stream and `predict` more streams at positions int64 `[T, 1]` from 0, with the dtype of `like`.

    Keys after a position, up to `keys`, are hidden.
    """
    length = len(position)
    key = torch.arange(keys, device=like.device)[None]
    own = torch.zeros_like(position)
    distances = [torch.cat([key - position, own], dim=1)]
    seen = [torch.cat([key <= position, own.bool()], dim=1)]
    for skipped in range(predict):
        distances.append(torch.cat([key - position - 1, own], dim=1))
        seen.append(torch.cat([key <= (position - skipped).clamp(min=0), ~own.bool()], dim=1))
    bias = torch.zeros(length * (1 + predict), keys + 1, dtype=like.dtype, device=like.device)
    bias.masked_fill_(~torch.cat(seen), float("-inf"))
    return Streams(bucket_of(torch.cat(distances), num_buckets, max_distance), bias, length)


def bucket_of(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket of each distance from a query to an earlier key (0 or less): exact if near, else logarithmic.

    It is T5's formula for one direction; distances of `max_distance` or more share the last bucket.
    """
    back = (-distance).clamp(min=0)
    exact = num_buckets // 2
    far = torch.log(back.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return torch.where(back < exact, back, (exact + far).clamp(max=num_buckets - 1).long())


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, bias: Tensor, dropout: Any = None
) -> Tensor:
    """Computes attention of all streams to the main stream and to themselves.

    query: scaled, `[B, H, L, D]`; key, value: the queries' own. keys, values: of the main stream, `[B, H, S, D]`. bias:
    added to scores, `[…, L, S + 1]`.
    """
    own = (query * key).sum(-1, keepdim=True)
    scores = torch.cat([query @ keys.transpose(2, 3), own], dim=-1) + bias
    precise = torch.promote_types(scores.dtype, torch.float32)  # not in half precision
    weights = functional.softmax(scores, dim=-1, dtype=precise).type_as(scores)
    weights = weights if dropout is None else dropout(weights)
    return weights[..., :-1] @ values + weights[..., -1:] * value  # the main stream's own weight is 0
