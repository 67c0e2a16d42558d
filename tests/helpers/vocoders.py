"""Tiny vocoders of every class, with weights so large that their waveforms are loud, and switches for their tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fastgen
from fastgen.optimizer import vocoder as op
from fastgen.optimizer.decoding.report import Report

ONEDNN = "vocoder, oneDNN"

# Upsampling by an odd and an even number, with kernels that add a sample and kernels that do not.
SHAPE = {
    "upsample_initial_channel": 16,
    "upsample_rates": [3, 2],
    "upsample_kernel_sizes": [6, 4],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 2, 3]],
}
CHANNELS = 8


class Vocoder(NamedTuple):
    """generator: the module whose forward is patched. inputs: its arguments for a batch and a number of frames."""

    generator: nn.Module
    inputs: Callable[[int, int], tuple[Tensor, ...]]

    def convolutions(self) -> list[nn.Module]:
        """All its layers."""
        return [layer for layer in self.generator.modules() if isinstance(layer, (nn.Conv1d, nn.ConvTranspose1d))]

    def put_weight_norm(self, norm: Callable = parametrizations.weight_norm) -> Vocoder:
        """Itself, with a weight norm on each layer that changes what the weight is."""
        for layer in self.convolutions():
            norm(layer)
            length = layer.weight_g if norm is nn.utils.weight_norm else layer.parametrizations.weight.original0
            with torch.no_grad():
                length.mul_(torch.rand_like(length) + 0.5)
        return self


def of_class(name: str) -> Vocoder:
    """A vocoder of this class of transformers or fairseq, in evaluation mode."""
    torch.manual_seed(0)
    generator, inputs = _BUILDERS[name]()
    return Vocoder(make_loud(generator).eval(), inputs)


def make_loud(module: nn.Module) -> nn.Module:
    """Itself, with weights that keep states about as large as they come in, and biases that are heard."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape) * (weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.5))
    return module


def _states(batch: int, frames: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, CHANNELS, frames),)


def _seamless() -> tuple[nn.Module, Callable]:
    from transformers import SeamlessM4TConfig
    from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4THifiGan

    return SeamlessM4THifiGan(SeamlessM4TConfig(**SHAPE, unit_embed_dim=4, lang_embed_dim=2, spkr_embed_dim=2)), (
        _states
    )


def _seamless_v2() -> tuple[nn.Module, Callable]:
    from transformers import SeamlessM4Tv2Config
    from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2HifiGan

    return SeamlessM4Tv2HifiGan(SeamlessM4Tv2Config(**SHAPE, unit_embed_dim=4, lang_embed_dim=2, spkr_embed_dim=2)), (
        _states
    )


def _fairseq() -> tuple[nn.Module, Callable]:
    from fairseq.models.text_to_speech.hifigan import Generator

    generator = Generator({**SHAPE, "model_in_dim": CHANNELS})
    generator.remove_weight_norm()
    return generator, _states


_BUILDERS = {
    "SeamlessM4THifiGan": _seamless,
    "SeamlessM4Tv2HifiGan": _seamless_v2,
    "fairseq Generator": _fairseq,
}
CLASSES = tuple(_BUILDERS)


@contextmanager
def onednn(is_used: bool = True) -> Iterator[None]:
    """oneDNN for any number of frames and all layers, or for none."""
    least = 0 if is_used else sys.maxsize
    with mock.patch.multiple(op, MIN_FRAMES=least, MIN_INPUT=0):
        yield


def waveforms(vocoder: Vocoder, *inputs: Tensor) -> tuple[Tensor, Tensor, Report]:
    """The waveform with fastgen, that without, and the report of the first."""
    with torch.no_grad():
        found = vocoder.generator(*inputs)
        report = fastgen.explain()
        with fastgen.disabled():
            return found, vocoder.generator(*inputs), report


def assert_same(found: Tensor, expected: Tensor) -> None:
    """The same waveform to 1e-5, as the same kind of tensor."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found.stride(), found.requires_grad) == (expected.stride(), expected.requires_grad)
    assert expected.abs().mean() > 0.01
