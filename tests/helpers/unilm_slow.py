"""UniLM from its definition: the whole sequence at each step, no cache, row by row, masks pair by pair."""

import math
from typing import Any

import torch
from tiny_models import lively
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.t5.modeling_t5 import T5Attention

from fastgen.models.unilm import UniLMConfig, UniLMForConditionalGeneration

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": 3,
}


def tiny_unilm(kind: type = UniLMForConditionalGeneration, **overrides: Any) -> UniLMForConditionalGeneration:
    """Returns a lively model in evaluation mode, with biases and norms that have a say as well."""
    model = lively(kind(UniLMConfig(**SIZES | overrides))).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator)
    return model


def sees(kind: str, query: int, key: int, source: int, length: int) -> bool:
    """Figure 1 of the paper, for one pair of places in a sequence of `source` tokens and others after them."""
    if key >= length:
        return False
    if kind == "bidirectional":
        return True
    if kind == "left-to-right":
        return key <= query
    if query < source:
        return key < source
    return key < source or source <= key <= query


def relative_bias(model: UniLMForConditionalGeneration, head: int, length: int) -> Tensor:
    """Returns what version 2 adds to the scores of a head, `[length, length]`, pair by pair."""
    if not model.config.rel_pos_bins:
        return torch.zeros(length, length, dtype=model.dtype)
    weight, places = model.state_dict()["bert.rel_pos_bias.weight"], torch.arange(length)
    bins = T5Attention._relative_position_bucket(
        places - places[:, None], True, model.config.rel_pos_bins, model.config.max_rel_pos
    )
    return torch.stack([torch.stack([weight[head, number] for number in row]) for row in bins])


def slow_logits(model: UniLMForConditionalGeneration, ids: list[int], types: list[int], mask: Tensor) -> Tensor:
    """Returns logits `[length, vocab_size]` of one sequence, from the weights by their published names."""
    weights, config = model.state_dict(), model.config

    def linear(name: str, states: Tensor) -> Tensor:
        return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, states: Tensor) -> Tensor:
        centered = states - states.mean(-1, keepdim=True)
        scaled = centered / (centered.square().mean(-1, keepdim=True) + config.layer_norm_eps).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    states = weights["bert.embeddings.word_embeddings.weight"][ids]
    states = states + weights["bert.embeddings.position_embeddings.weight"][: len(ids)]
    if config.type_vocab_size:
        states = states + weights["bert.embeddings.token_type_embeddings.weight"][types]
    states = norm("bert.embeddings.LayerNorm", states)
    width = config.hidden_size // config.num_attention_heads
    for index in range(config.num_hidden_layers):
        layer = f"bert.encoder.layer.{index}"
        query, key, value = (linear(f"{layer}.attention.self.{name}", states) for name in ("query", "key", "value"))
        heads = []
        for head in range(config.num_attention_heads):
            part = slice(head * width, (head + 1) * width)
            scores = query[:, part] @ key[:, part].T / math.sqrt(width) + relative_bias(model, head, len(ids))
            heads.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value[:, part])
        attended = linear(f"{layer}.attention.output.dense", torch.cat(heads, dim=-1))
        states = norm(f"{layer}.attention.output.LayerNorm", states + attended)
        inner = functional.gelu(linear(f"{layer}.intermediate.dense", states))
        states = norm(f"{layer}.output.LayerNorm", states + linear(f"{layer}.output.dense", inner))
    states = norm(
        "cls.predictions.transform.LayerNorm", functional.gelu(linear("cls.predictions.transform.dense", states))
    )
    return states @ weights["bert.embeddings.word_embeddings.weight"].T + weights["cls.predictions.bias"]


def next_logits(model: UniLMForConditionalGeneration, source: list[int], target: list[int]) -> Tensor:
    """Returns logits `[vocab_size]` of the token after this source and target, all computed from the start."""
    config = model.config
    ids = [*source, *target, config.mask_token_id]
    types = [config.source_type_id] * len(source) + [config.target_type_id] * (len(target) + 1)
    places = range(len(ids))
    mask = torch.tensor([[sees("sequence-to-sequence", q, k, len(source), len(ids)) for k in places] for q in places])
    return slow_logits(model, ids, types, mask)[-1]


class SlowUniLM(UniLMForConditionalGeneration):
    """The same weights under transformers' `generate`, without a cache."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, source_length: int, **_: Any
    ) -> CausalLMOutputWithPast:
        rows = []
        for ids, is_token in zip(input_ids, attention_mask.bool()):
            source, target = ids[:source_length], ids[source_length:]
            rows.append(next_logits(self, source[is_token[:source_length]].tolist(), target.tolist()))
        return CausalLMOutputWithPast(logits=torch.stack(rows)[:, None])
