"""The layers of a SEANet decoder, whatever its host calls them, and its forward (EnCodec, Défossez et al., 2022).

Wide layers come first, where sequences are short; there torch's convolutions are taken. oneDNN reorders each weight in
each call, see `OneDnn`, which pays from the first layer on whose input is no smaller than its weight.

Tests: tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional

from fastgen.optimizer.vocoder.convolutions import Torch, upsampling
from fastgen.optimizer.vocoder.weights import plain_weight

MODES = ("constant", "reflect", "replicate")


class Part(Protocol):
    """A step from states `[batch, channels, 1, length]` to the next."""

    def known(self) -> list[Convolution | Upsampling]:
        """What is computed here."""

    def run(self, states: Tensor, forward: Forward) -> Tensor:
        """The next states."""


class Convolution(NamedTuple):
    """Of an input that is made longer in one of the `MODES` of `pad`; its output is as long as the input was."""

    layer: nn.Conv1d
    front: int
    behind: int
    mode: str

    def known(self) -> list[Convolution | Upsampling]:
        return [self]

    def run(self, states: Tensor, forward: Forward, plus: Tensor | None = None) -> Tensor:
        if self.front or self.behind:
            states = functional.pad(states, (self.front, self.behind, 0, 0), self.mode)
        weight = forward.weights[self.layer]
        states = forward.laid_out(states, weight)
        return forward.way.convolution(states, self.layer, weight, plus=plus)

    def keeps_length(self) -> bool:
        """Whether it is as described."""
        layer, padding = self.layer, self.front + self.behind + 2 * self.layer.padding[0]
        return layer.stride == (1,) and padding == layer.dilation[0] * (layer.kernel_size[0] - 1)


class Upsampling(NamedTuple):
    """A transposed convolution, of whose output so many steps are cut off."""

    layer: nn.ConvTranspose1d
    front: int
    behind: int

    def known(self) -> list[Convolution | Upsampling]:
        return [self]

    def run(self, states: Tensor, forward: Forward) -> Tensor:
        weight = forward.weights[self.layer]
        states = upsampling(forward.laid_out(states, weight), self.layer, weight)
        return states[..., self.front : states.shape[-1] - self.behind]


class Residual(NamedTuple):
    """The sum of what `parts` make of the states and of what the shortcut makes of them."""

    parts: list[Part]
    shortcut: Part

    def known(self) -> list[Convolution | Upsampling]:
        return known([*self.parts, self.shortcut])

    def run(self, states: Tensor, forward: Forward) -> Tensor:
        *parts, last = self.parts
        inner, kept = forward.through(parts, states), self.shortcut.run(states, forward)
        if isinstance(last, Convolution):
            return last.run(inner, forward, plus=kept)
        return last.run(inner, forward) + kept


class Called(NamedTuple):
    """A module of the host: an activation, an LSTM, whatever is not known."""

    module: nn.Module

    def known(self) -> list[Convolution | Upsampling]:
        return []

    def run(self, states: Tensor, forward: Forward) -> Tensor:
        return self.module(states.squeeze(2)).unsqueeze(2)


class Forward:
    """One forward. way: torch's, and `fastest` after the first layer whose input is no smaller than its weight."""

    def __init__(self, weights: dict[nn.Module, Tensor], fastest: type[Torch]) -> None:
        self.weights, self.fastest, self.way = weights, fastest, Torch

    def through(self, parts: list[Part], states: Tensor) -> Tensor:
        """What all parts make of the states."""
        for part in parts:
            states = part.run(states, self)
        return states

    def laid_out(self, states: Tensor, weight: Tensor) -> Tensor:
        """The states as the way for a layer of this weight reads them."""
        if states.numel() >= weight.numel():
            self.way = self.fastest
        return states.contiguous(memory_format=self.way.memory_format)


def decoded(parts: list[Part], states: Tensor, fastest: type[Torch]) -> Tensor:
    """The waveform `[batch, channels, samples]` of `states` `[batch, channels, frames]`; without gradients."""
    weights = {layer: plain_weight(layer) for layer in layers_of(parts)}
    found = Forward(weights, fastest).through(parts, states.unsqueeze(2)).contiguous()
    return found.reshape(found.shape[0], found.shape[1], -1)


def known(parts: Iterable[Part]) -> list[Convolution | Upsampling]:
    """What is computed here, in the order of the forward."""
    return [one for part in parts for one in part.known()]


def layers_of(parts: list[Part]) -> list[nn.Module]:
    """The layers that are computed here."""
    return [one.layer for one in known(parts)]
