"""The decoders of the codecs EnCodec and Mimi: of states `[batch, channels, frames]` they make a waveform.

Tests: tests/optimizer/vocoder/test_codecs.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastgen.optimizer.transformers.vocoder import library_class, verified
from fastgen.optimizer.vocoder.faster import faster_decoded
from fastgen.optimizer.vocoder.layers import has_hooks, has_own_code, unsupported_reasons
from fastgen.optimizer.vocoder.seanet import MODES, Called, Convolution, Part, Residual, Upsampling


def of_states(original: Callable, self: Any, hidden_states: Tensor) -> Tensor:
    """The waveform `[batch, channels, samples]`."""
    kind = library_class(self)
    found = faster_decoded(self, [_part(module, kind) for module in self.layers], hidden_states)
    if found is None:
        return original(self, hidden_states)
    return verified(self, found, lambda: original(self, hidden_states))


def _part(module: Any, kind: type[nn.Module]) -> Part:
    """What this module of a decoder of this class is; called where that is not known."""
    if has_own_code(module, kind) or has_hooks(module) or hasattr(module, "norm"):
        return Called(module)
    if hasattr(module, "block"):
        return Residual([_part(one, kind) for one in module.block], _part(module.shortcut, kind))
    if not hasattr(module, "conv") or unsupported_reasons(module.conv):
        return Called(module)
    if isinstance(module.conv, nn.ConvTranspose1d):
        return _upsampling(module)
    return _convolution(module)


def _upsampling(module: Any) -> Part:
    total = module.conv.kernel_size[0] - module.conv.stride[0]
    behind = math.ceil(total * module.trim_right_ratio) if module.causal else total // 2
    return Upsampling(module.conv, total - behind, behind)


def _convolution(module: Any) -> Part:
    total = module.conv.dilation[0] * (module.conv.kernel_size[0] - 1)
    behind = 0 if module.causal else total // 2
    part = Convolution(module.conv, total - behind, behind, module.pad_mode)
    return part if part.keeps_length() and part.mode in MODES else Called(module)
