"""Differences between versions of transformers, each asked once, and between architectures, by their `model_type`.

Tests: tests/optimizer/transformers/test_captured_steps.py, tests/optimizer/transformers/test_finished_inputs.py,
tests/optimizer/transformers/test_constrained.py
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationMixin, modeling_utils
from transformers.cache_utils import StaticLayer
from transformers.generation import utils

from fastgen.models.cache_names import CACHE

# Since 5.23 the penalty knows padding; before, it took it for tokens that were seen.
REPETITION_PENALTY_COUNTS_PADDING = Version(transformers.__version__) < Version("5.23")

# The number of earlier positions among the arguments of Seamless's position embedding, the second one until 5.24.
EARLIER_POSITIONS = ("cache_length", "past_key_values_length")

# Experts of a mixture are called through a registry, too.
EXPERTS_FUNCTIONS: Any = getattr(modeling_utils, "ALL_EXPERTS_FUNCTIONS", {})

# Since 5.3 a step of the library's loops has these arguments.
STEPS_ARE_KNOWN = (
    "is_first_iteration" in inspect.signature(GenerationMixin._prefill).parameters
    and "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)

# Since 5.13 the library's beam search moves the states of Mamba, too; before, it forgot them.
_TEXTS = "".join(map(str, inspect.unwrap(GenerationMixin._beam_search).__code__.co_consts))
MOVED_CACHES = utils.ALL_CACHE_NAMES if "cannot be reordered" in _TEXTS else (CACHE,)

# Since 5.17 static layers have the length that `KVLayer` gives: a tensor without a dimension.
LAYERS_ARE_KNOWN = getattr(StaticLayer(1), "cumulative_length", torch.ones(1)).dim() == 0


def optimized_for_decode(model: Any) -> AbstractContextManager[Any]:
    """What newer versions enter around the steps of a greedy or sampling loop."""
    return getattr(model, "_optimize_model_for_decode", nullcontext)()


# What holds for single architectures, and no attribute of the library tells.

# The rows of a batch have an influence on each other.
COUPLED_ROWS = {
    "nllb-moe": "the capacity of its experts depends on the number of rows",
    "big_bird": "its sparse attention draws random numbers for each row",
}

# A key's column counts beside its position.
COUNTED_COLUMNS = {
    "gpt_neo": "its local attention counts columns",
    "mpt": "its attention biases count columns",
}

# Positions are counted in the attention mask, which all rows have.
POSITIONS_OF_MASK = ("bloom",)

# Steps do not wait for the device with the positions of seamless.py, whatever the library says.
SYNC_FREE = ("seamless_m4t", "seamless_m4t_v2")

# Arguments that a model takes and does not read while it decodes. Whisper's generate goes on with the mask of all
# recordings when some of them have ended, or are decoded again at another temperature.
UNREAD_ARGUMENTS = {"whisper": ("attention_mask",)}
