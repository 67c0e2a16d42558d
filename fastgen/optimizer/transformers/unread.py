"""Outputs that a caller of `generate` asks for and does not read: they are not kept.

`scores` are a tensor `[rows, vocabulary_size]` of each step, gigabytes for a batch of summaries, and the library gives
`sequences_scores` only together with them. Such a call runs as one that returns sequences alone, in the loops that
fastgen has for those.

Tests: tests/optimizer/transformers/test_beam_scores.py
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
from fastgen.origin import comes_with

SEQUENCES_SCORES, ENCODER_STATES = "sequences_scores", "encoder_hidden_states"

_READ: ContextVar[tuple[str, ...] | None] = ContextVar("fastgen_read", default=None)


@contextmanager
def reading_only(*outputs: str) -> Iterator[None]:
    """Inside this context, of calls that ask for `scores` only `sequences` and these outputs are read.

    All outputs stay where others than scores, and hidden states beside those of the encoder, are asked for, and where
    fastgen is off.
    """
    token = _READ.set(outputs)
    try:
        yield
    finally:
        _READ.reset(token)


def without_unread(loop: Callable) -> Callable:
    """For a replacement of one of the library's loops: keeps of each step only what the caller reads."""
    signature = inspect.signature(loop)

    @wraps(loop)
    def run(*args: Any, **kwargs: Any) -> Any:
        if (read := _READ.get()) is None:
            return loop(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        model, config = given.arguments["self"], given.arguments["generation_config"]
        if not _can_leave_out(model, config, read):
            return loop(*args, **kwargs)
        lean = given.arguments["generation_config"] = copy.copy(config)
        lean.return_dict_in_generate = lean.output_scores = lean.output_hidden_states = False
        model_kwargs = given.arguments["model_kwargs"]
        model_kwargs.pop("output_hidden_states", None)
        outputs: dict[str, Any] = {}
        if ENCODER_STATES in read:
            outputs[ENCODER_STATES] = model_kwargs["encoder_outputs"].hidden_states
        sequences = loop(*given.args, **given.kwargs)
        if SEQUENCES_SCORES in read:
            outputs[SEQUENCES_SCORES] = current_call().beam_scores[:, : config.num_return_sequences].flatten()
        kind = GenerateBeamEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateBeamDecoderOnlyOutput
        return kind(sequences=sequences, **outputs)

    return run


def _can_leave_out(model: Any, config: Any, read: tuple[str, ...]) -> bool:
    """Whether a call with this configuration can run as one that returns sequences alone."""
    if not (config.return_dict_in_generate and config.output_scores) or current_call() is None:
        return False
    if config.output_logits or config.output_attentions or (config.output_hidden_states and ENCODER_STATES not in read):
        return False
    if SEQUENCES_SCORES in read:
        return config.num_beams > 1 and comes_with(model._update_finished_beams, GenerationMixin)
    return config.num_return_sequences == 1  # Seamless M4T chooses among several by their scores
