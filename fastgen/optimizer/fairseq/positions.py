"""Forwards of fairseq's positional embeddings: in recorded steps the position is a number on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from fastgen.optimizer.fairseq.states import StaticState


def learned(
    original: Callable, self: Any, input: Tensor, incremental_state: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    if type(incremental_state) is StaticState:
        return _looked_up(self.weight, self, incremental_state)
    return original(self, input, incremental_state, *args, **kwargs)


def sinusoidal(
    original: Callable, self: Any, input: Tensor, incremental_state: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    if type(incremental_state) is StaticState:
        return _looked_up(self.weights, self, incremental_state)
    return original(self, input, incremental_state, *args, **kwargs)


def _looked_up(table: Tensor, embedding: Any, state: StaticState) -> Tensor:
    """Of the token that is fed, in all rows: `[1, 1, embed_dim]`."""
    return functional.embedding(state.position + (embedding.padding_idx or 0), table)
