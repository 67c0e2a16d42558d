"""What a HiFi-GAN generator or a SEANet decoder is made of, whatever its host calls it, and its forward.

Each part makes states `[batch, channels, 1, length]` of the states before it:

    HiFi-GAN   Called ─> Called ─> (Upsampling ─> Mean of blocks)* ─> Convolution ─> Called
               a block is a chain of Residual(Called, Convolution, Convolution)
    SEANet     Convolution ─> Called ─> (Called ─> Upsampling ─> Residual*)* ─> Called ─> Convolution

`Called` is an activation, or a module of the host that is not known here or is more than its library's code.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastgen.optimizer.vocoder import convolutions

# Of the last LeakyReLU of a HiFi-GAN, for which the hosts take what torch has by default.
LAST_SLOPE = 0.01


class Part(Protocol):
    """A step from states `[batch, channels, 1, length]` to the next."""

    def run(self, states: Tensor) -> Tensor:
        """The next states."""

    def layers(self) -> list[nn.Module]:
        """What is computed here."""


class Called(NamedTuple):
    """A function or module of states `[batch, channels, length]`."""

    function: Callable[[Tensor], Tensor]

    def layers(self) -> list[nn.Module]:
        return []

    def run(self, states: Tensor) -> Tensor:
        return self.function(states.squeeze(2)).unsqueeze(2)


class Convolution(NamedTuple):
    """A convolution of an input that is padded (front, behind) in a mode of `pad`, and a LeakyReLU with this slope.

    module: what the host calls for the padding and the layer.
    """

    layer: nn.Module
    module: nn.Module
    padding: tuple[int, int] = (0, 0)
    mode: str = "constant"
    slope: float | None = None

    def layers(self) -> list[nn.Module]:
        return [self.layer]

    def run(self, states: Tensor, plus: Tensor | None = None) -> Tensor:
        """plus: is added to the next states."""
        if not convolutions.pays(states, self.layer) or states.shape[-1] <= max(self.padding):
            found = self.module(states.squeeze(2)).unsqueeze(2)
            found = found if self.slope is None else functional.leaky_relu(found, self.slope)
            return found if plus is None else found + plus
        if any(self.padding):
            states = functional.pad(states, (*self.padding, 0, 0), self.mode)
        return convolutions.convolution(states, self.layer, self.slope, plus)


class Upsampling(NamedTuple):
    """A transposed convolution, of whose output so many steps (front, behind) are trimmed. module: as above."""

    layer: nn.Module
    module: nn.Module
    trimmed: tuple[int, int] = (0, 0)

    def layers(self) -> list[nn.Module]:
        return [self.layer]

    def run(self, states: Tensor) -> Tensor:
        if not convolutions.pays(states, self.layer):
            return self.module(states.squeeze(2)).unsqueeze(2)
        found = convolutions.upsampling(states, self.layer)
        return found[..., self.trimmed[0] : found.shape[-1] - self.trimmed[1]]


class Residual(NamedTuple):
    """The sum of what `parts` make of the states, and of what the shortcut makes of them (None: of the states)."""

    parts: list[Part]
    shortcut: Part | None = None

    def layers(self) -> list[nn.Module]:
        return layers_of(self.parts) + (self.shortcut.layers() if self.shortcut else [])

    def run(self, states: Tensor) -> Tensor:
        *parts, last = self.parts
        inner = _through(parts, states)
        residual = self.shortcut.run(states) if self.shortcut else states
        return last.run(inner, residual) if isinstance(last, Convolution) else last.run(inner) + residual


class Mean(NamedTuple):
    """The mean of what each chain of parts makes of the states, and a LeakyReLU with this slope."""

    chains: list[list[Part]]
    slope: float

    def layers(self) -> list[nn.Module]:
        return [layer for parts in self.chains for layer in layers_of(parts)]

    def run(self, states: Tensor) -> Tensor:
        total = _through(self.chains[0], states)
        for parts in self.chains[1:]:
            total += _through(parts, states)
        return functional.leaky_relu_(total / len(self.chains), self.slope)


def hifi_gan(
    generator: Any,
    upsamplings: Sequence[nn.Module],
    slope: float,
    altered: Collection[nn.Module],
    first: Callable[[Tensor], Tensor] | None = None,
) -> list[Part]:
    """The parts of a generator with the names of modules that the authors' code has (Kong et al., section 2.2).

    slope: of its LeakyReLUs. altered: modules that have to be called. first: its first layer, and what is added there.
    """
    parts: list[Part] = [Called(first or generator.conv_pre), _leaky_relu(slope)]
    chains, each = [_block(block, slope, altered) for block in generator.resblocks], generator.num_kernels
    for index, layer in enumerate(upsamplings, 1):
        blocks = chains[(index - 1) * each : index * each]
        parts += [_layer(layer, altered), Mean(blocks, slope if index < len(upsamplings) else LAST_SLOPE)]
    return [*parts, _layer(generator.conv_post, altered), Called(torch.tanh)]


def _block(block: Any, slope: float, altered: Collection[nn.Module]) -> list[Part]:
    """Of a residual block, which may tell its own slope: `x` becomes `x + second(first(x))` for each pair of layers."""
    if block in altered or not hasattr(block, "convs1"):
        return [Called(block)]
    slope = getattr(block, "leaky_relu_slope", slope)
    return [
        Residual([_leaky_relu(slope), _layer(first, altered, slope), _layer(second, altered)])
        for first, second in zip(block.convs1, block.convs2)
    ]


def _leaky_relu(slope: float) -> Called:
    return Called(partial(functional.leaky_relu, negative_slope=slope))


def _layer(layer: Any, altered: Collection[nn.Module], slope: float | None = None) -> Part:
    """A layer of the host, and the LeakyReLU that follows it; called where it is not supported or is altered."""
    if layer in altered or not convolutions.is_supported(layer):
        return Called(layer if slope is None else lambda states: functional.leaky_relu(layer(states), slope))
    if isinstance(layer, nn.ConvTranspose1d):
        return Upsampling(layer, layer)
    return Convolution(layer, layer, slope=slope)


def layers_of(parts: Iterable[Part]) -> list[nn.Module]:
    """The layers that are computed here, in the order of the forward."""
    return [layer for part in parts for layer in part.layers()]


def waveform(parts: list[Part], states: Tensor) -> Tensor:
    """The waveform `[batch, channels, samples]` of `states` `[batch, channels, frames]`, without gradients."""
    with torch.no_grad():
        found = _through(parts, states.unsqueeze(2)).contiguous()
    return found.reshape(found.shape[0], found.shape[1], -1)


def _through(parts: Iterable[Part], states: Tensor) -> Tensor:
    return reduce(lambda states, part: part.run(states), parts, states)
