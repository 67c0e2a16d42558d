"""The HiFi-GAN vocoders of Seamless M4T, SpeechT5, FastSpeech2Conformer and VITS.

Tests: tests/optimizer/vocoder/test_vocoders.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.ops.tolerances import tolerance
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.verify_once import Difference, verify_once
from fastgen.optimizer.transformers import PATCHES
from fastgen.optimizer.vocoder.faster import faster_waveform
from fastgen.optimizer.vocoder.hifi_gan import HifiGan, stages_of
from fastgen.patching import disabled

# By the module of the library.
_GROUPS = {patch.module: patch.group for patch in PATCHES}


def of_units(original: Callable, self: Any, inputs_embeds: Tensor) -> Tensor:
    """Seamless M4T's: states `[batch, channels, frames]` become a waveform `[batch, samples]`."""
    found = faster_waveform(self, _hifi_gan(self, self.leaky_relu_slope), inputs_embeds)
    if found is None:
        return original(self, inputs_embeds)
    return verified(self, found.squeeze(1), lambda: original(self, inputs_embeds))


def of_spectrogram(original: Callable, self: Any, spectrogram: Tensor, **kwargs: Any) -> Tensor:
    """SpeechT5's and FastSpeech2Conformer's: `[batch, frames, channels]` becomes `[batch, samples]`, one row may be
    without its first dimension.
    """
    if type(spectrogram) is not Tensor or spectrogram.dim() not in (2, 3):
        return original(self, spectrogram, **kwargs)
    states = (spectrogram - self.mean) / self.scale if self.config.normalize_before else spectrogram
    states = states if states.dim() == 3 else states.unsqueeze(0)
    found = faster_waveform(self, _hifi_gan(self, self.config.leaky_relu_slope), states.transpose(2, 1))
    if found is None:
        return original(self, spectrogram, **kwargs)
    found = found.squeeze(1) if spectrogram.dim() == 3 else found.view(-1)
    return verified(self, found, lambda: original(self, spectrogram, **kwargs))


def of_latents(original: Callable, self: Any, spectrogram: Tensor, global_conditioning: Any = None) -> Tensor:
    """VITS's decoder: latents `[batch, channels, frames]` become a waveform `[batch, 1, samples]`."""
    gan = _hifi_gan(self, self.config.leaky_relu_slope)
    found = faster_waveform(self, gan, spectrogram, global_conditioning)
    if found is None:
        return original(self, spectrogram, global_conditioning)
    return verified(self, found, lambda: original(self, spectrogram, global_conditioning))


def verified(generator: Any, found: Tensor, original: Callable[[], Tensor]) -> Tensor:
    """What was found; where transformers is newer than any version tested, the first of a class is compared."""
    kind = library_class(generator)

    def refuse(difference: Difference) -> None:
        PATCH_SET.fail(_GROUPS[kind.__module__], f"{kind.__name__} {difference}")

    if not PATCH_SET.newer_than_tested("transformers"):
        return found
    with disabled():
        return verify_once(kind, lambda: found, original, _difference, refuse)


def _difference(found: Tensor, expected: Tensor) -> Difference | None:
    atol = tolerance("waveform", found.dtype)
    is_equal = found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=atol)
    return None if is_equal else Difference("made another waveform than fastgen")


def _hifi_gan(generator: Any, slope: float) -> HifiGan:
    blocks = list(generator.resblocks)
    slopes = [block.leaky_relu_slope for block in blocks]
    stages = stages_of(generator.upsampler[: generator.num_upsamples], blocks, generator.num_kernels, slopes)
    condition = getattr(generator, "cond", None)
    first, last = generator.conv_pre, generator.conv_post
    return HifiGan(first, stages, last, slope, condition, blocks, _block_class(generator))


def _block_class(generator: nn.Module) -> type[nn.Module]:
    """The residual block of the library's model, which has a module for itself."""
    return sys.modules[library_class(generator).__module__].HifiGanResidualBlock


def library_class(generator: nn.Module) -> type[nn.Module]:
    """The class of the library that it is, or is made from."""
    return next(kind for kind in type(generator).__mro__ if kind.__module__.startswith("transformers."))
