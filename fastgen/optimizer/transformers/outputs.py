"""Outputs that a caller asks for and does not read: such a call runs as one that returns sequences alone.

The loops that fastgen has are those of calls without scores and hidden states of each step. fastgen's command and the
patches of Seamless M4T say by `only_outputs` what they read.

Tests: tests/optimizer/transformers/test_beam_scores.py, tests/optimizer/transformers/test_seamless.py
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from transformers import GenerationMixin
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

from fastgen.optimizer.decoding.call import current_call
from fastgen.provenance import comes_with

SEQUENCES_SCORES, ENCODER_STATES = "sequences_scores", "encoder_hidden_states"

_used: ContextVar[tuple[str, ...] | None] = ContextVar("fastgen_used_outputs", default=None)


@contextmanager
def only_outputs(*outputs: str) -> Iterator[None]:
    """Inside this context, of calls that ask for `scores` only `sequences` and these outputs are used.

    `scores` are a tensor `[rows, vocabulary_size]` of each step, gigabytes for a batch of summaries, and the library
    gives `sequences_scores` only with them. All outputs stay where others than scores, and hidden states beside the
    encoder's, are asked for, and where fastgen is off.
    """
    token = _used.set(outputs)
    try:
        yield
    finally:
        _used.reset(token)


def drop_unused_outputs(loop: Callable) -> Callable:
    """Wraps a replacement of one of the library's loops: it drops the outputs that the caller does not use."""
    signature = inspect.signature(loop)

    @wraps(loop)
    def run(*args: Any, **kwargs: Any) -> Any:
        used, call = _used.get(), current_call()
        if used is None or call is None:
            return loop(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        model, config = bound.arguments["self"], bound.arguments["generation_config"]
        if not _can_drop(model, config, used):
            return loop(*args, **kwargs)
        lean = bound.arguments["generation_config"] = copy.copy(config)
        lean.return_dict_in_generate = lean.output_scores = lean.output_hidden_states = False
        model_kwargs = bound.arguments["model_kwargs"]
        model_kwargs.pop("output_hidden_states", None)
        outputs: dict[str, Any] = {}
        if ENCODER_STATES in used:
            outputs[ENCODER_STATES] = model_kwargs["encoder_outputs"].hidden_states
        sequences = loop(*bound.args, **bound.kwargs)
        if SEQUENCES_SCORES in used:
            outputs[SEQUENCES_SCORES] = call.beam_scores[:, : config.num_return_sequences].flatten()
        kind = GenerateBeamEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateBeamDecoderOnlyOutput
        return kind(sequences=sequences, **outputs)

    return run


def _can_drop(model: Any, config: Any, used: tuple[str, ...]) -> bool:
    """Whether a call with this configuration can run as one that returns sequences alone."""
    if not (config.return_dict_in_generate and config.output_scores):
        return False
    if config.output_logits or config.output_attentions or (config.output_hidden_states and ENCODER_STATES not in used):
        return False
    if SEQUENCES_SCORES in used:
        return config.num_beams > 1 and comes_with(model._update_finished_beams, GenerationMixin)
    return config.num_return_sequences == 1  # Seamless M4T chooses among several by their scores
