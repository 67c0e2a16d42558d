"""The HiFi-GAN generator of fairseq, for spectrograms and, as `CodeGenerator`, for units.

Tests: tests/optimizer/vocoder/test_fairseq_vocoders.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from fairseq.models.text_to_speech.hifigan import LRELU_SLOPE
from torch import Tensor, nn

from fastgen.optimizer.decoding.model_facts import facts_of
from fastgen.optimizer.fairseq.checks import KNOWN
from fastgen.optimizer.vocoder.forward import faster_waveform
from fastgen.optimizer.vocoder.parts import Part, hifi_gan


def forward(original: Callable, self: Any, x: Tensor) -> Tensor:
    """States `[batch, channels, frames]` become a waveform `[batch, 1, samples]`."""

    def parts(altered: Collection[nn.Module]) -> list[Part]:
        return hifi_gan(self, self.ups[: self.num_upsamples], LRELU_SLOPE, altered)

    found = faster_waveform(self, KNOWN, x, parts)
    return original(self, x) if found is None else found


def without_gradients(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Of a vocoder, whose waveform has no gradients: none are recorded on the way there, unless somebody looks."""
    if facts_of(self.model, KNOWN).altered:
        return original(self, *args, **kwargs)
    with torch.no_grad():
        return original(self, *args, **kwargs)
