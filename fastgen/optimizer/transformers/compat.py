"""Differences between versions of transformers, each checked once, and between architectures, by `model_type`.

Tests: tests/optimizer/transformers/test_captured_steps.py, tests/optimizer/transformers/test_finished_inputs.py,
tests/optimizer/transformers/test_constrained.py
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import GenerationMixin, modeling_utils
from transformers.cache_utils import StaticLayer
from transformers.generation import utils

from fastgen.models.cache_names import CACHE

# Since 5.23 the repetition penalty ignores padding; before, it penalised it like tokens of the prompt.
_GET_PROCESSORS = inspect.unwrap(GenerationMixin._get_logits_processor).__code__
REPETITION_PENALTY_COUNTS_PADDING = "padding_lengths" not in _GET_PROCESSORS.co_varnames

# The argument of Seamless's position embedding with the number of earlier positions; until 5.24 it had the second name.
EARLIER_POSITIONS = ("cache_length", "past_key_values_length")

# Mixture-of-experts layers also call their experts through a registry.
EXPERTS_FUNCTIONS: Any = getattr(modeling_utils, "ALL_EXPERTS_FUNCTIONS", {})

# Since 5.3 a step of the library's loops takes these arguments.
STEPS_ARE_KNOWN = (
    "is_first_iteration" in inspect.signature(GenerationMixin._prefill).parameters
    and "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)

# Since 5.13 the library's beam search also moves the states of Mamba; before, it did not.
_TEXTS = "".join(map(str, inspect.unwrap(GenerationMixin._beam_search).__code__.co_consts))
MOVED_CACHES = getattr(utils, "ALL_CACHE_NAMES", (CACHE,)) if "cannot be reordered" in _TEXTS else (CACHE,)

# Since 5.24 the library's beam search sorts the continuations that it has drawn.
SORTS_DRAWN = "sort" in inspect.unwrap(GenerationMixin._get_top_k_continuations).__code__.co_names

# Since 5.17 the length of static layers is a tensor without dimensions, as `KVLayer` returns it.
LAYERS_ARE_KNOWN = getattr(StaticLayer(1), "cumulative_length", torch.ones(1)).dim() == 0

# Newer versions give a streamer its token after they have called the stopping criteria.
STREAMS_AFTER_CRITERIA = hasattr(utils, "StopCheck")


def optimized_for_decode(model: Any) -> AbstractContextManager[Any]:
    """Returns the context that newer versions enter around the steps of a greedy or sampling loop."""
    return getattr(model, "_optimize_model_for_decode", nullcontext)()


# Properties of single architectures that no attribute of the library shows.

# The rows of a batch influence each other.
COUPLED_ROWS = {
    "nllb-moe": "the capacity of its experts depends on the number of rows",
    "big_bird": "its sparse attention draws random numbers for each row",
}

# A key's column matters, not only its position, and only beyond the columns of the trial in `prefixes.py`.
COUNTED_COLUMNS = {
    "gpt_neo": "its local attention counts columns",
}

# Steps do not wait for the device, although the library does not mark them so: with the positions of seamless.py; and
# of models whose layers have states, for which the library has no static cache.
SYNC_FREE = ("seamless_m4t", "seamless_m4t_v2", "mamba", "falcon_mamba", "falcon_h1", "zamba", "zamba2")

# Arguments that a model takes, but does not read while it decodes. Whisper's generate still passes the mask of all
# recordings when some of them have ended, or are decoded again at another temperature.
UNREAD_ARGUMENTS = {"whisper": ("attention_mask",)}

# Classes whose `prepare_inputs_for_generation` or `_update_model_kwargs_for_generation` is their own, and was read: it
# keeps no state, and the inputs of one token are the last column of the inputs of several.
_MODELS = "transformers.models"
STATELESS_INPUTS = {
    f"{_MODELS}.canary.modeling_canary": ("CanaryForConditionalGeneration",),
    f"{_MODELS}.cohere_asr.modeling_cohere_asr": ("CohereAsrForConditionalGeneration",),
    f"{_MODELS}.ctrl.modeling_ctrl": ("CTRLLMHeadModel",),
    f"{_MODELS}.gemma3.modeling_gemma3": ("Gemma3ForConditionalGeneration",),
    f"{_MODELS}.gemma4.modeling_gemma4": ("Gemma4ForConditionalGeneration",),
    f"{_MODELS}.paligemma.modeling_paligemma": ("PaliGemmaForConditionalGeneration",),
    f"{_MODELS}.phi3.modeling_phi3": ("Phi3ForCausalLM",),
    f"{_MODELS}.phimoe.modeling_phimoe": ("PhimoeForCausalLM",),
    f"{_MODELS}.whisper.modeling_whisper": ("WhisperForConditionalGeneration",),
}
