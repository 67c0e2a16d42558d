"""What a decoding loop returns besides tokens.

`Outputs` collects it in fastgen's loops, for all calls but those that return attentions or hidden states of each step.
fastgen's command and the patches of Seamless M4T declare with `only_outputs` what they read: such a call runs as one
that returns sequences alone. Both loops begin in `replaced_loop`, which drops the outputs that nobody reads.

Tests: tests/optimizer/transformers/test_loop_outputs.py, tests/optimizer/transformers/test_beam_scores.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from fastgen.models.cache_names import cache_name
from fastgen.optimizer.decoding.call import setting, settings_of
from fastgen.optimizer.transformers.checks import CallChecks, LoopArguments, current_call
from fastgen.optimizer.transformers.decode_step import TransformersDecodeStep
from fastgen.optimizer.transformers.processors import writing_processors
from fastgen.provenance import comes_with

SEQUENCES_SCORES, ENCODER_STATES = "sequences_scores", "encoder_hidden_states"


class Outputs:
    """The outputs of one loop, as the library's loops collect them.

    is_dict: whether the caller wants more than tokens. scores, logits: a tensor `[rows, vocabulary_size]` for each
    step, float32; None if the caller does not want them. collects: whether one of them is wanted. Rows that have ended
    have some, too, and their part of the cache is returned, so with `is_dict` no row leaves.
    """

    def __init__(self, config: Any) -> None:
        self.is_dict = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if self.is_dict and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if self.is_dict and config.output_logits else None
        self.collects = self.scores is not None or self.logits is not None

    def add(self, logits: Tensor, scores: Tensor, copies: bool = False) -> None:
        """Keeps those of a step that the caller wants; copies: whether to clone them, as other code may hold them."""
        if self.scores is not None:
            self.scores += (scores.clone() if copies else scores,)
        if self.logits is not None:
            self.logits += (logits.clone() if copies else logits,)

    def of(self, sequences: Tensor, step: TransformersDecodeStep, **of_beams: Any) -> Any:
        """Returns the sequences alone, or the library's dictionary. of_beams: what only beam search returns."""
        if not self.is_dict:
            return sequences
        kinds = (GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput)
        if not of_beams:
            kinds = (GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput)
        kind: Any = kinds[bool(step.model.config.is_encoder_decoder)]
        of_beams[cache_name(kind.__dataclass_fields__)] = step.own_cache
        return kind(sequences=sequences, scores=self.scores, logits=self.logits, **of_beams)


class UsedOutputs(tuple[str, ...]):
    """The outputs that the caller reads in addition to `sequences`."""


def only_outputs(*outputs: str) -> AbstractContextManager[None]:
    """Returns a context whose calls of `generate`, if they ask for `scores`, return `sequences` and these outputs only.

    `scores` are a tensor `[rows, vocabulary_size]` for each step, gigabytes for a batch of summaries, and the library
    returns `sequences_scores` only with them. No output is dropped if a call asks for more than scores and the
    encoder's hidden states, or if fastgen is off.
    """
    return setting(UsedOutputs(outputs))


def replaced_loop(run: Callable[[CallChecks, Any], Any], *methods: str) -> Callable:
    """Returns the replacement of one of the library's loops, which drops the outputs that the caller does not use.

    run: runs fastgen's loop with the checks of the call and the logits processors, and returns its outputs; None if the
    library's loop must run. methods: those of the library's loop that it replaces.
    """

    def loop(
        original: Callable,
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        call = current_call()
        used = None if call is None else next(settings_of(UsedOutputs), None)
        if used is not None and _can_drop(self, generation_config, used):
            generation_config = copy.copy(generation_config)
            generation_config.return_dict_in_generate = generation_config.output_scores = False
            generation_config.output_hidden_states = False
            model_kwargs.pop("output_hidden_states", None)
        else:
            used = None
        encoded: Any = model_kwargs.get("encoder_outputs")
        processors = writing_processors(logits_processor, generation_config)
        options = model_kwargs if streamer is None else {**model_kwargs, "streamer": streamer}
        theirs = partial(original, self, input_ids, processors, stopping_criteria, generation_config, **options)
        if call is None:
            return theirs(synced_gpus=synced_gpus)
        arguments = input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, model_kwargs
        outputs = run(CallChecks(call, self, LoopArguments(*arguments, streamer, methods)), processors)
        if outputs is None:
            outputs = theirs(synced_gpus=synced_gpus)
        if used is None:
            return outputs
        rest: dict[str, Any] = {}
        if ENCODER_STATES in used:
            rest[ENCODER_STATES] = encoded.hidden_states
        if SEQUENCES_SCORES in used:
            rest[SEQUENCES_SCORES] = call.host.beam_scores[:, : generation_config.num_return_sequences].flatten()
        kind = GenerateBeamEncoderDecoderOutput if self.config.is_encoder_decoder else GenerateBeamDecoderOnlyOutput
        return kind(sequences=outputs, **rest)

    return loop


def _can_drop(model: Any, config: Any, used: tuple[str, ...]) -> bool:
    """Whether a call with this configuration can run as one that returns sequences alone."""
    if not (config.return_dict_in_generate and config.output_scores):
        return False
    if config.output_logits or config.output_attentions or (config.output_hidden_states and ENCODER_STATES not in used):
        return False
    if SEQUENCES_SCORES in used:
        return config.num_beams > 1 and comes_with(model._update_finished_beams, GenerationMixin)
    return config.num_return_sequences == 1  # Seamless M4T chooses among several by their scores
