"""Which layers of a vocoder are computed from their weight and bias alone.

Tests: tests/optimizer/vocoder/test_vocoders.py, tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from fastgen.optimizer.vocoder.weights import norm_of, sources_of
from fastgen.origin import comes_with

_KINDS = (nn.Conv1d, nn.ConvTranspose1d)


def unsupported_reasons(layer: nn.Module) -> list[str]:
    """Why this layer is left to its own forward; empty if it is one of torch's convolutions and nothing more."""
    kind = next((kind for kind in _KINDS if isinstance(layer, kind)), None)
    if kind is None:
        return [f"a layer is a {type(layer).__name__} (supported: Conv1d, ConvTranspose1d)"]
    if has_own_code(layer, kind):
        return [f"a {type(layer).__name__} has a forward of its own"]
    norm = norm_of(layer)
    if norm is None and "parametrizations" in layer._modules:
        return ["a weight has another parametrization than weight norm"]
    if layer._forward_hooks or len(layer._forward_pre_hooks) > ("weight_g" in layer._parameters and norm is not None):
        return ["a layer has a forward hook"]
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors_of(layer)):
        return ["a weight is not a plain tensor"]
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return [f"padding {layer.padding!r} of mode {layer.padding_mode} (supported: numbers of zeros)"]
    return []


def has_own_code(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module of this class, or of a subclass, computes anything else than the class's forward."""
    own, cls = vars(module), type(module)
    if "forward" in own or "_hf_hook" in own or own.get("_compiled_call_impl") is not None:
        return True
    same = getattr(cls, "_conv_forward", None) is getattr(kind, "_conv_forward", None)
    return not (same and cls.__call__ is nn.Module.__call__ and comes_with(cls.forward, kind))


def has_hooks(module: nn.Module) -> bool:
    """Whether code of the program is called before or after this module's forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def are_all_watched() -> bool:
    """Whether hooks are called before or after the forwards of all modules."""
    return bool(module_hooks._global_forward_pre_hooks or module_hooks._global_forward_hooks)


def tensors_of(layer: nn.Module) -> tuple[Tensor, ...]:
    """Its parameters."""
    return sources_of(layer) if layer.bias is None else (*sources_of(layer), layer.bias)


def keeps_length(layer: nn.Module) -> bool:
    """Whether the output of a `Conv1d` is as long as its input."""
    (kernel,), (dilation,), (stride,), (padding,) = layer.kernel_size, layer.dilation, layer.stride, layer.padding
    return stride == 1 and 2 * padding == dilation * (kernel - 1)


def upsampled(layer: nn.ConvTranspose1d, length: Any) -> Any:
    """The length of its output for an input of this length, a number or an int64 tensor."""
    (kernel,), (dilation,), (stride,), (padding,) = layer.kernel_size, layer.dilation, layer.stride, layer.padding
    return (length - 1) * stride - 2 * padding + dilation * (kernel - 1) + layer.output_padding[0] + 1
