"""Differences between versions of transformers, each asked once.

Tests: tests/optimizer/transformers/test_captured_steps.py, tests/optimizer/transformers/test_finished_inputs.py
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GenerationMixin, modeling_utils
from transformers.cache_utils import StaticLayer
from transformers.generation import utils

# Experts of a mixture are called through a registry, too.
EXPERTS_FUNCTIONS: Any = getattr(modeling_utils, "ALL_EXPERTS_FUNCTIONS", {})

# Since 5.3 a step of the library's loops has these arguments.
STEPS_ARE_KNOWN = (
    "is_first_iteration" in inspect.signature(GenerationMixin._prefill).parameters
    and "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)

# Since 5.13 the library's beam search moves the states of Mamba, too; before, it forgot them.
_TEXTS = "".join(map(str, inspect.unwrap(GenerationMixin._beam_search).__code__.co_consts))
MOVED_CACHES = utils.ALL_CACHE_NAMES if "cannot be reordered" in _TEXTS else ("past_key_values",)

# Since 5.17 static layers have the length that `KVLayer` gives: a tensor without a dimension.
LAYERS_ARE_KNOWN = getattr(StaticLayer(1), "cumulative_length", torch.ones(1)).dim() == 0
