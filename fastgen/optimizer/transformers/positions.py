"""Sinusoidal positions of decoders in captured steps: their number is on the device, and nothing reads it there.

The library's forward asks at every step whether its table is long enough, which waits for the device. Here that is
asked before a capture begins (`table_reasons`).

Tests: tests/optimizer/transformers/test_recorded_step.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastgen.optimizer.decoding.reasons import Reason

# Models that are recorded with these positions though the library does not call their forwards free of reads.
MODEL_TYPES = ("seamless_m4t", "seamless_m4t_v2")


def forward(
    original: Callable,
    self: Any,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    past_key_values_length: int | Tensor = 0,
) -> Tensor:
    """`[batch_size, length, width]`; a number of earlier positions that is a tensor is one of a captured step."""
    if input_ids is None or not isinstance(past_key_values_length, Tensor):
        return original(self, input_ids, inputs_embeds, past_key_values_length)
    positions = self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_key_values_length)
    return nn.functional.embedding(positions, self.weights).detach()


def table_reasons(model: nn.Module, most: int) -> list[Reason]:
    """Why steps up to position `most` cannot be captured: the table would have to grow. Empty if it has them all."""
    embedding = getattr(model.get_decoder(), "embed_positions", None)
    table = getattr(embedding, "weights", None)
    if isinstance(table, Tensor) and most + embedding.padding_idx + 1 > len(table):
        return [Reason("POSITIONS", f"{most} positions, and the table has {len(table)}")]
    return []
