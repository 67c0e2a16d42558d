"""Small model classes of a program's own, whose attention is whatever a test makes of it."""

from __future__ import annotations

import torch
from architectures import SPECIAL, VOCABULARY
from parity import lively
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 8, 32


class OddConfig(PretrainedConfig):
    model_type = "odd"

    def __init__(self, **kwargs):
        super().__init__(**SPECIAL | kwargs)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = VOCABULARY, HIDDEN, 2
        self.num_attention_heads = HEADS


class OddModel(PreTrainedModel, GenerationMixin):
    """Two layers of attention without positions; `attend(query, keys, values, mask)` is what a test makes of it."""

    config_class = OddConfig
    _supports_sdpa = True

    def __init__(self, config: OddConfig, attend=None) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.query = nn.ModuleList(nn.Linear(HIDDEN, HEADS * WIDTH) for _ in range(2))
        self.key_value = nn.ModuleList(nn.Linear(HIDDEN, 2 * KV_HEADS * WIDTH) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.attend = attend
        self.post_init()

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, **kwargs):
        hidden_states = self.embed(input_ids)  # [rows, length, hidden]
        rows, length = input_ids.shape
        for index in range(2):
            query = self.query[index](hidden_states).view(rows, length, HEADS, WIDTH).transpose(1, 2)
            both = self.key_value[index](hidden_states).view(rows, length, 2 * KV_HEADS, WIDTH).transpose(1, 2)
            keys, values = both.chunk(2, dim=1)
            if past_key_values is not None:
                keys, values = past_key_values.update(keys, values, index)
            total = keys.shape[2]
            mask = torch.ones(length, total, dtype=torch.bool).tril(total - length)
            mask = mask & attention_mask[:, None, None, :total].bool()  # [rows, 1, length, total]
            mask = torch.where(mask, 0.0, -1e9).to(query.dtype)
            attended = self.attend(query, keys, values, mask)
            hidden_states = hidden_states + attended.transpose(1, 2).reshape(rows, length, HIDDEN)
        return CausalLMOutputWithPast(logits=self.head(hidden_states), past_key_values=past_key_values)


def weigh(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores * WIDTH**-0.5 + mask).softmax(dim=-1)


def repeated(states: Tensor) -> Tensor:
    return states.repeat_interleave(HEADS // KV_HEADS, dim=1)


def odd_model(attend) -> OddModel:
    own_class = type("OddModel", (OddModel,), {})  # whether a class can be trusted is found out once for each
    return lively(own_class(OddConfig(), attend)).eval()
