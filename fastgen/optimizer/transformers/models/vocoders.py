"""The HiFi-GAN vocoders of Seamless M4T, SpeechT5, FastSpeech2Conformer and VITS, and the decoders of EnCodec and Mimi.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.ops.tolerances import tolerance
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.verify_once import Difference, verify_once
from fastgen.optimizer.transformers import PATCHES
from fastgen.optimizer.transformers.checks import KNOWN
from fastgen.optimizer.vocoder.convolutions import is_supported
from fastgen.optimizer.vocoder.forward import faster_waveform
from fastgen.optimizer.vocoder.parts import Called, Convolution, Part, Residual, Upsampling, hifi_gan
from fastgen.patching import disabled

# By the module of the library.
_GROUPS = {patch.module: patch.group for patch in PATCHES}

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

    def parts(altered: Collection[nn.Module]) -> list[Part]:
        return [_part(module, kind, altered) for module in self.layers]

    found = faster_waveform(self, KNOWN, hidden_states, parts, is_codec=True)
    return verified(self, found, lambda: original(self, hidden_states))


def verified(owner: nn.Module, found: Tensor | None, original: Callable[[], Tensor]) -> Tensor:
    """What was found, if anything; where transformers is newer than any version tested, a class is compared first."""
    if found is None:
        return original()
    if not PATCH_SET.newer_than_tested("transformers"):
        return found
    kind, waveform = library_class(owner), found

    def refuse(difference: Difference) -> None:
        PATCH_SET.fail(_GROUPS[kind.__module__], f"{kind.__name__} {difference}")

    with disabled():
        return verify_once(kind, lambda: waveform, original, _difference, refuse)


def _difference(found: Tensor, expected: Tensor) -> Difference | None:
    atol = tolerance("waveform", found.dtype)
    is_equal = found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=atol)
    return None if is_equal else Difference("made another waveform than fastgen")


def library_class(owner: nn.Module) -> type[nn.Module]:
    """The class of the library that it is, or is made from."""
    return next(kind for kind in type(owner).__mro__ if kind.__module__.startswith("transformers."))


def _vocoded(
    generator: Any, states: Tensor, slope: float, first: Callable[[Tensor], Tensor] | None = None
) -> Tensor | None:
    def parts(altered: Collection[nn.Module]) -> list[Part]:
        return hifi_gan(generator, generator.upsampler[: generator.num_upsamples], slope, altered, first)

    return faster_waveform(generator, KNOWN, states, parts)


def _part(module: Any, kind: type[nn.Module], altered: Collection[nn.Module]) -> Part:
    """What this module of a decoder of this class is; called where that is not known."""
    if module in altered or type(module).__module__ != kind.__module__ or hasattr(module, "norm"):
        return Called(module)
    if hasattr(module, "block"):
        parts = [_part(one, kind, altered) for one in module.block]
        return Residual(parts, _part(module.shortcut, kind, altered))
    if not hasattr(module, "conv") or module.conv in altered or not is_supported(module.conv):
        return Called(module)
    return _upsampling(module) if isinstance(module.conv, nn.ConvTranspose1d) else _convolution(module)


def _upsampling(module: Any) -> Part:
    total = module.conv.kernel_size[0] - module.conv.stride[0]
    behind = math.ceil(total * module.trim_right_ratio) if module.causal else total // 2
    return Upsampling(module.conv, module, (total - behind, behind))


def _convolution(module: Any) -> Part:
    layer = module.conv
    total = layer.dilation[0] * (layer.kernel_size[0] - 1)
    behind = 0 if module.causal else total // 2
    is_known = layer.stride == (1,) and layer.padding == (0,) and module.pad_mode in _PAD_MODES
    return Convolution(layer, module, (total - behind, behind), module.pad_mode) if is_known else Called(module)
