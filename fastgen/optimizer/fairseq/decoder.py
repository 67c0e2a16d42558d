"""`TransformerDecoderBase.extract_features_scriptable` while fastgen generates: without reading tokens on the host.

In every step fairseq asks whether a token is padding, which waits for the device. What a generation has written is
none, except in rows that can win no more: see `attention.own_attention`.

Tests: tests/optimizer/fairseq/test_fairseq_attention.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgen.optimizer.fairseq.states import DecodingState


class NoneEqual:
    """The outcome of a comparison in which nothing is equal."""

    def any(self) -> bool:
        return False


class Written(Tensor):
    """Tokens of which none is padding: whether one equals it is known without reading them."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.eq:
            return NoneEqual()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(Written) if func in _VIEWS else result


_VIEWS = (Tensor.__getitem__, Tensor.contiguous)


def extract_features(
    original: Callable,
    self: Any,
    prev_output_tokens: Tensor,
    encoder_out: Any,
    incremental_state: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if isinstance(incremental_state, DecodingState) and not self.cross_self_attention:
        prev_output_tokens = prev_output_tokens.as_subclass(Written)
    return original(self, prev_output_tokens, encoder_out, incremental_state, *args, **kwargs)
