"""Whether the decode steps of a call of transformers can be captured.

Tests: tests/optimizer/transformers/test_recorded_step.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from fastgen.optimizer.decoding import recordable
from fastgen.optimizer.decoding.reasons import REORDERS_ITSELF, Reason
from fastgen.optimizer.transformers import model_reasons, positions
from fastgen.optimizer.transformers.kv_layers import layer_reasons

# Static layers have the length that `KVLayer` gives: a tensor without a dimension, as in transformers 5.17.
LAYERS_ARE_KNOWN = getattr(StaticLayer(1), "cumulative_length", torch.ones(1)).dim() == 0


def unwanted_reasons(generation_config: Any, input_ids: Tensor) -> list[Reason]:
    """Why the steps after `input_ids` are not even tried to be captured; empty if they are."""
    return recordable.unwanted_reasons(input_ids.device, _steps(generation_config, input_ids))


def can_capture(model: Any, generation_config: Any, input_ids: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether a loop that begins with these `model_kwargs` should try to; tells the report why not."""
    reasons = partial(unsupported_reasons, model, generation_config, input_ids, arguments)
    return recordable.can_capture(model, model, _steps(generation_config, input_ids), reasons)


def unsupported_reasons(
    model: Any, generation_config: Any, input_ids: Tensor, arguments: dict[str, Any]
) -> list[Reason]:
    """Why the steps of a call are not captured, as far as that is known before its prefill; empty if they can be."""
    reasons: list[Reason] = []
    if not LAYERS_ARE_KNOWN:
        reasons.append(Reason("TRANSFORMERS_VERSION", "transformers before 5.17 has other static caches"))
    if not arguments.get("use_cache"):
        reasons.append(Reason("NO_CACHE", "use_cache is not set"))
    if not getattr(model, "_can_compile_fullgraph", False) and model.config.model_type not in positions.MODEL_TYPES:
        text = f"{type(model).__name__}.forward may synchronise with the device (not _can_compile_fullgraph)"
        reasons.append(Reason("MAY_SYNC", text))
    if (attention := getattr(model.config, "_attn_implementation", None)) not in ("sdpa", "eager"):
        reasons.append(Reason("ATTENTION", f"attention {attention} (supported: sdpa, eager)"))
    if getattr(model, "hf_quantizer", None) is not None:
        reasons.append(Reason("QUANTIZED", "the model is quantized"))
    if (cache := arguments.get("past_key_values")) is not None:
        reasons += layer_reasons(cache, generation_config.max_length or 0)
    reasons += positions.table_reasons(model, generation_config.max_length or 0)
    if hasattr(model, "_reorder_cache"):
        reasons.append(REORDERS_ITSELF)
    if not reasons:
        reasons += recordable.unsupported_reasons(model, input_ids.shape[0], _steps(generation_config, input_ids))
    if not reasons:
        reasons += model_reasons.model_reasons(model) or recordable.device_reasons(model_reasons.facts_of(model))
    return reasons


def _steps(generation_config: Any, input_ids: Tensor) -> int:
    """How many steps there are at most."""
    return (generation_config.max_length or 0) - input_ids.shape[1]
