"""The HiFi-GAN vocoders of Seamless M4T, SpeechT5, FastSpeech2Conformer and VITS, and the decoders of EnCodec and Mimi.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops.tolerances import tolerance
from fastgen.optimizer.decoding.faster_forwards import Call, ModuleForward
from fastgen.optimizer.transformers import compat
from fastgen.optimizer.vocoder import CONVOLUTIONS, channels_last, faster_waveform, is_faster
from fastgen.provenance import comes_with

# In which a codec pads: those of torch's `pad` that put no numbers of their own there.
_PAD_MODES = ("constant", "reflect", "replicate")


def vocode_units(original: Callable, self: Any, inputs_embeds: Tensor) -> Tensor:
    """Seamless M4T's: states `[batch, channels, frames]` become a waveform `[batch, samples]`."""
    return faster_waveform(partial(original, self, inputs_embeds), self, inputs_embeds, CONVOLUTIONS)


def vocode_spectrogram(original: Callable, self: Any, spectrogram: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """SpeechT5's and FastSpeech2Conformer's `[batch, frames, channels]`, and the latents of VITS."""
    forward = partial(original, self, spectrogram, *args, **kwargs)
    return faster_waveform(forward, self, spectrogram, CONVOLUTIONS)


def decode_codes(original: Callable, self: Any, hidden_states: Tensor) -> Tensor:
    """Of a codec: states `[batch, channels, frames]` become a waveform `[batch, channels, samples]`.

    Where transformers is newer than any version tested, a class is compared first. A norm between the convolutions
    would need steps next to each other.
    """
    theirs = partial(original, self, hidden_states)
    kinds = set(map(type, self.layers))
    padded = {kind: pad_and_convolve for kind in kinds if comes_with(getattr(kind, "_pad1d", None), kind)}
    forwards = {} if hasattr(self.layers[0], "norm") else CONVOLUTIONS | padded
    ours = partial(faster_waveform, theirs, self, hidden_states, forwards)
    kind = next(one for one in type(self).__mro__ if one.__module__.startswith("transformers."))
    group = f"transformers.{kind.__module__.split('.')[2]}_decoder"
    return compat.verified_if_newer(group, kind, ours, theirs, _difference)


def pad_and_convolve(forward: ModuleForward, states: Tensor, call: Call) -> Tensor | None:
    """Of an `EncodecConv1d` or `MimiConv1d`: pads channels last, too, which torch does not do to a sequence."""
    module, layer = forward.module, forward.module.conv
    total = layer.dilation[0] * (layer.kernel_size[0] - 1)
    if layer.stride != (1,) or module.pad_mode not in _PAD_MODES or states.shape[-1] <= total:
        return None
    if states.dim() != 3 or not is_faster(states, layer):
        return None
    behind = 0 if module.causal else total // 2
    return layer(functional.pad(channels_last(states), (total - behind, behind, 0, 0), module.pad_mode).squeeze(2))


def _difference(found: Tensor, expected: Tensor) -> str:
    atol = tolerance("waveform", found.dtype)
    is_equal = found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=atol)
    return "" if is_equal else "made another waveform than fastgen"
