"""BART and T5 with fewer key heads than query heads, which transformers has not.

They are the library's models: only the projections of keys and values are smaller, and the library's attention function
(sdpa) is told how many query heads share a key head, as for Llama.

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
    """BART whose keys and values have `config.num_key_value_heads` heads; sdpa only. Else as `BartFor…`."""

    config_class = GroupedBartConfig

    def __init__(self, config: GroupedBartConfig) -> None:
        super().__init__(config)
        for attention in _attentions(self, BartAttention):
            _keep_fewer(attention, attention.num_heads, ("k_proj", "v_proj"))
        self.post_init()


class GroupedT5ForConditionalGeneration(T5ForConditionalGeneration):
    """T5 whose keys and values have `config.num_key_value_heads` heads; sdpa only. Else as `T5For…`."""

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
    """Gives an attention of `heads` heads projections of keys and values for fewer."""
    kept = attention.config.num_key_value_heads
    if kept < 1 or heads % kept:
        raise ValueError(f"num_key_value_heads={kept} does not divide the {heads} heads of the attention")
    for name in projections:
        whole = getattr(attention, name)
        part = nn.Linear(whole.in_features, whole.out_features // heads * kept, bias=whole.bias is not None)
        setattr(attention, name, part)
    attention.num_key_value_groups = heads // kept


AutoModelForSeq2SeqLM.register(GroupedBartConfig, GroupedBartForConditionalGeneration, exist_ok=True)
AutoModelForSeq2SeqLM.register(GroupedT5Config, GroupedT5ForConditionalGeneration, exist_ok=True)
