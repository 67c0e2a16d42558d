"""The ways of computing a convolution and what follows it, on states `[batch, channels, 1, length]`.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional


class Torch:
    """torch's own functions, as the library calls them, on states that are laid out as given."""

    memory_format = torch.contiguous_format

    @staticmethod
    def convolution(
        states: Tensor, layer: nn.Conv1d, weight: Tensor, slope: float | None = None, plus: Tensor | None = None
    ) -> Tensor:
        """The layer's output, then LeakyReLU with this slope, then the sum with `plus` of the same shape."""
        padding, dilation = (0, layer.padding[0]), (1, layer.dilation[0])
        found = functional.conv2d(states, weight.unsqueeze(2), layer.bias, 1, padding, dilation, layer.groups)
        if slope is not None:
            found = functional.leaky_relu_(found, slope)
        return found if plus is None else found.add_(plus)


class OneDnn(Torch):
    """oneDNN's convolutions, channels last, with what follows in the same pass; fp32, on a CPU.

    torch gives oneDNN a sequence with all steps of a channel next to each other, which it reorders before and after
    each convolution. In this way it reorders the weight in each call, which short sequences do not pay for, and wide
    inputs do not either. Packed weights were not taken: made for 16, 64 or 256 frames they made a convolution of 1792
    to 512 channels twenty times slower with 150.
    """

    memory_format = torch.channels_last

    @staticmethod
    def convolution(
        states: Tensor, layer: nn.Conv1d, weight: Tensor, slope: float | None = None, plus: Tensor | None = None
    ) -> Tensor:
        """As `Torch.convolution`."""
        operation = torch.ops.mkldnn._convolution_pointwise
        padding, dilation = (0, layer.padding[0]), (1, layer.dilation[0])
        given = weight.unsqueeze(2), layer.bias, padding, (1, 1), dilation, layer.groups
        if plus is not None:
            return operation.binary(states, plus, *given, "add", 1.0, None, [], None)
        if slope is not None:
            return operation.default(states, *given, "leaky_relu", [slope], "")
        return operation.default(states, *given, "none", [], "")


@functools.cache
def onednn_reasons() -> list[str]:
    """Why there is no `OneDnn` on this machine; empty if there is."""
    operation = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    if operation is not None and "binary" in operation.overloads() and torch.backends.mkldnn.is_available():
        return []
    return ["this build of torch has no convolutions of oneDNN with what follows them"]


def upsampling(states: Tensor, layer: nn.ConvTranspose1d, weight: Tensor) -> Tensor:
    """The output `[batch, channels, 1, length]` of a transposed convolution."""
    stride, padding, dilation = (1, layer.stride[0]), (0, layer.padding[0]), (1, layer.dilation[0])
    output_padding = (0, layer.output_padding[0])
    return functional.conv_transpose2d(
        states, weight.unsqueeze(2), layer.bias, stride, padding, output_padding, layer.groups, dilation
    )
