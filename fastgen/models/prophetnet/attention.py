"""The n-gram self-attention of ProphetNet (Qi et al., 2020, §2.2): a main stream, and streams that predict.

Every position of the main stream sees the main stream up to itself. The predict stream n, which is to tell the n-th
token from here, sees the main stream without its last n - 1 positions, and itself at its own position: one number
beside the main stream's scores, so that nothing is appended to the keys.

Tests: tests/models/prophetnet/test_prophetnet.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Streams:
    """What all layers of a forward have in common, of `L` queries (all positions of a stream, then the next stream).

    buckets: int64 `[L, S + 1]`, of the distance to each of `S` keys of the main stream, and last to the query's own.
    bias: `[L, S + 1]`, 0 or -inf, added to scores. length: positions of a stream.
    """

    buckets: Tensor
    bias: Tensor
    length: int


def make_streams(
    position: Tensor, keys: int, predict: int, num_buckets: int, max_distance: int, like: Tensor
) -> Streams:
    """For the main stream and `predict` others at these positions, int64 `[T, 1]` from 0; of the type of `like`.

    Keys behind a position, up to `keys`, are not seen.
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
    """The bucket of each distance from a query to a key before it (0 or less): exact for near ones, else logarithmic.

    As in T5 for one direction; distances of `max_distance` or more share the last bucket.
    """
    back, exact = (-distance).clamp(min=0), num_buckets // 2
    far = torch.log(back.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return torch.where(back < exact, back, (exact + far).clamp(max=num_buckets - 1).long())


class NgramMultiheadAttention(MultiheadAttention):
    """fairseq's attention with one more projection, of the distances, and with several streams of queries."""

    goes_by_states = True  # see fastgen.optimizer.fairseq.checks

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, num_buckets: int) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout, self_attention=True)
        self.num_buckets = num_buckets
        self.relative_linear = nn.Linear(embed_dim, num_buckets * num_heads)

    def forward(self, states: Tensor, streams: Streams, incremental_state: dict | None = None) -> Tensor:
        """`[L, B, C]` to `[L, B, C]`; with `incremental_state`, keys of the main stream are those of all steps."""
        query, key, value = (self._heads(project(states)) for project in (self.q_proj, self.k_proj, self.v_proj))
        keys, values = self._main(key[:, :, : streams.length], value[:, :, : streams.length], incremental_state)
        query = query * self.scaling
        own = (query * key).sum(-1, keepdim=True)
        scores = torch.cat([query @ keys.transpose(2, 3), own], dim=-1)  # [B, H, L, S + 1]
        scores = scores + self._relative(states, streams.buckets) + streams.bias
        precise = torch.promote_types(scores.dtype, torch.float32)  # not in half precision
        weights = functional.softmax(scores, dim=-1, dtype=precise).type_as(scores)
        weights = self.dropout_module(weights)
        result = weights[..., :-1] @ values + weights[..., -1:] * value  # the main stream's own weight is 0
        return self.out_proj(result.permute(2, 0, 1, 3).flatten(2))

    def _main(self, keys: Tensor, values: Tensor, incremental_state: Any) -> tuple[Tensor, Tensor]:
        """Those of all steps, `[B, H, S, D]`; a state that has a place for them keeps them."""
        if incremental_state is None:
            return keys, values
        has_place = getattr(incremental_state, "has_self", None)
        if has_place is not None and has_place(self):
            return incremental_state.append(self, keys, values)
        saved = self._get_input_buffer(incremental_state)
        if saved:
            keys, values = torch.cat([saved["prev_key"], keys], 2), torch.cat([saved["prev_value"], values], 2)
        self._set_input_buffer(incremental_state, {"prev_key": keys, "prev_value": values})
        return keys, values

    def _relative(self, states: Tensor, buckets: Tensor) -> Tensor:
        by_bucket = self.relative_linear(states).unflatten(2, (self.num_buckets, self.num_heads)).permute(1, 3, 0, 2)
        return by_bucket.gather(3, buckets.expand(*by_bucket.shape[:3], -1))

    def _heads(self, states: Tensor) -> Tensor:
        """`[L, B, C]` to `[B, H, L, D]`."""
        return states.unflatten(2, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)
