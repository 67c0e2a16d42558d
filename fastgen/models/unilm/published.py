"""Loading of state dicts that the authors of UniLM published.

Tests: tests/models/unilm/test_unilm_published.py
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.models.unilm.configuration import UniLMConfig
from fastgen.models.unilm.modeling import UniLMForConditionalGeneration

# Suffixes of names in older files, and their names here.
_RENAMED = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
    "self.q_bias": "self.query.bias",
    "self.v_bias": "self.value.bias",
}
_JOINED = "self.qkv_linear.weight"


class Published(NamedTuple):
    """The result of `load_published`: the model, the names that the file lacks, and those that the model lacks."""

    model: UniLMForConditionalGeneration
    missing: list[str]
    unexpected: list[str]


def load_published(
    model: UniLMForConditionalGeneration | UniLMConfig, weights: Mapping[str, Tensor] | str | os.PathLike[str]
) -> Published:
    """Loads weights with the published names into a model, or into a new one with this configuration, for evaluation.

    weights: a state dict, or the path of a file of `torch.save` (only tensors are read from it). Supported layouts:
    `bert.encoder.layer.0.attention.self.query.weight` and so on (version 1); the same with `LayerNorm.gamma` and
    `LayerNorm.beta`; and query, key and value in one `attention.self.qkv_linear.weight` with `q_bias` and `v_bias`
    (version 2; keys have no bias there). The prefix `module.`, from parallel training, is removed.

    Missing and unexpected names are returned and, if there are any, logged as a warning. Published files have a pooler
    and `cls.seq_relationship`, which are unexpected. The output's weights are the word embeddings, so never missing.
    Raises RuntimeError, with the names, for weights of another shape.
    """
    states = weights if isinstance(weights, Mapping) else torch.load(weights, map_location="cpu", weights_only=True)
    if isinstance(model, UniLMConfig):
        model = UniLMForConditionalGeneration(model).eval()
    mismatch = model.load_state_dict(_renamed(states), strict=False)
    model.tie_weights()
    tied = model._tied_weights_keys if model.config.tie_word_embeddings else {}
    missing = [name for name in mismatch.missing_keys if tied.get(name, name) in mismatch.missing_keys]
    for what, names in (("misses", missing), ("has more than the model:", mismatch.unexpected_keys)):
        if names:
            logging.getLogger("fastgen").warning("the UniLM state dict %s %s", what, ", ".join(names))
    return Published(model, missing, list(mismatch.unexpected_keys))


def _renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        name = name.removeprefix("module.")
        for old, current in _RENAMED.items():
            if name.endswith(old):
                name = name.removesuffix(old) + current
        if name.endswith(_JOINED):
            start = name.removesuffix("qkv_linear.weight")
            query, key, value = tensor.chunk(3)
            renamed |= {f"{start}query.weight": query, f"{start}key.weight": key, f"{start}value.weight": value}
            renamed[f"{start}key.bias"] = tensor.new_zeros(len(key))
        else:
            renamed[name] = tensor
    return renamed
