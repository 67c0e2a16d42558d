"""ProphetNet's n-gram self-attention as a module of fairseq, see `fastgen/models/predict_streams.py`.

Tests: tests/models/prophetnet/test_prophetnet.py
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fastgen.models.predict_streams import Streams, attend


class NgramMultiheadAttention(MultiheadAttention):
    """fairseq's attention with another projection, for distances, and with several streams of queries."""

    supports_external_kv_cache = True  # see fastgen.optimizer.fairseq.checks

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, num_buckets: int) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout, self_attention=True)
        self.num_buckets = num_buckets
        self.relative_linear = nn.Linear(embed_dim, num_buckets * num_heads)

    def forward(self, states: Tensor, streams: Streams, incremental_state: dict | None = None) -> Tensor:
        """Maps `[L, B, C]` to `[L, B, C]`; with `incremental_state`, the main stream has the keys of all steps."""
        query, key, value = (self._heads(project(states)) for project in (self.q_proj, self.k_proj, self.v_proj))
        keys, values = self._main(key[:, :, : streams.length], value[:, :, : streams.length], incremental_state)
        bias = self._relative(states, streams.buckets) + streams.bias
        result = attend(query * self.scaling, key, value, keys, values, bias, self.dropout_module)
        return self.out_proj(result.permute(2, 0, 1, 3).flatten(2))

    def _main(self, keys: Tensor, values: Tensor, incremental_state: Any) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all steps, `[B, H, S, D]`, and stores them in the state if it supports that."""
        if incremental_state is None:
            return keys, values
        has_self = getattr(incremental_state, "has_self", None)
        if has_self is not None and has_self(self):
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
        """Splits heads: `[L, B, C]` to `[B, H, L, D]`."""
        return states.unflatten(2, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)
