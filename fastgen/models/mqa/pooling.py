"""Pooling of key heads: a checkpoint gets fewer key heads, each the mean of those that it replaces.

The means are a start for further training ("GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
Checkpoints", §2.1); without training, the model's outputs change.

Tests: tests/models/mqa/test_pooling.py
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import BartForConditionalGeneration, PreTrainedModel, T5ForConditionalGeneration

from fastgen.models.mqa.grouped import GroupedBartForConditionalGeneration, GroupedT5ForConditionalGeneration

# Classes of transformers with a key head for each query head, and their counterparts with fewer.
GROUPED: dict[Any, Any] = {
    BartForConditionalGeneration: GroupedBartForConditionalGeneration,
    T5ForConditionalGeneration: GroupedT5ForConditionalGeneration,
}
PROJECTIONS = ("k_proj", "v_proj", "k", "v")


def pool_kv_heads(model: PreTrainedModel, num_key_value_heads: int) -> PreTrainedModel:
    """Returns a model with `num_key_value_heads` key heads in every attention layer, each the mean of its neighbors.

    model: a multi-query Transformer, BART or T5 for conditional generation, or a model like Llama, whose configuration
    has `num_key_value_heads`, and whose layers have projections `k_proj` and `v_proj`. It is not changed. The result
    has its dtype, device and mode; for BART and T5 it is of the class `Grouped…`.

    Raises ValueError for other models, and for a number that does not divide the present number of heads.
    """
    pooled = _with_fewer_heads(model, num_key_value_heads)
    states = pooled.state_dict()
    for name, weight in model.state_dict().items():
        states[name] = _pooled(name, weight, states[name], num_key_value_heads)
    pooled.load_state_dict(states)
    pooled.generation_config = copy.deepcopy(model.generation_config)
    return pooled.to(device=model.device).train(model.training)


def _with_fewer_heads(model: PreTrainedModel, num_key_value_heads: int) -> PreTrainedModel:
    kind: Any = GROUPED.get(type(model), type(model))
    if type(model) not in GROUPED and not hasattr(model.config, "num_key_value_heads"):
        raise ValueError(
            f"{type(model).__name__} has no num_key_value_heads (supported: MQATransformer…, "
            "BartForConditionalGeneration, T5ForConditionalGeneration, and models like Llama)"
        )
    sizes = model.config.to_dict() | {"num_key_value_heads": num_key_value_heads}
    old_heads = getattr(model.config, "num_key_value_heads", num_key_value_heads)
    if num_key_value_heads < 1 or old_heads % num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads={num_key_value_heads} does not divide the {old_heads} key heads of the model"
        )
    sizes.pop("model_type")
    return kind(kind.config_class(**sizes)).to(model.dtype)


def _pooled(name: str, weight: Tensor, fewer: Tensor, heads: int) -> Tensor:
    """Returns `weight` `[H * D, …]` pooled to the size of `fewer` `[heads * D, …]`, or itself if it has that size."""
    if weight.shape == fewer.shape:
        return weight
    *_, projection, _ = name.split(".")
    if projection not in PROJECTIONS:
        raise ValueError(f"{name} depends on num_key_value_heads (supported: {', '.join(PROJECTIONS)})")
    width = fewer.shape[0] // heads
    return weight.view(heads, -1, width, *weight.shape[1:]).mean(dim=1).flatten(0, 1)
