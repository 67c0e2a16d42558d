"""Seamless M4T from text or speech to speech: its stages for `fastgen.explain()`, and what they need not keep.

Encoder and text decoder are those of the call of `generate` inside; then come text-to-unit and vocoder. The library
asks that call for the scores and hidden states of every step and reads only its sequences and the encoder's states. It
runs as one that returns no more, in the loops that fastgen has for such calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from fastgen.optimizer.decoding.generation import current, generating, stage


def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    generate_speech = kwargs.get("generate_speech", args[5] if len(args) > 5 else True)
    with generating(type(self).__name__, has_stages=True) as generation:
        generation.reads_sequences = bool(generate_speech)
        return original(self, *args, **kwargs)


def text_to_unit(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """In version 2 one forward; in version 1 a step of a call of `generate`, which is the stage."""
    with stage("text-to-unit"):
        return original(self, *args, **kwargs)


def vocoder(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    with stage("vocoder"):
        return original(self, *args, **kwargs)


def without_unread(loop: Callable) -> Callable:
    """For a replacement of one of the library's loops: keeps of each step only what the caller reads."""

    @wraps(loop)
    def run(
        original: Callable,
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        config, outer = generation_config, getattr(current(), "outer", None)
        reads_more = config.output_attentions or config.output_logits or config.num_return_sequences != 1
        is_read = outer is None or not outer.reads_sequences or reads_more or not config.return_dict_in_generate
        encoded = None
        if not is_read:
            config = copy.copy(config)
            config.return_dict_in_generate = config.output_scores = config.output_hidden_states = False
            kwargs.pop("output_hidden_states", None)
            encoded = kwargs["encoder_outputs"].hidden_states
        result = loop(original, self, input_ids, logits_processor, stopping_criteria, config, *args, **kwargs)
        return result if is_read else GenerateBeamEncoderDecoderOutput(sequences=result, encoder_hidden_states=encoded)

    return run
