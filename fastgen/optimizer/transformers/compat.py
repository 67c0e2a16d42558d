"""Differences between versions of transformers, each asked once.

Tests: tests/optimizer/transformers/test_captured_steps.py, tests/optimizer/transformers/test_finished_inputs.py,
tests/optimizer/transformers/test_constrained.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import transformers
from packaging.version import Version
from transformers import GenerationMixin, modeling_utils
from transformers.cache_utils import StaticLayer
from transformers.generation import utils

from fastgen.models.cache_names import CACHE
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.verify import Difference, verify_once
from fastgen.patching import disabled

T = TypeVar("T")

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


def verified_if_newer(
    group: str, kind: type, ours: Callable[[], T], theirs: Callable[[], T], difference: Callable[[T, T], str]
) -> T:
    """What `ours` returns; where transformers is newer than any version tested, a class is compared first.

    difference: a text, empty if there is none; else the group of patches is switched off.
    """
    if "transformers" not in PATCH_SET.untested_hosts:
        return ours()

    def refuse(found: Difference) -> None:
        PATCH_SET.fail(group, f"{kind.__name__} {found}")

    def library() -> T:
        with disabled():
            return theirs()

    return verify_once(kind, ours, library, lambda *both: _difference(difference(*both)), refuse)


def _difference(text: str) -> Difference | None:
    return Difference(text) if text else None
