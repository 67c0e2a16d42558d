"""The network of UniLM: BERT's, with a `[MASK]` that only itself sees.

Modules are named so that the state dict has the published names.

Tests: tests/models/unilm/test_unilm_generate.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput, BertSelfOutput

from fastgen.models.unilm.configuration import UniLMConfig


class UniLMEmbeddings(nn.Module):
    """The sums of word, position and segment embeddings, `[rows, length, hidden_size]`."""

    def __init__(self, config: UniLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = (
            nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        if self.token_type_embeddings is not None:
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(embeddings))


class UniLMSelfAttention(nn.Module):
    """Attention to the tokens of the cache and the inputs; an appended `[MASK]` also attends to itself."""

    def __init__(self, config: UniLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.num_heads = config.num_attention_heads
        self.layer_idx = layer_idx
        self.dropout = config.attention_probs_dropout_prob

    def forward(
        self, hidden: Tensor, bias: Tensor, own_bias: Tensor | float, cache: Cache | None, append_mask: bool
    ) -> Tensor:
        """Returns the output `[rows, L, width]` before its projection.

        hidden `[rows, L, width]`, ending with `[MASK]` if append_mask; bias `[rows, 1 or heads, L, N]` is added to the
        scores of the N keys without `[MASK]`'s, own_bias `[heads, 1, 1]` to the score of its own key.
        """
        query, key, value = (
            linear(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [rows, heads, L, D]
            for linear in (self.query, self.key, self.value)
        )
        tokens = hidden.shape[1] - append_mask
        keys, values = key[:, :, :tokens], value[:, :, :tokens]
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        first = 0 if append_mask and tokens == 1 else tokens  # a single token and [MASK] share one product
        parts = []
        if first:
            seen = bias[:, :, :first]
            dropout = self.dropout if self.training else 0.0
            output = functional.scaled_dot_product_attention(query[:, :, :first], keys, values, seen, dropout)
            parts.append(output)
        if append_mask:
            own = key[:, :, -1:], value[:, :, -1:]
            parts.append(attention_with_own(query[:, :, first:], keys, values, bias[:, :, first:], *own, own_bias))
        context = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        return context.transpose(1, 2).flatten(2)


def attention_with_own(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    own_bias: Tensor | float,
) -> Tensor:
    """Computes attention in which the last query sees one more key than the other queries, its own.

    query `[rows, heads, L, D]`; keys and values `[rows, heads, N, D]`; own_key and own_value `[rows, heads, 1, D]`.
    bias, broadcasting to `[rows, heads, L, N]`, is added to scores, with -inf for hidden keys; own_bias, broadcasting
    to `[rows, heads, 1, 1]`, to the score of the last query's own key. Result `[rows, heads, L, D]`.

    The own key is not appended to the other keys, which may be stored in segments that all rows of an input share.
    """
    query = query * query.shape[-1] ** -0.5
    scores = query @ keys.transpose(-1, -2) + bias
    own = (query * own_key).sum(dim=-1, keepdim=True) + own_bias  # [rows, heads, L, 1]
    own[:, :, :-1] = float("-inf")
    scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return weights[..., :-1] @ values + weights[..., -1:] * own_value


class UniLMLayer(nn.Module):
    """Attention and a feed-forward layer, each followed by a sum with its input and a layer norm."""

    def __init__(self, config: UniLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": UniLMSelfAttention(config, layer_idx), "output": BertSelfOutput(config)}
        )
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(self, hidden: Tensor, *attention: Any) -> Tensor:
        """Runs the layer; attention: the further arguments of `UniLMSelfAttention`."""
        attended = self.attention["output"](self.attention["self"](hidden, *attention), hidden)
        return self.output(self.intermediate(attended), attended)


class UniLMEncoder(nn.Module):
    """The layers in sequence."""

    def __init__(self, config: UniLMConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(UniLMLayer(config, index) for index in range(config.num_hidden_layers))

    def forward(self, hidden: Tensor, *attention: Any) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden, *attention)
        return hidden


class UniLMHead(nn.Module):
    """The output layer: logits `[rows, length, vocab_size]`, with the weights of the word embeddings."""

    def __init__(self, config: UniLMConfig) -> None:
        super().__init__()
        self.transform = nn.ModuleDict(
            {
                "dense": nn.Linear(config.hidden_size, config.hidden_size),
                "LayerNorm": nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
            }
        )
        self.activation = ACT2FN[config.hidden_act]
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.activation(self.transform["dense"](hidden))
        return self.decoder(self.transform["LayerNorm"](hidden)) + self.bias
