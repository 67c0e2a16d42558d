"""One call of a generator or a codec's decoder: the way in which it is computed, or why it is left to the library.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fastgen.ops.transforms import is_transformed, is_watched
from fastgen.optimizer.decoding.call import add_reasons, count, current_call, generate_call
from fastgen.optimizer.decoding.reasons import VOCODER, Reason, with_code
from fastgen.optimizer.vocoder import hifi_gan, layers, seanet
from fastgen.optimizer.vocoder.convolutions import OneDnn, Torch, onednn_reasons
from fastgen.optimizer.vocoder.hifi_gan import HifiGan, waveform
from fastgen.optimizer.vocoder.seanet import Part, decoded
from fastgen.optimizer.vocoder.weights import norm_of

FOLDED = "vocoder, weight norm folded"
ONEDNN = "vocoder, oneDNN"

# Of all rows together: so many that oneDNN's reordering of each weight does not matter, see `OneDnn`.
MIN_FRAMES = 64

# Of a codec's, whose wide layers oneDNN does not compute.
MIN_CODEC_FRAMES = 16


def faster_waveform(owner: nn.Module, gan: HifiGan, states: Tensor, voice: Tensor | None = None) -> Tensor | None:
    """The waveform `[batch, 1, samples]` of `states` `[batch, channels, frames]`, or None to leave it to the library.

    owner: the module that has these layers. voice: `[batch or 1, channels, 1]`. What was done, or why not, goes to
    the report of the `generate` that runs; of a call outside of one, `explain()` returns it.
    """
    with _reporting(owner):
        if reasons := unsupported_reasons(owner, gan, states, voice):
            add_reasons(VOCODER, reasons)
            return None
        with torch.no_grad():
            return _faster_waveform(gan, states, voice)


def faster_decoded(owner: nn.Module, parts: list[Part], states: Tensor) -> Tensor | None:
    """The waveform `[batch, channels, samples]` of `states`, as `faster_waveform`; for a codec's decoder."""
    with _reporting(owner):
        if reasons := codec_unsupported_reasons(owner, parts, states):
            add_reasons(VOCODER, reasons)
            return None
        is_normed = any(norm_of(layer) is not None for layer in seanet.layers_of(parts))
        reasons = onednn_unsupported_reasons(states, MIN_CODEC_FRAMES)
        if reasons and (states.is_cpu or not is_normed):
            add_reasons(VOCODER, reasons)
            return None
        with torch.no_grad():
            found = decoded(parts, states, Torch if reasons else OneDnn)
        if not reasons:
            count(ONEDNN)
        if is_normed:
            count(FOLDED)
        return found


@contextmanager
def _reporting(owner: nn.Module) -> Iterator[None]:
    if current_call() is not None:
        yield
        return
    with generate_call(type(owner).__name__):
        yield


def _faster_waveform(gan: HifiGan, states: Tensor, voice: Tensor | None) -> Tensor | None:
    is_normed = any(norm_of(layer) is not None for layer in gan.layers())
    reasons = onednn_unsupported_reasons(states, MIN_FRAMES)
    if reasons and not is_normed:
        add_reasons(VOCODER, [*reasons, Reason("NO_WEIGHT_NORM", "there is no weight norm to fold")])
        return None
    found = waveform(gan, states, Torch if reasons else OneDnn, voice)
    if not reasons:
        count(ONEDNN)
    if is_normed:
        count(FOLDED)
    return found


def onednn_unsupported_reasons(states: Tensor, min_frames: int) -> list[Reason]:
    """Why torch's convolutions are taken; empty where oneDNN's are faster."""
    if not states.is_cpu or states.dtype != torch.float32:
        return [Reason("DTYPE", f"{states.dtype} on {states.device.type} (oneDNN: float32 on cpu)")]
    if onednn_reasons():
        return with_code("NO_ONEDNN", onednn_reasons())
    if states.shape[0] * states.shape[2] < min_frames:
        return [Reason("FEW_FRAMES", f"{states.shape[0]} x {states.shape[2]} frames are too few to gain")]
    return []


def unsupported_reasons(owner: nn.Module, gan: HifiGan, states: Tensor, voice: Tensor | None) -> list[Reason]:
    """Why a call is left to the library; empty if `waveform` gives what it would give."""
    given = [states] if voice is None else [states, voice]
    if reasons := _call_unsupported_reasons(owner, given, gan.first.in_channels):
        return reasons
    if voice is not None and (gan.condition is None or voice.shape[2:] != (1,) or len(voice) not in (1, len(states))):
        text = f"a voice of shape {tuple(voice.shape)} (supported: [{len(states)}, channels, 1])"
        return [Reason("SHAPES", text)]
    if reasons := with_code("LAYERS", hifi_gan.unsupported_reasons(gan)) or _mixed_reasons(gan.layers(), given):
        return reasons
    return [] if gan.samples(states.shape[-1]) > 0 else [Reason("NO_SAMPLES", "the waveform has no samples")]


def codec_unsupported_reasons(owner: nn.Module, parts: list[Part], states: Tensor) -> list[Reason]:
    """Why a call is left to the library; empty if `decoded` gives what it would give."""
    known, first = seanet.known(parts), parts[0].known()
    if not known:
        return [Reason("LAYERS", "no layer is known")]
    if reasons := _call_unsupported_reasons(owner, [states], first[0].layer.in_channels if first else None):
        return reasons
    if states.shape[-1] <= max(max(one.front, one.behind) for one in known):
        return [Reason("SHAPES", f"{states.shape[-1]} frames are no more than what a layer pads or trims")]
    return _mixed_reasons(seanet.layers_of(parts), [states])


def _call_unsupported_reasons(owner: nn.Module, given: list[Tensor], channels: int | None) -> list[Reason]:
    """given: the states, which have so many channels if that is known, and what else there is."""
    if owner.training:
        return [Reason("TRAINING", "the vocoder is in training mode")]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*given, *owner.parameters())):
        return [Reason("GRADIENTS", "autograd records")]
    states = given[0]
    if not _are_plain(given) or states.dim() != 3 or not states.numel() or channels not in (None, states.shape[1]):
        text = f"an input of shape {tuple(states.shape)} (supported: [batch, {channels or 'channels'}, frames])"
        return [Reason("SHAPES", text)]
    if torch.is_autocast_enabled(states.device.type):
        return [Reason("AUTOCAST", "autocast is on")]
    if is_transformed() or is_watched() or layers.are_all_watched():
        text = "a TorchDispatchMode, TorchFunctionMode or functorch transform is active"
        return [Reason("TORCH_MODE", text)]
    return []


def _mixed_reasons(all_layers: list[nn.Module], given: list[Tensor]) -> list[Reason]:
    states = given[0]
    weights = [tensor for layer in all_layers for tensor in layers.tensors_of(layer)]
    if any((tensor.device, tensor.dtype) != (states.device, states.dtype) for tensor in (*given, *weights)):
        return [Reason("MIXED", "weights and inputs have several dtypes or devices")]
    return []


def _are_plain(tensors: list[Tensor]) -> bool:
    kinds = (Tensor, nn.Parameter)
    return all(type(one) in kinds and one.layout == torch.strided and one.is_floating_point() for one in tensors)
