"""Attention whose query heads share key heads, without ever expanding the keys.

"Fast Transformer Decoding: One Write-Head is All You Need", §2.3 and §3: `num_key_value_heads` is h for multi-head
attention, 1 for multi-query attention, and a number between for grouped attention. The queries that share a key head
are folded into the query length, so that one product with the stored keys serves them all.

Tests: tests/models/mqa/test_attention.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class MQAAttention(nn.Module):
    """Multi-head, grouped or multi-query attention; the projections have no bias.

    The paper leaves the scale of the products to the projections; here it is `head_dim ** -0.5`, as in Vaswani et al.

    layer_idx: the layer's number in the cache; None in an encoder. is_causal: whether later positions are hidden.
    """

    def __init__(self, config: Any, layer_idx: int | None = None, is_causal: bool = False) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, is_causal
        self.head_dim, self.key_value_heads = config.head_dim, config.num_key_value_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        width, key_width = config.num_attention_heads * self.head_dim, self.key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.d_model, width, bias=False)
        self.k_proj = nn.Linear(config.d_model, key_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, key_width, bias=False)
        self.o_proj = nn.Linear(width, config.d_model, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        encoder_hidden_states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output `[B, n, d]`, and the weights `[B, H, n, m]` or None, if the function returns none.

        hidden_states `[B, n, d]`; attention_mask boolean or additive, broadcasting to `[B, 1, n, m]`, or None;
        encoder_hidden_states `[B, m, d]`: source of keys and values in place of the hidden states.
        """
        rows, length = hidden_states.shape[:2]
        if encoder_hidden_states is None:
            keys, values = self._own_states(hidden_states, cache)
        else:
            keys, values = self._encoder_states(encoder_hidden_states, cache)
        query = self.q_proj(hidden_states).view(rows, length, self.key_value_heads, self.groups, self.head_dim)
        query = query.transpose(1, 2).reshape(rows, self.key_value_heads, -1, self.head_dim)  # [B, H_kv, n*G, D]
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention)
        output, weights = attend(
            self,
            query,
            keys,
            values,
            self._folded_mask(attention_mask, query, length),
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.head_dim**-0.5,
            is_causal=self.is_causal and self.groups == 1 and length > 1 and attention_mask is None,
        )  # [B, n*G, H_kv, D]
        output = output.view(rows, length, self.groups, self.key_value_heads, self.head_dim).transpose(2, 3)
        if weights is not None:
            split = weights.unflatten(2, (length, self.groups)).transpose(2, 3)  # [B, H_kv, G, n, m]
            weights = split.flatten(1, 2)
        return self.o_proj(output.reshape(rows, length, -1)), weights

    def _own_states(self, hidden_states: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all positions so far, `[B, H_kv, m, D]`."""
        keys, values = self._projected(hidden_states)
        if cache is None:
            return keys, values
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        return cache.update(keys, values, self.layer_idx)

    def _encoder_states(self, states: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the encoder's output, `[B, H_kv, m, D]`, computed at the first step only."""
        if not isinstance(cache, EncoderDecoderCache):
            return self._projected(states)
        if not cache.is_updated.get(self.layer_idx):
            cache.is_updated[self.layer_idx] = True
            return cache.cross_attention_cache.update(*self._projected(states), self.layer_idx)
        layer = cache.cross_attention_cache.layers[self.layer_idx]
        return layer.keys, layer.values

    def _projected(self, states: Tensor) -> tuple[Tensor, Tensor]:
        heads = (*states.shape[:2], self.key_value_heads, self.head_dim)
        return self.k_proj(states).view(heads).transpose(1, 2), self.v_proj(states).view(heads).transpose(1, 2)

    def _folded_mask(self, mask: Tensor | None, query: Tensor, length: int) -> Tensor | None:
        """Returns the mask for queries `[B, H_kv, n*G, D]`; None if there is none, or `is_causal` replaces it."""
        if self.groups == 1 or length == 1:
            return mask  # one position, shared by all queries of a group
        if mask is None and self.is_causal:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
        return None if mask is None else mask.repeat_interleave(self.groups, dim=2)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Computes attention in plain torch: the output `[B, L, H_kv, D]` and the weights `[B, H_kv, L, m]`."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    precise = torch.promote_types(query.dtype, torch.float32)  # not in half precision
    weights = functional.softmax(scores, dim=-1, dtype=precise).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
