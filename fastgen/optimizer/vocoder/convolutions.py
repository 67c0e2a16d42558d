"""One-dimensional convolutions of oneDNN, channels last, with what follows them in the same pass; fp32, on a CPU.

torch gives oneDNN a sequence with all steps of a channel next to each other, which it reorders before and after each
convolution. Here states `[batch, channels, 1, length]` stay channels last from one layer to the next. In this way
oneDNN reorders the weight in each call, which pays where the input is no smaller than the weight. Prepacked weights
were not taken: made for 16, 64 or 256 frames they made a convolution of 1792 to 512 channels twenty times slower with
150.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py,
tests/optimizer/vocoder/test_weight_norm.py
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

# Elements of a layer's input for each element of its weight, from which on this pays.
MIN_INPUT = 1.0


@functools.cache
def machine_reasons() -> list[str]:
    """Why there are none on this machine; empty if there are."""
    operation = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    if operation is not None and "binary" in operation.overloads() and torch.backends.mkldnn.is_available():
        return []
    return ["this build of torch has no convolutions of oneDNN with what follows them"]


def is_supported(layer: Any) -> bool:
    """Whether this layer is computed from its weight and bias: a `Conv1d` or `ConvTranspose1d` that pads with zeros.

    Its weight may have a parametrization or weight norm.
    """
    kind = parametrize.type_before_parametrizations(layer)
    if kind not in (nn.Conv1d, nn.ConvTranspose1d) or "bias" not in layer._parameters:
        return False
    has_weight = "weight" in layer._parameters or parametrize.is_parametrized(layer, "weight") or _is_normed(layer)
    return has_weight and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _is_normed(layer: nn.Module) -> bool:
    return [hook.name for hook in layer._forward_pre_hooks.values() if type(hook) is WeightNorm] == ["weight"]


def pays(states: Tensor, layer: Any) -> bool:
    """Whether this layer is faster here than in its own forward, for these states."""
    weights = layer.in_channels * layer.out_channels * layer.kernel_size[0] // layer.groups
    return states.numel() >= MIN_INPUT * weights


def convolution(states: Tensor, layer: Any, slope: float | None = None, plus: Tensor | None = None) -> Tensor:
    """The output of a `Conv1d`, `[batch, channels, 1, length]`, without gradients.

    slope: of a LeakyReLU that follows. plus: is added to the output; not both.
    """
    operation = torch.ops.mkldnn._convolution_pointwise
    stride, padding, dilation = (1, layer.stride[0]), (0, layer.padding[0]), (1, layer.dilation[0])
    states, given = _channels_last(states), (_weight_of(layer), layer.bias, padding, stride, dilation, layer.groups)
    if plus is not None and plus.shape == _output_shape(states, layer):  # which oneDNN does not check
        return operation.binary(states, _channels_last(plus), *given, "add", 1.0, None, [], None)
    activation = ("none", [], "") if slope is None else ("leaky_relu", [slope], "")
    found = operation.default(states, *given, *activation)
    return found if plus is None else found + plus


def _output_shape(states: Tensor, layer: Any) -> tuple[int, ...]:
    left = states.shape[3] + 2 * layer.padding[0] - layer.dilation[0] * (layer.kernel_size[0] - 1) - 1
    return states.shape[0], layer.out_channels, 1, left // layer.stride[0] + 1


def upsampling(states: Tensor, layer: Any) -> Tensor:
    """The output of a `ConvTranspose1d`, `[batch, channels, 1, length]`."""
    stride, padding, dilation = (1, layer.stride[0]), (0, layer.padding[0]), (1, layer.dilation[0])
    output_padding = (0, layer.output_padding[0])
    return functional.conv_transpose2d(
        _channels_last(states), _weight_of(layer), layer.bias, stride, padding, output_padding, layer.groups, dilation
    )


def _channels_last(states: Tensor) -> Tensor:
    return states.contiguous(memory_format=torch.channels_last)


def _weight_of(layer: nn.Module) -> Tensor:
    """The weight that a forward of this layer would use, `[…, 1, kernel_size]`."""
    for hook in layer._forward_pre_hooks.values():  # weight norm's, which puts the weight on the layer
        hook(layer, ())
    return layer.weight.unsqueeze(2)
