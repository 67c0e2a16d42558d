"""BART and T5 with fewer key heads than query heads, which transformers does not have.

They are the library's models with smaller projections of keys and values. The library's attention function (sdpa) gets
the number of query heads per key head, as for Llama.

Tests: tests/models/mqa/test_pooling.py
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForSeq2SeqLM, BartForConditionalGeneration, T5ForConditionalGeneration
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.t5.modeling_t5 import T5Attention

from fastgen.models.mqa.grouped_configuration import GroupedBartConfig, GroupedT5Config


class GroupedBartForConditionalGeneration(BartForConditionalGeneration):
    """BART whose keys and values have `config.num_key_value_heads` heads; with sdpa only."""

    config_class = GroupedBartConfig

    def __init__(self, config: GroupedBartConfig) -> None:
        super().__init__(config)
        for attention in _attentions(self, BartAttention):
            _keep_fewer(attention, attention.num_heads, ("k_proj", "v_proj"))
        self.post_init()


class GroupedT5ForConditionalGeneration(T5ForConditionalGeneration):
    """T5 whose keys and values have `config.num_key_value_heads` heads; with sdpa only."""

    config_class = GroupedT5Config

    def __init__(self, config: GroupedT5Config) -> None:
        super().__init__(config)
        for attention in _attentions(self, T5Attention):
            _keep_fewer(attention, attention.n_heads, ("k", "v"))
        self.post_init()


def _attentions(model: Any, kind: type[nn.Module]) -> list[Any]:
    implementation = model.config._attn_implementation
    if implementation != "sdpa":
        raise ValueError(f"attn_implementation={implementation!r} of {type(model).__name__} (supported: 'sdpa')")
    return [module for module in model.modules() if isinstance(module, kind)]


def _keep_fewer(attention: Any, heads: int, projections: tuple[str, str]) -> None:
    """Replaces the projections of keys and values of an attention with `heads` heads by smaller ones."""
    key_heads = attention.config.num_key_value_heads
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"num_key_value_heads={key_heads} does not divide the {heads} heads of the attention")
    for name in projections:
        whole = getattr(attention, name)
        part = nn.Linear(whole.in_features, whole.out_features // heads * key_heads, bias=whole.bias is not None)
        setattr(attention, name, part)
    attention.num_key_value_groups = heads // key_heads


AutoModelForSeq2SeqLM.register(GroupedBartConfig, GroupedBartForConditionalGeneration, exist_ok=True)
AutoModelForSeq2SeqLM.register(GroupedT5Config, GroupedT5ForConditionalGeneration, exist_ok=True)
