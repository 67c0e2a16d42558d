"""The HiFi-GAN vocoders of Seamless M4T, SpeechT5, FastSpeech2Conformer and VITS, and the decoders of EnCodec and Mimi.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.ops.tolerances import tolerance
from fastgen.optimizer import PATCHES
from fastgen.optimizer.transformers import compat
from fastgen.optimizer.transformers.checks import KNOWN
from fastgen.optimizer.vocoder import Layers, Step, called, faster_waveform, residual

# In which a codec pads: those of torch's `pad` that put no numbers of their own there.
_PAD_MODES = ("constant", "reflect", "replicate")


def vocode_units(original: Callable, self: Any, inputs_embeds: Tensor) -> Tensor:
    """Seamless M4T's: states `[batch, channels, frames]` become a waveform `[batch, samples]`."""
    found = _vocoded(self, inputs_embeds, self.leaky_relu_slope)
    return verified(self, found if found is None else found.squeeze(1), lambda: original(self, inputs_embeds))


def vocode_spectrogram(original: Callable, self: Any, spectrogram: Tensor, **kwargs: Any) -> Tensor:
    """SpeechT5's and FastSpeech2Conformer's: `[batch, frames, channels]` becomes `[batch, samples]`, one row may be
    without its first dimension.
    """
    if type(spectrogram) is not Tensor or spectrogram.dim() not in (2, 3):
        return original(self, spectrogram, **kwargs)
    states = (spectrogram - self.mean) / self.scale if self.config.normalize_before else spectrogram
    states = states.reshape(-1, *states.shape[-2:]).transpose(2, 1)  # [batch, channels, frames]
    found = _vocoded(self, states, self.config.leaky_relu_slope)
    found = found if found is None else found.view(*spectrogram.shape[:-2], -1)
    return verified(self, found, lambda: original(self, spectrogram, **kwargs))


def decode_latents(original: Callable, self: Any, spectrogram: Tensor, global_conditioning: Any = None) -> Tensor:
    """VITS's decoder: latents `[batch, channels, frames]` become a waveform `[batch, 1, samples]`."""

    def first(states: Tensor) -> Tensor:
        return self.conv_pre(states) + self.cond(global_conditioning)

    slope = self.config.leaky_relu_slope
    found = _vocoded(self, spectrogram, slope, None if global_conditioning is None else first)
    return verified(self, found, lambda: original(self, spectrogram, global_conditioning))


def decode_codes(original: Callable, self: Any, hidden_states: Tensor) -> Tensor:
    """Of a codec: states `[batch, channels, frames]` become a waveform `[batch, channels, samples]`."""
    kind = library_class(self)

    def steps(layers: Layers) -> list[Step]:
        return [_step(module, kind, layers) for module in self.layers]

    found = faster_waveform(self, KNOWN, hidden_states, steps, is_codec=True)
    return verified(self, found, lambda: original(self, hidden_states))


def verified(owner: nn.Module, found: Tensor | None, original: Callable[[], Tensor]) -> Tensor:
    """What was found, if anything; where transformers is newer than any version tested, a class is compared first."""
    if found is None:
        return original()
    kind, waveform = library_class(owner), found
    group = next(patch.group for patch in PATCHES if patch.path[0] == kind.__name__)
    return compat.verified_if_newer(group, kind, lambda: waveform, original, _difference)


def _difference(found: Tensor, expected: Tensor) -> str:
    atol = tolerance("waveform", found.dtype)
    is_equal = found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=atol)
    return "" if is_equal else "made another waveform than fastgen"


def library_class(owner: nn.Module) -> type[nn.Module]:
    """The class of the library that it is, or is made from."""
    return next(kind for kind in type(owner).__mro__ if kind.__module__.startswith("transformers."))


def _vocoded(generator: Any, states: Tensor, slope: float, first: Any = None) -> Tensor | None:
    def steps(layers: Layers) -> list[Step]:
        return layers.hifi_gan(generator, generator.upsampler[: generator.num_upsamples], slope, first)

    return faster_waveform(generator, KNOWN, states, steps)


def _step(module: Any, kind: type[nn.Module], layers: Layers) -> Step:
    """What this module of a decoder of this class is; called where that is not known."""
    if module in layers.altered or type(module).__module__ != kind.__module__ or hasattr(module, "norm"):
        return called(module)
    if hasattr(module, "block"):
        steps = [_step(one, kind, layers) for one in module.block]
        return residual(steps, _step(module.shortcut, kind, layers))
    if not hasattr(module, "conv") or not layers.can_compute(module.conv):
        return called(module)
    layer = module.conv
    if isinstance(layer, nn.ConvTranspose1d):
        total = layer.kernel_size[0] - layer.stride[0]
        behind = math.ceil(total * module.trim_right_ratio) if module.causal else total // 2
        return layers.upsampling(layer, module, (total - behind, behind))
    if layer.stride != (1,) or layer.padding != (0,) or module.pad_mode not in _PAD_MODES:
        return called(module)
    total = layer.dilation[0] * (layer.kernel_size[0] - 1)
    behind = 0 if module.causal else total // 2
    return layers.convolution(layer, module, (total - behind, behind), module.pad_mode)
