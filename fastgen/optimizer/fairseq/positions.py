"""The forward of fairseq's positional embeddings: in captured steps the position is a number on the device.

Tests: tests/optimizer/fairseq/test_fairseq_recorded_steps.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor
from torch.nn import functional

from fastgen.optimizer.fairseq.states import DecodingState


def forward(
    original: Callable, self: Any, input: Tensor, incremental_state: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """In a captured step that of the token that is fed, in all rows: `[1, 1, embed_dim]`."""
    if not isinstance(incremental_state, DecodingState) or incremental_state.position is None:
        return original(self, input, incremental_state, *args, **kwargs)
    table = self.weights if isinstance(self, SinusoidalPositionalEmbedding) else self.weight
    return functional.embedding(incremental_state.position + (self.padding_idx or 0), table)
