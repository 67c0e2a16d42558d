"""Seamless M4T: its stages for `fastgen.explain()`, its speech encoder and vocoder, and the positions of its decoders.

An inner call of `generate` runs the encoder and the text decoder; then come text-to-unit and vocoder. The library asks
the inner call for the scores and hidden states of every step, but uses only its sequences and the encoder's states
(outputs.py). For speech it then calls the encoder again, with the same input: its first output is reused.

The decoders are M2M100's, with sinusoidal positions. At every step the library checks whether its table of positions is
long enough, which waits for the device. In captured steps the number of positions is on the device and is not read; the
check is made before a capture begins (checks.py).

Tests: tests/optimizer/transformers/test_seamless.py, tests/optimizer/transformers/test_captured_steps.py,
tests/optimizer/vocoder/test_vocoders.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from fastgen.ops.tracing import is_transformed
from fastgen.optimizer.decoding.call import count, end_stage
from fastgen.optimizer.transformers import checks, compat
from fastgen.optimizer.transformers.checks import current_call, generate_call
from fastgen.optimizer.transformers.outputs import ENCODER_STATES, only_outputs
from fastgen.optimizer.vocoder import faster_waveform

# The arguments of the library's second call of the speech encoder; it uses only the first output.
_ARGUMENTS = ("input_features", "attention_mask")
ENCODED_ONCE = "speech encoder, once"


def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces Seamless's `generate`: its calls of other models are stages, which return only the outputs it uses."""
    generate_speech = kwargs.get("generate_speech", args[5] if len(args) > 5 else True)
    outputs = only_outputs(ENCODER_STATES) if generate_speech else nullcontext()
    with generate_call(self, has_stages=True), outputs:
        return original(self, *args, **kwargs)


def speech_encoder(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the states that this encoder has computed from the same tensors in this call of `generate`, if any.

    The call's `encoded` holds the module, its states, its input tensors, and their versions.
    """
    call = current_call()
    while call is not None and not call.has_stages:
        call = call.outer
    if call is None or args or not _is_repeatable(self):
        return original(self, *args, **kwargs)
    inputs = [kwargs.get(name) for name in _ARGUMENTS]
    for encoder, tensors, versions in call.host.encoded:
        is_same = tuple(kwargs) == _ARGUMENTS and encoder is self and all(map(is_, tensors[1:], inputs))
        if is_same and _versions(tensors) == versions:
            count(ENCODED_ONCE)
            return BaseModelOutput(tensors[0])
    encoded = original(self, **kwargs)
    tensors = [encoded[0], *inputs]
    call.host.encoded.append((self, tensors, _versions(tensors)))
    return encoded


def _versions(tensors: list[Tensor | None]) -> list[int]:
    """Returns the versions of these tensors, which change with each write."""
    return [tensor._version for tensor in tensors if tensor is not None]


def _is_repeatable(encoder: nn.Module) -> bool:
    """Whether calling the encoder once has no visible effect: it draws no random numbers, and is the library's."""
    call = current_call()
    if call is None or torch.is_inference_mode_enabled() or is_transformed() or checks.is_foreign(encoder):
        return False
    return not checks.CallChecks(call, encoder).rows


def text_to_unit(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs text-to-unit, and ends its stage: this forward in version 2, the enclosing `generate` in version 1."""
    units = original(self, *args, **kwargs)
    end_stage("text-to-unit")
    return units


def vocoder(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the vocoder, and ends its stage."""
    waveform = original(self, *args, **kwargs)
    end_stage("vocoder")
    return waveform


def vocode_units(original: Callable, self: Any, inputs_embeds: Tensor) -> Tensor:
    """Runs the vocoder's HiFi-GAN: states `[batch, channels, frames]` to a waveform `[batch, samples]`."""
    return faster_waveform(partial(original, self, inputs_embeds), self, inputs_embeds)


def positions(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Returns positions `[batch_size, length, width]`; in a captured step the number of earlier ones is a tensor."""
    input_ids = args[0] if args else kwargs.get("input_ids")
    named = [kwargs[name] for name in compat.EARLIER_POSITIONS if name in kwargs]
    past_length = args[2] if len(args) > 2 else (named or [0])[0]
    if input_ids is None or not isinstance(past_length, Tensor):
        return original(self, *args, **kwargs)
    positions = self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_length)
    return nn.functional.embedding(positions, self.weights).detach()
