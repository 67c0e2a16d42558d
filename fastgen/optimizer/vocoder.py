"""Vocoders on a CPU: HiFi-GAN generators (Kong et al., 2020), which make a waveform of a spectrogram or of units, and
SEANet decoders (EnCodec, Défossez et al., 2022), which make one of a codec's states. Knows no host.

A forward is a chain of steps, each of which makes states `[batch, channels, 1, length]` of the states before it:

    HiFi-GAN   called ─> called ─> (upsampling ─> mean of blocks)* ─> convolution ─> called
               a block is a chain of residual(called, convolution, convolution)
    SEANet     convolution ─> called ─> (called ─> upsampling ─> residual*)* ─> called ─> convolution

`called` is an activation, or a module of the host that is not known here or is more than its library's code. Others
are one-dimensional convolutions of oneDNN, channels last, with what follows them in the same pass, in fp32: torch gives
oneDNN a sequence with all steps of a channel next to each other, which it reorders before and after each convolution.
In this way oneDNN reorders the weight in each call, which pays where the input is no smaller than the weight. Prepacked
weights were not taken: made for 16, 64 or 256 frames they made a convolution of 1792 to 512 channels twenty times
slower with 150.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py,
tests/optimizer/vocoder/test_weight_norm.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

from fastgen.ops.tracing import is_transformed, is_watched
from fastgen.optimizer.decoding.call import add_reasons, count, current_call, generate_call
from fastgen.optimizer.decoding.model_facts import facts_of
from fastgen.optimizer.decoding.report import VOCODER, Reason
from fastgen.optimizer.decoding.user_code import KnownCode

ONEDNN = "vocoder, oneDNN"

# Of all rows together: so many that most of the time goes to layers where oneDNN pays.
MIN_FRAMES, MIN_CODEC_FRAMES = 32, 16

# Elements of a layer's input for each element of its weight, from which on oneDNN pays.
MIN_INPUT = 1.0

# Of the last LeakyReLU of a HiFi-GAN, for which the hosts take what torch has by default.
LAST_SLOPE = 0.01

# From states to the next states; of a layer also with a tensor that is added to them.
Step = Callable[..., Tensor]


def faster_waveform(
    owner: nn.Module,
    known: KnownCode,
    states: Tensor,
    steps_of: Callable[[Layers], list[Step]],
    is_codec: bool = False,
) -> Tensor | None:
    """The waveform `[batch, channels, samples]` of `states` `[batch, channels, frames]`, or None to leave it alone.

    owner: the generator or decoder. known: what its host knows of code. steps_of: makes the steps of its forward. What
    was done, or why not, goes to the report of the `generate` that runs; of a call outside of one, `explain()` returns
    it.
    """
    with nullcontext() if current_call() is not None else generate_call(type(owner).__name__):
        reasons = unsupported_reasons(owner, states, MIN_CODEC_FRAMES if is_codec else MIN_FRAMES)
        if not reasons:
            facts = facts_of(owner, known)
            are_all = None in facts.altered
            altered = {module for name, module in facts.modules.items() if are_all or name in facts.altered}
            steps = steps_of(layers := Layers(altered))
            reasons = layers.unsupported_reasons()
        if reasons:
            add_reasons(VOCODER, reasons)
            return None
        count(ONEDNN)
        with torch.no_grad():
            return chain(steps)(states.unsqueeze(2)).contiguous().flatten(2)


@functools.cache
def has_onednn() -> bool:
    """Whether this build of torch has convolutions of oneDNN with what follows them."""
    operation = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    return operation is not None and "binary" in operation.overloads() and torch.backends.mkldnn.is_available()


def unsupported_reasons(owner: nn.Module, states: Tensor, min_frames: int) -> list[Reason]:
    """Why this call is left to the library, whatever the layers are; empty if it is not."""
    if type(states) is not Tensor or states.layout != torch.strided or states.dim() != 3 or not states.numel():
        return [Reason("SHAPES", f"an input of shape {tuple(states.shape)} (supported: [batch, channels, frames])")]
    if not states.is_cpu or states.dtype != torch.float32:
        return [Reason("DTYPE", f"{states.dtype} on {states.device.type} (oneDNN: float32 on cpu)")]
    if not has_onednn():
        return [Reason("NO_ONEDNN", "this build of torch has no convolutions of oneDNN with what follows them")]
    if states.shape[0] * states.shape[2] < min_frames:
        return [Reason("FEW_FRAMES", f"{states.shape[0]} x {states.shape[2]} frames are too few to gain")]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (states, *owner.parameters())):
        return [Reason("GRADIENTS", "autograd records")]
    if torch.is_autocast_enabled("cpu"):
        return [Reason("AUTOCAST", "autocast is on")]
    if is_transformed() or is_watched():
        return [Reason("TORCH_MODE", "a TorchDispatchMode, TorchFunctionMode or functorch transform is active")]
    return []


class Layers:
    """Makes the steps of one forward. altered: modules that have to be called. computed: layers that are not."""

    def __init__(self, altered: Collection[nn.Module]) -> None:
        self.altered = altered
        self.computed: list[nn.Module] = []

    def unsupported_reasons(self) -> list[Reason]:
        """Why the layers are left to the library; empty if they are not."""
        if not self.computed:
            return [Reason("LAYERS", "no layer is known")]
        weights = [weight for layer in self.computed for weight in layer.parameters()]
        if all(type(weight) is nn.Parameter and weight.is_cpu and weight.dtype == torch.float32 for weight in weights):
            return []
        return [Reason("MIXED", "weights and inputs have several dtypes or devices")]

    def can_compute(self, layer: Any) -> bool:
        """Whether this layer is computed from its weight and bias: a `Conv1d` or `ConvTranspose1d` that pads with
        zeros. Its weight may have a parametrization or weight norm.
        """
        kind = parametrize.type_before_parametrizations(layer)
        if kind not in (nn.Conv1d, nn.ConvTranspose1d) or layer in self.altered or "bias" not in layer._parameters:
            return False
        hooks = [hook.name for hook in layer._forward_pre_hooks.values() if type(hook) is WeightNorm]
        has_weight = "weight" in layer._parameters or parametrize.is_parametrized(layer, "weight")
        if not has_weight and hooks != ["weight"]:
            return False
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)

    def convolution(
        self,
        layer: Any,
        module: nn.Module,
        padding: tuple[int, int] = (0, 0),
        mode: str = "constant",
        slope: float | None = None,
    ) -> Step:
        """A convolution of an input that is padded (front, behind) in a mode of `pad`, and a LeakyReLU with this slope.

        module: what the host calls for the padding and the layer.
        """
        self.computed.append(layer)
        call = called(module, slope)

        def run(states: Tensor, plus: Tensor | None = None) -> Tensor:
            if not pays(states, layer) or states.shape[-1] <= max(padding):
                return call(states, plus)
            if any(padding):
                states = functional.pad(states, (*padding, 0, 0), mode)
            return convolution(states, layer, slope, plus)

        return run

    def upsampling(self, layer: Any, module: nn.Module, trimmed: tuple[int, int] = (0, 0)) -> Step:
        """A transposed convolution, of whose output so many steps (front, behind) are trimmed. module: as above."""
        self.computed.append(layer)
        call = called(module)

        def run(states: Tensor) -> Tensor:
            if not pays(states, layer):
                return call(states)
            weight, stride, padding, dilation = _on_two_dimensions(layer)
            output_padding = (0, layer.output_padding[0])
            found = functional.conv_transpose2d(
                _channels_last(states), weight, layer.bias, stride, padding, output_padding, layer.groups, dilation
            )
            return found[..., trimmed[0] : found.shape[-1] - trimmed[1]]

        return run

    def of(self, layer: Any, slope: float | None = None) -> Step:
        """A layer of the host, and the LeakyReLU that follows it; called where it is not supported or is altered."""
        if not self.can_compute(layer):
            return called(layer, slope)
        if isinstance(layer, nn.ConvTranspose1d):
            return self.upsampling(layer, layer)
        return self.convolution(layer, layer, slope=slope)

    def hifi_gan(self, generator: Any, upsamplings: Sequence[nn.Module], slope: float, first: Any = None) -> list[Step]:
        """The steps of a generator with the names of modules that the authors' code has (Kong et al., section 2.2).

        slope: of its LeakyReLUs. first: its first layer, and what is added there.
        """
        steps = [called(first or generator.conv_pre), leaky_relu(slope)]
        blocks, each = [self._block(block, slope) for block in generator.resblocks], generator.num_kernels
        for index, layer in enumerate(upsamplings, 1):
            is_last = index == len(upsamplings)
            steps += [self.of(layer), mean(blocks[(index - 1) * each : index * each], LAST_SLOPE if is_last else slope)]
        return [*steps, self.of(generator.conv_post), called(torch.tanh)]

    def _block(self, block: Any, slope: float) -> Step:
        """Of a residual block, which may tell its own slope: `x` becomes `x + second(first(x))` for each pair."""
        if block in self.altered or not hasattr(block, "convs1"):
            return called(block)
        slope = getattr(block, "leaky_relu_slope", slope)
        return chain(
            [
                residual([leaky_relu(slope), self.of(first, slope), self.of(second)])
                for first, second in zip(block.convs1, block.convs2)
            ]
        )


def called(function: Callable[[Tensor], Tensor], slope: float | None = None) -> Step:
    """A function or module of states `[batch, channels, length]`, and a LeakyReLU with this slope."""

    def run(states: Tensor, plus: Tensor | None = None) -> Tensor:
        found = function(states.squeeze(2)).unsqueeze(2)
        found = found if slope is None else functional.leaky_relu(found, slope)
        return found if plus is None else found + plus

    return run


def leaky_relu(slope: float) -> Step:
    return called(functools.partial(functional.leaky_relu, negative_slope=slope))


def chain(steps: Sequence[Step]) -> Step:
    return lambda states: functools.reduce(lambda states, step: step(states), steps, states)


def residual(steps: list[Step], shortcut: Step | None = None) -> Step:
    """The sum of what the steps make of the states, the last of them of a layer, and of what the shortcut makes."""
    inner, last = chain(steps[:-1]), steps[-1]
    return lambda states: last(inner(states), shortcut(states) if shortcut else states)


def mean(chains: list[Step], slope: float) -> Step:
    """The mean of what each of these makes of the states, and a LeakyReLU with this slope."""

    def run(states: Tensor) -> Tensor:
        total = chains[0](states)
        for one in chains[1:]:
            total += one(states)
        return functional.leaky_relu_(total / len(chains), slope)

    return run


def pays(states: Tensor, layer: Any) -> bool:
    """Whether this layer is faster here than in its own forward, for these states."""
    weights = layer.in_channels * layer.out_channels * layer.kernel_size[0] // layer.groups
    return states.numel() >= MIN_INPUT * weights


def convolution(states: Tensor, layer: Any, slope: float | None = None, plus: Tensor | None = None) -> Tensor:
    """The output of a `Conv1d`, `[batch, channels, 1, length]`, without gradients.

    slope: of a LeakyReLU that follows. plus: is added to the output; not both.
    """
    operation = torch.ops.mkldnn._convolution_pointwise
    weight, stride, padding, dilation = _on_two_dimensions(layer)
    states, given = _channels_last(states), (weight, layer.bias, padding, stride, dilation, layer.groups)
    left = states.shape[3] + 2 * layer.padding[0] - layer.dilation[0] * (layer.kernel_size[0] - 1) - 1
    shape = states.shape[0], layer.out_channels, 1, left // layer.stride[0] + 1
    if plus is not None and plus.shape == shape:  # which oneDNN does not check
        return operation.binary(states, _channels_last(plus), *given, "add", 1.0, None, [], None)
    activation = ("none", [], "") if slope is None else ("leaky_relu", [slope], "")
    found = operation.default(states, *given, *activation)
    return found if plus is None else found + plus


def _channels_last(states: Tensor) -> Tensor:
    return states.contiguous(memory_format=torch.channels_last)


def _on_two_dimensions(layer: Any) -> tuple[Tensor, tuple[int, int], tuple[int, int], tuple[int, int]]:
    """The weight that a forward of this layer would use, `[…, 1, kernel_size]`, its stride, padding and dilation."""
    for hook in layer._forward_pre_hooks.values():  # weight norm's, which puts the weight on the layer
        hook(layer, ())
    return layer.weight.unsqueeze(2), (1, layer.stride[0]), (0, layer.padding[0]), (1, layer.dilation[0])
