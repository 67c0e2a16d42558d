"""The layers of a HiFi-GAN generator, whatever its host calls them, and its forward (Kong et al., section 2.2).

Tests: tests/optimizer/vocoder/test_vocoders.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastgen.optimizer.vocoder import layers
from fastgen.optimizer.vocoder.convolutions import Torch, upsampling
from fastgen.optimizer.vocoder.weights import plain_weight

# Of the last LeakyReLU, for which the hosts take what torch has by default.
LAST_SLOPE = 0.01

# The convolutions of a residual block: `x` becomes `x + second(leaky_relu(first(leaky_relu(x))))`, for each pair.
Block = list[tuple[nn.Conv1d, nn.Conv1d]]


@dataclass(frozen=True)
class Stage:
    """An upsampling, and the blocks whose mean is taken of its output. slopes: of the blocks' LeakyReLU."""

    upsampling: nn.ConvTranspose1d
    blocks: list[Block]
    slopes: list[float]


def stages_of(upsamplings: Iterable[nn.Module], blocks: list[Any], each: int, slopes: list[float]) -> list[Stage]:
    """The stages of a generator that has `each` residual blocks for every upsampling, in a row, with these slopes."""
    stages = []
    for place, layer in enumerate(upsamplings):
        own = slice(place * each, (place + 1) * each)
        pairs = [list(zip(block.convs1, block.convs2)) for block in blocks[own]]
        stages.append(Stage(layer, pairs, slopes[own]))
    return stages


@dataclass(frozen=True)
class HifiGan:
    """slope: of the LeakyReLU before each upsampling. condition: makes a summand of what the voice is given by, if the
    generator can be told. skipped: modules whose forwards are not called, and the class that these forwards come from.
    """

    first: nn.Conv1d
    stages: list[Stage]
    last: nn.Conv1d
    slope: float
    condition: nn.Conv1d | None
    skipped: list[nn.Module]
    skipped_class: type[nn.Module]

    def convolutions(self) -> Iterator[nn.Conv1d]:
        """All that keep the length."""
        yield self.first
        if self.condition is not None:
            yield self.condition
        for stage in self.stages:
            for block in stage.blocks:
                for pair in block:
                    yield from pair
        yield self.last

    def layers(self) -> list[nn.Module]:
        """All layers."""
        return [*self.convolutions(), *(stage.upsampling for stage in self.stages)]

    def samples(self, frames: int) -> int:
        """The length of the waveform for so many frames."""
        for stage in self.stages:
            frames = layers.upsampled(stage.upsampling, frames)
        return frames


def unsupported_reasons(gan: HifiGan) -> list[str]:
    """Why these layers are not what `waveform` computes; empty if they are."""
    blocks = [block for stage in gan.stages for block in stage.blocks]
    if not blocks or not all(blocks) or not all(stage.blocks for stage in gan.stages):
        return ["a stage without residual blocks"]
    for layer in gan.layers():
        if reasons := layers.unsupported_reasons(layer):
            return reasons
    if not all(isinstance(layer, nn.Conv1d) and layers.keeps_length(layer) for layer in gan.convolutions()):
        return ["a convolution that changes the length"]
    if not all(isinstance(stage.upsampling, nn.ConvTranspose1d) for stage in gan.stages):
        return ["an upsampling that is no transposed convolution"]
    if any(layers.has_own_code(module, gan.skipped_class) for module in gan.skipped):
        return ["a residual block has a forward of its own"]
    if any(map(layers.has_hooks, gan.skipped)):
        return ["a residual block has a forward hook"]
    return [] if gan.last.out_channels == 1 else [f"a waveform of {gan.last.out_channels} channels"]


def waveform(gan: HifiGan, states: Tensor, way: type[Torch], voice: Tensor | None = None) -> Tensor:
    """The waveform `[batch, 1, samples]` of `states` `[batch, channels, frames]`; without gradients.

    voice: for the condition, `[batch or 1, channels, 1]`.
    """
    weights = {layer: plain_weight(layer) for layer in gan.layers()}
    states = states.unsqueeze(2).contiguous()
    states = Torch.convolution(states, gan.first, weights[gan.first])
    if voice is not None and gan.condition is not None:
        states = states.add_(Torch.convolution(voice.unsqueeze(2), gan.condition, weights[gan.condition]))
    states = states.contiguous(memory_format=way.memory_format)
    for stage in gan.stages:
        states = functional.leaky_relu_(states, gan.slope)
        states = upsampling(states, stage.upsampling, weights[stage.upsampling])
        states = _mean_of_blocks(stage, weights, states, way)
    states = functional.leaky_relu_(states, LAST_SLOPE)
    found = torch.tanh_(way.convolution(states, gan.last, weights[gan.last]))
    return found.reshape(found.shape[0], found.shape[1], -1)


def _mean_of_blocks(stage: Stage, weights: dict[nn.Module, Tensor], states: Tensor, way: type[Torch]) -> Tensor:
    total = None
    for block, slope in zip(stage.blocks, stage.slopes):
        found = states
        for first, second in block:
            inner = way.convolution(functional.leaky_relu(found, slope), first, weights[first], slope=slope)
            found = way.convolution(inner, second, weights[second], plus=found)
        total = found if total is None else total.add_(found)
    return total.div_(len(stage.blocks))
