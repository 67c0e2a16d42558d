"""A call of transformers' `generate`: the state that only this host has, and the outputs that its caller reads.

fastgen's loops serve calls that return no scores or hidden states of each step. fastgen's command and the patches of
Seamless M4T say by `only_outputs` what they read: such a call runs as one that returns sequences alone.

Tests: tests/optimizer/transformers/test_generate_threads.py, tests/optimizer/transformers/test_beam_scores.py,
tests/optimizer/transformers/test_seamless.py
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

from fastgen.optimizer.decoding import call as decoding_call
from fastgen.optimizer.decoding.call import GenerateCall, setting, settings_of
from fastgen.optimizer.decoding.report import Report
from fastgen.provenance import comes_with

SEQUENCES_SCORES, ENCODER_STATES = "sequences_scores", "encoder_hidden_states"


@dataclass
class TransformersCall:
    """The part of a `GenerateCall` that only transformers' patches read and write.

    user_cache: the caller passed a cache. user_code: code that is not the host's works with the cache. has_callbacks:
    the caller passed what is called between steps, which may change the model. share: what equal rows have in common is
    stored once wherever it can be (True), nowhere (False), or where it pays (None). to_verify: the call with its
    arguments, where it has to be compared with the original before anything is shared. beam_scores: of the best
    hypotheses that beam search has found, `[inputs, num_beams]`, the best first. encoded: see `models/seamless.py`.
    checks: the `CallChecks` of the call's last loop.
    """

    user_cache: bool = False
    user_code: bool = False
    has_callbacks: bool = False
    share: bool | None = None
    to_verify: partial[Any] | None = None
    beam_scores: Tensor | None = None
    encoded: list[Any] = field(default_factory=list)
    checks: Any = None


def generate_call(model: Any, has_stages: bool = False, has_steps: bool = True) -> GenerateCall:
    """Returns a context inside of which `current_call()` is a new call of this model's `generate`."""
    report = Report(type(model).__name__, has_steps=has_steps)
    return GenerateCall(report, TransformersCall(), has_stages=has_stages)


def current_call() -> GenerateCall | None:
    """Returns the innermost call that runs, or None outside of one and in a call of another host."""
    call = decoding_call.current_call()
    return call if call is not None and isinstance(call.host, TransformersCall) else None


class UsedOutputs(tuple[str, ...]):
    """The outputs besides `sequences` that the caller reads."""


def only_outputs(*outputs: str) -> AbstractContextManager[None]:
    """Inside this context, of calls that ask for `scores` only `sequences` and these outputs are used.

    `scores` are a tensor `[rows, vocabulary_size]` of each step, gigabytes for a batch of summaries, and the library
    gives `sequences_scores` only with them. All outputs stay where others than scores, and hidden states beside the
    encoder's, are asked for, and where fastgen is off.
    """
    return setting(UsedOutputs(outputs))


def drop_unused_outputs(loop: Callable) -> Callable:
    """Wraps a replacement of one of the library's loops: it drops the outputs that the caller does not use."""
    signature = inspect.signature(loop)

    @wraps(loop)
    def run(*args: Any, **kwargs: Any) -> Any:
        used, call = next(settings_of(UsedOutputs), None), current_call()
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
            outputs[SEQUENCES_SCORES] = call.host.beam_scores[:, : config.num_return_sequences].flatten()
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
