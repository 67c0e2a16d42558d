"""The HiFi-GAN generator of fairseq, for spectrograms and, as `CodeGenerator`, for units.

Tests: tests/optimizer/vocoder/test_fairseq_vocoders.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq.models.text_to_speech.hifigan import LRELU_SLOPE, ResBlock
from torch import Tensor

from fastgen.optimizer.vocoder.faster import faster_waveform
from fastgen.optimizer.vocoder.hifi_gan import HifiGan, stages_of
from fastgen.optimizer.vocoder.layers import are_all_watched, has_hooks


def forward(original: Callable, self: Any, x: Tensor) -> Tensor:
    """States `[batch, channels, frames]` become a waveform `[batch, 1, samples]`."""
    found = faster_waveform(self, _hifi_gan(self), x)
    return original(self, x) if found is None else found


def without_gradients(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Of a vocoder, whose waveform has no gradients: none are recorded on the way there, unless somebody looks."""
    if are_all_watched() or any(map(has_hooks, _watchable(self))):
        return original(self, *args, **kwargs)
    with torch.no_grad():
        return original(self, *args, **kwargs)


def _watchable(vocoder: Any) -> list[Any]:
    """Its modules, but for the layers, on which weight norm is a hook, too."""
    return [module for module in vocoder.model.modules() if "weight_g" not in module._parameters]


def _hifi_gan(generator: Any) -> HifiGan:
    blocks = list(generator.resblocks)
    slopes = [LRELU_SLOPE] * len(blocks)
    stages = stages_of(generator.ups[: generator.num_upsamples], blocks, generator.num_kernels, slopes)
    return HifiGan(generator.conv_pre, stages, generator.conv_post, LRELU_SLOPE, None, blocks, ResBlock)
