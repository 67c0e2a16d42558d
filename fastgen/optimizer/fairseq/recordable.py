"""Whether the decode steps of a call of fairseq can be captured.

Tests: tests/optimizer/fairseq/test_fairseq_recorded_steps.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from fairseq.sequence_generator import EnsembleModel

from fastgen.optimizer.decoding import recordable
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.reasons import Reason
from fastgen.optimizer.fairseq.plan import KNOWN, ModelPlan, cross_attentions
from fastgen.origin import comes_with


def can_capture(call: GenerateCall, generator: Any, plans: list[ModelPlan], rows: int, max_len: int) -> bool:
    """Whether a loop of up to `max_len` steps should try to; tells the report why not."""
    model = generator.model.single_model
    reasons = partial(unsupported_reasons, call, generator, plans, rows, max_len)
    return recordable.can_capture(model, model.decoder, max_len, reasons)


def unsupported_reasons(
    call: GenerateCall, generator: Any, plans: list[ModelPlan], rows: int, max_len: int
) -> list[Reason]:
    """Why the steps are not captured; empty if they can be."""
    if len(plans) > 1:
        return [Reason("ENSEMBLE", f"an ensemble of {len(plans)} models")]
    model, plan = generator.model.single_model, plans[0]
    decoder = model.decoder
    reasons: list[Reason] = []
    if not comes_with(generator.model.forward_decoder, EnsembleModel):
        reasons.append(Reason("METHOD_REPLACED", "forward_decoder of the ensemble is not that of fairseq"))
    if plan.watched:
        reasons.append(Reason("HOOKS", "the decoder has forward hooks"))
    crosses = cross_attentions(decoder)
    known = {*plan.self_attention, *plan.cross_attention}
    if plan.others or len(known) != len(decoder.layers) + len(crosses):
        text = "attention of the decoder has states of its own, or is used more than once"
        reasons.append(Reason("MODEL_STATE", text))
    if crosses and not plan.by_input:
        reasons.append(Reason("ENCODER_ROWS", "the decoder gets the encoder's output for each row"))
    reasons += _position_reasons(decoder.embed_positions, max_len)
    reasons = reasons or recordable.unsupported_reasons(decoder, rows, max_len)
    reasons = reasons or recordable.device_reasons(call.facts_of(model, KNOWN))
    found = (Reason("USER_CODE", f"user code is called in each step: {what}") for what in plan.user_code[:1])
    return reasons or [*found]


def _position_reasons(positions: Any, max_len: int) -> list[Reason]:
    """Why positions cannot be looked up by a number on the device; empty if they can."""
    if positions is None:
        return []
    if type(positions) is SinusoidalPositionalEmbedding:
        most = positions.weights.shape[0]
    elif type(positions) is LearnedPositionalEmbedding and positions.max_norm is None:
        most = positions.num_embeddings
    else:
        return [Reason("POSITIONS", f"positions of a {type(positions).__name__}")]
    needed = (positions.padding_idx or 0) + max_len + 2
    text = f"positions up to {needed} in a table of {most}"
    return [Reason("POSITIONS", text)] if needed > most else []
