"""Seamless M4T: its stages for `fastgen.explain()`, its speech encoder, and the positions of its decoders.

Encoder and text decoder are those of the call of `generate` inside; then come text-to-unit and vocoder. The library
asks that call for the scores and hidden states of every step and uses only its sequences and the encoder's states
(requested_outputs.py). For speech it then calls the encoder again, with the same input: its first output is reused.

The decoders are M2M100's, with sinusoidal positions. At every step the library asks whether its table of them is long
enough, which waits for the device. In captured steps the number of positions is on the device and nothing reads it
there: that is asked before a capture begins (checks.py).

Tests: tests/optimizer/transformers/test_seamless.py, tests/optimizer/transformers/test_captured_steps.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fastgen.ops.tracing import is_transformed
from fastgen.optimizer.decoding.call import count, current_call, generate_call, stage
from fastgen.optimizer.transformers import checks
from fastgen.optimizer.transformers.requested_outputs import ENCODER_STATES, only_outputs

# The arguments with which the library calls the speech encoder the second time; it uses the first output only.
_ARGUMENTS = ("input_features", "attention_mask")
ENCODED_ONCE = "speech encoder, once"

# The outputs of the speech encoder in the call that runs.
_encoded: ContextVar[list[EncoderOutput] | None] = ContextVar("fastgen_encoded", default=None)


def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    generate_speech = kwargs.get("generate_speech", args[5] if len(args) > 5 else True)
    outputs = only_outputs(ENCODER_STATES) if generate_speech else nullcontext()
    token = _encoded.set([])
    try:
        with generate_call(type(self).__name__, has_stages=True), outputs:
            return original(self, *args, **kwargs)
    finally:
        _encoded.reset(token)


def speech_encoder(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The states that this encoder has made of the same tensors in the same call of `generate`, if it has."""
    outputs = _encoded.get()
    if outputs is None or args or not _is_repeatable(self):
        return original(self, *args, **kwargs)
    for output in outputs:
        if tuple(kwargs) == _ARGUMENTS and output.is_of(self, kwargs):
            count(ENCODED_ONCE)
            return BaseModelOutput(output.states)
    encoded = original(self, **kwargs)
    outputs.append(EncoderOutput(self, kwargs, encoded[0]))
    return encoded


class EncoderOutput:
    """The states of an encoder, and what they were made of; nobody has written to any of these tensors since."""

    def __init__(self, encoder: nn.Module, given: dict[str, Any], states: Tensor) -> None:
        self.states = states
        self._encoder = encoder
        self._tensors = [given.get(name) for name in _ARGUMENTS]
        self._versions = self._present_versions()

    def is_of(self, encoder: nn.Module, given: dict[str, Any]) -> bool:
        same = all(given[name] is tensor for name, tensor in zip(_ARGUMENTS, self._tensors))
        return same and encoder is self._encoder and self._versions == self._present_versions()

    def _present_versions(self) -> list[int]:
        return [tensor._version for tensor in (self.states, *self._tensors) if tensor is not None]


def _is_repeatable(encoder: nn.Module) -> bool:
    """Whether nobody can tell that the encoder was called once: it draws no random numbers, and is the library's."""
    call = current_call()
    if call is None or torch.is_inference_mode_enabled() or is_transformed() or not checks.is_known_class(encoder):
        return False
    return not checks.row_reasons(call, encoder)


def text_to_unit(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """In version 2 one forward; in version 1 a step of a call of `generate`, which is the stage."""
    with stage("text-to-unit"):
        return original(self, *args, **kwargs)


def vocoder(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    with stage("vocoder"):
        return original(self, *args, **kwargs)


def positions(
    original: Callable,
    self: Any,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    past_key_values_length: int | Tensor = 0,
) -> Tensor:
    """`[batch_size, length, width]`; a number of earlier positions that is a tensor is one of a captured step."""
    if input_ids is None or not isinstance(past_key_values_length, Tensor):
        return original(self, input_ids, inputs_embeds, past_key_values_length)
    positions = self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_key_values_length)
    return nn.functional.embedding(positions, self.weights).detach()
