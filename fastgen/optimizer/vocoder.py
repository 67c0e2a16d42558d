"""Vocoders on a CPU: HiFi-GAN generators (Kong et al., 2020), which turn a spectrogram or units into a waveform.

This module knows no host. The library's own forward runs, with other forwards on its convolutions
(`decoding/faster_forwards.py`). torch passes oneDNN sequences with adjacent frames of a channel, which oneDNN reorders
before and after each convolution. Here sequences are channels last, a layout that the operations between convolutions
preserve. A convolution reorders its weight in each call, which is worthwhile if the input is not smaller than the
weight. Weights are not prepacked: packed for 16, 64 or 256 frames, they made a convolution of 1792 to 512 channels
twenty times slower with 150.

Tests: tests/optimizer/vocoder/test_vocoders.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import BuiltinFunctionType

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from fastgen.ops.tracing import is_transformed, is_watched
from fastgen.optimizer.decoding.call import GenerateCall, current_call, generate_call
from fastgen.optimizer.decoding.faster_forwards import FasterForward, faster_forwards
from fastgen.optimizer.decoding.report import MODES, VOCODER, Reason, that_hold
from fastgen.provenance import comes_with

ONEDNN = "vocoder, oneDNN"

# The fewest frames of all rows together with which most of the time is spent in layers where oneDNN is faster.
MIN_FRAMES = 32

# The fewest elements of a layer's input per element of its weight with which oneDNN is faster.
MIN_INPUT = 1.0

_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


def faster_waveform(original: Callable[[], Tensor], owner: nn.Module, states: Tensor) -> Tensor:
    """Returns the waveform that the library's forward of `owner` computes for `states`, `[batch, channels, frames]`.

    The result is reported in the current call of `generate`, or, outside of one, in a report for `explain()`.
    """
    outer = current_call()
    with generate_call(type(owner).__name__) if outer is None else nullcontext(outer) as call:
        reasons = unsupported_reasons(owner, states)
        layers = []
        if not reasons:
            layers = _layers(owner)
            reasons = [] if layers else [Reason("LAYERS", "no layer is known")]
        if reasons:
            call.report.add_reasons(VOCODER, reasons)
            return original()
        ran: set[nn.Module] = set()
        with faster_forwards(call, {owner: layers}, dict.fromkeys(map(type, layers), partial(convolve, ran=ran))):
            waveform = original().contiguous()
        if ran:
            call.report.kernels[ONEDNN] += 1
        return waveform.view(waveform.shape)  # restores the library's stride of a dimension of size 1


def unsupported_reasons(owner: nn.Module, states: Tensor) -> list[Reason]:
    """Returns why this call is left to the library, whatever its layers; empty if it is not."""
    if type(states) is not Tensor or states.layout != torch.strided or states.dim() != 3 or not states.numel():
        return [Reason("SHAPES", f"an input of shape {tuple(states.shape)} (supported: [batch, channels, frames])")]
    tensors = [states, *owner.parameters()]
    frames = states.shape[0] * states.shape[2]
    kinds = {(type(tensor), tensor.is_cpu, tensor.dtype) for tensor in tensors[1:]}
    records = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    where = f"{states.dtype} on {states.device.type}"
    is_float = states.is_cpu and states.dtype == torch.float32
    return that_hold(
        ("DTYPE", f"{where} (oneDNN: float32 on cpu)", not is_float),
        ("NO_ONEDNN", "this build of torch has no oneDNN", not torch.backends.mkldnn.is_available()),
        ("FEW_FRAMES", f"{frames} frames are too few to gain", frames < MIN_FRAMES),
        ("MIXED", "weights and inputs have several dtypes or devices", kinds - {(nn.Parameter, True, torch.float32)}),
        ("GRADIENTS", "autograd records", records),
        ("AUTOCAST", "autocast is on", torch.is_autocast_enabled("cpu")),
        ("TORCH_MODE", MODES, is_transformed() or is_watched()),
    )[:1]


def _layers(owner: nn.Module) -> list[nn.Module]:
    """Returns the modules that get another forward, without those where it would bypass user code or a graph."""
    functions = functional.conv1d, functional.conv_transpose1d
    is_torchs = all(isinstance(function, BuiltinFunctionType) for function in functions)
    if not is_torchs or not comes_with(nn.Conv1d._conv_forward, nn.Conv1d):
        return []
    return [
        module
        for module in owner.modules()
        if parametrize.type_before_parametrizations(module) in _CONVOLUTIONS
        and "_conv_forward" not in vars(module)
        and module._compiled_call_impl is None
    ]


def convolve(forward: FasterForward, states: Tensor, call: GenerateCall, ran: set[nn.Module]) -> Tensor | None:
    """Returns the output of a `Conv1d` or `ConvTranspose1d`, `[batch, channels, length]`; None if oneDNN is slower.

    ran: collects the layers that were computed here.
    """
    layer = forward.module
    is_plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    least = MIN_INPUT * layer.in_channels * layer.out_channels * layer.kernel_size[0] // layer.groups
    if not is_plain or states.dim() != 3 or states.shape[1] != layer.in_channels or states.numel() < least:
        return None
    ran.add(layer)
    rows = states.unsqueeze(2).contiguous(memory_format=torch.channels_last)  # [batch, channels, 1, length]
    arguments = rows, layer.weight.unsqueeze(2), layer.bias, (1, layer.stride[0]), (0, layer.padding[0])
    dilation = 1, layer.dilation[0]
    if isinstance(layer, nn.ConvTranspose1d):
        output_padding = 0, layer.output_padding[0]
        return functional.conv_transpose2d(*arguments, output_padding, layer.groups, dilation).squeeze(2)
    return functional.conv2d(*arguments, dilation, layer.groups).squeeze(2)
