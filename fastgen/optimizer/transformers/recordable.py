"""Whether the decode steps of a call can be recorded, and whether that pays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from fastgen.config import CONFIG
from fastgen.ops.cpu_linear import few_rows
from fastgen.ops.transforms import is_transformed, is_watched
from fastgen.optimizer.decoding import gain
from fastgen.optimizer.transformers import eligibility
from fastgen.optimizer.transformers.static_layers import layer_reasons

# To look at the model takes the time of some steps (not yet measured on a GPU).
MIN_STEPS = 16

# A new recording is made after so many steps of a call, because many end early.
STEPS_BEFORE = 8

# Static layers have the length that `FixedLayer` gives: a tensor without a dimension, as in transformers 5.17.
LAYERS_ARE_KNOWN = getattr(StaticLayer(1), "cumulative_length", torch.ones(1)).dim() == 0


def are_wanted(generation_config: Any, input_ids: Tensor) -> bool:
    """Whether the steps after `input_ids` are enough to be recorded, and FASTGEN_CUDA_GRAPHS allows it."""
    is_off = CONFIG.cuda_graphs == "off" or input_ids.device.type not in ("cuda", "cpu")
    return not is_off and _steps(generation_config, input_ids) >= MIN_STEPS


def _steps(generation_config: Any, input_ids: Tensor) -> int:
    """How many steps there are at most."""
    return (generation_config.max_length or 0) - input_ids.shape[1]


def pays(model: Any, rows: int, steps: int, is_known: bool) -> bool:
    """Whether a recording saves what it costs, on a CPU; FASTGEN_CUDA_GRAPHS=on makes it in any case."""
    is_asked = CONFIG.cuda_graphs == "on" or model.device.type != "cpu"
    return is_asked or gain.recording_pays(gain.size_of(model), rows, steps, is_known)


def is_new_wanted(model: Any, rows: int, done: int, left: int) -> bool:
    """Whether to make a recording after so many steps, with at most so many to come."""
    return done >= STEPS_BEFORE and pays(model, rows, left, is_known=False)


def _rounds_otherwise(model: Any) -> bool:
    """Whether hidden positions may change tokens: in half precision, where logits are often equal."""
    is_exact = model.dtype in (torch.float32, torch.float64)
    return model.device.type == "cpu" and CONFIG.cuda_graphs != "on" and not is_exact


def _packs(model: Any, rows: int) -> bool:
    """Whether the products of so many rows may be of packed weights: where there are none for few rows."""
    has_few_rows = model.dtype == torch.float32 and not few_rows.machine_reasons()
    return model.device.type == "cpu" and CONFIG.pack and rows > 1 and not has_few_rows and gain.size_of(model).is_large


def unsupported_reasons(model: Any, generation_config: Any, input_ids: Tensor, arguments: dict[str, Any]) -> list[str]:
    """Why the steps of a call are not recorded, as far as that is known before its prefill; empty if they can be."""
    reasons = []
    steps = _steps(generation_config, input_ids)
    if not LAYERS_ARE_KNOWN:
        reasons.append("this version of transformers has other static caches")
    if not arguments.get("use_cache"):
        reasons.append("no cache")
    elif _rounds_otherwise(model):
        reasons.append(f"{model.dtype} would be rounded in another way on a CPU")
    elif _packs(model, input_ids.shape[0]):
        reasons.append("the step uses packed weights, which are not recorded")
    elif not pays(model, input_ids.shape[0], steps, is_known=True):
        reasons.append(f"{steps} steps of {input_ids.shape[0]} rows would save less than the recording costs")
    if not getattr(model, "_can_compile_fullgraph", False):
        reasons.append(f"the forward of {type(model).__name__} may read the device")
    if (attention := getattr(model.config, "_attn_implementation", None)) not in ("sdpa", "eager"):
        reasons.append(f"attention {attention} (supported: sdpa, eager)")
    if torch.is_autocast_enabled(model.device.type):
        reasons.append("autocast keeps copies of weights that a recording would outlive")
    if is_transformed() or is_watched():
        reasons.append("the program records or watches what torch computes")
    if getattr(model, "hf_quantizer", None) is not None:
        reasons.append("the model is quantized")
    if model.device.type == "cuda" and torch.cuda.current_stream(model.device).cuda_stream:
        reasons.append("the program computes on a stream of its own")
    if (cache := arguments.get("past_key_values")) is not None:
        reasons += layer_reasons(cache, generation_config.max_length or 0)
    if hasattr(model, "_reorder_cache"):
        reasons.append("the model moves its cache itself")
    if reasons:
        return reasons
    if len({tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}) > 1:
        reasons.append("the model is on several devices")
    return reasons + eligibility.model_reasons(model)
