"""One forward of a generator or a codec's decoder: whether it is computed here, or why it is left to the library.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fastgen.ops.tracing import is_transformed, is_watched
from fastgen.optimizer.decoding.call import add_reasons, count, current_call, generate_call
from fastgen.optimizer.decoding.model_facts import KnownCode, facts_of
from fastgen.optimizer.decoding.reasons import VOCODER, Reason, with_code
from fastgen.optimizer.vocoder import convolutions
from fastgen.optimizer.vocoder.parts import Part, layers_of, waveform

ONEDNN = "vocoder, oneDNN"

# Of all rows together: so many that most of the time goes to layers where oneDNN pays.
MIN_FRAMES, MIN_CODEC_FRAMES = 32, 16


def faster_waveform(
    owner: nn.Module,
    known: KnownCode,
    states: Tensor,
    parts: Callable[[Collection[nn.Module]], list[Part]],
    is_codec: bool = False,
) -> Tensor | None:
    """The waveform `[batch, channels, samples]` of `states` `[batch, channels, frames]`, or None to leave it alone.

    owner: the generator or decoder. known: what its host knows of code. parts: makes its parts, given the modules that
    have to be called. What was done, or why not, goes to the report of the `generate` that runs; of a call outside of
    one, `explain()` returns it.
    """
    with nullcontext() if current_call() is not None else generate_call(type(owner).__name__):
        reasons = call_unsupported_reasons(owner, states, MIN_CODEC_FRAMES if is_codec else MIN_FRAMES)
        if not reasons:
            made = parts(altered_modules(owner, known))
            reasons = layer_unsupported_reasons(made)
        if reasons:
            add_reasons(VOCODER, reasons)
            return None
        count(ONEDNN)
        return waveform(made, states)


def altered_modules(owner: nn.Module, known: KnownCode) -> set[nn.Module]:
    """The modules that have to be called, because they are more than the library's code."""
    facts = facts_of(owner, known)
    is_altered = None in facts.altered
    return {module for name, module in facts.modules.items() if is_altered or name in facts.altered}


def call_unsupported_reasons(owner: nn.Module, states: Tensor, min_frames: int) -> list[Reason]:
    """Why this call is left to the library, whatever the layers are; empty if it is not."""
    if type(states) is not Tensor or states.layout != torch.strided or states.dim() != 3 or not states.numel():
        return [Reason("SHAPES", f"an input of shape {tuple(states.shape)} (supported: [batch, channels, frames])")]
    if not states.is_cpu or states.dtype != torch.float32:
        return [Reason("DTYPE", f"{states.dtype} on {states.device.type} (oneDNN: float32 on cpu)")]
    if convolutions.machine_reasons():
        return with_code("NO_ONEDNN", convolutions.machine_reasons())
    if states.shape[0] * states.shape[2] < min_frames:
        return [Reason("FEW_FRAMES", f"{states.shape[0]} x {states.shape[2]} frames are too few to gain")]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (states, *owner.parameters())):
        return [Reason("GRADIENTS", "autograd records")]
    if torch.is_autocast_enabled("cpu"):
        return [Reason("AUTOCAST", "autocast is on")]
    if is_transformed() or is_watched():
        return [Reason("TORCH_MODE", "a TorchDispatchMode, TorchFunctionMode or functorch transform is active")]
    return []


def layer_unsupported_reasons(parts: list[Part]) -> list[Reason]:
    """Why these parts are left to the library; empty if they are not."""
    layers = layers_of(parts)
    if not layers:
        return [Reason("LAYERS", "no layer is known")]
    weights = [weight for layer in layers for weight in layer.parameters()]
    if not all(type(weight) is nn.Parameter and weight.is_cpu and weight.dtype == torch.float32 for weight in weights):
        return [Reason("MIXED", "weights and inputs have several dtypes or devices")]
    return []
