"""What the encoders of all models gave: one row per input where the decoder's attention is fastgen's, else all rows.

Tests: tests/optimizer/fairseq/test_fairseq_generate.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastgen.optimizer.fairseq.plan import ModelPlan


class EncoderOutputs:
    """by_model: what `forward_encoder` returned, for each model in the form in which its decoder is given it."""

    def __init__(self, model: Any, plans: list[ModelPlan], net_input: dict[str, Any], rows: Tensor) -> None:
        """rows: the input of each row."""
        self.model = model
        self.by_model: list[Any] = model.forward_encoder(net_input) or []
        self.by_input = [plan.by_input and _has_states_by_input(output) for plan, output in zip(plans, self.by_model)]
        self.reorder(rows)

    def reorder(self, order: Tensor) -> None:
        """Gives decoders with all rows row `order[i]` as row i; the others have kept what they need of it."""
        for index, (one, by_input) in enumerate(zip(self.model.models, self.by_input)):
            if not by_input:
                self.by_model[index] = one.encoder.reorder_encoder_out(self.by_model[index], order)


def _has_states_by_input(output: Any) -> bool:
    """Whether these are a Transformer encoder's, `[source_length, inputs, embed_dim]`."""
    states = output.get("encoder_out") if isinstance(output, dict) else None
    return isinstance(states, list) and len(states) == 1 and states[0].dim() == 3
