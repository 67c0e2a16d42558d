"""Calls of `generate` in which drafts are right about half of the time, with the logits of each step."""

from typing import Any

import torch
from copied_text import Forced, Noting, copying
from parity import run_both
from tiny_models import inputs_of, tiny, token_ids

from fastgen.optimizer.decoding.report import Report

NEW = 40
PROMPT = 24


def forced_call(model: Any, inputs: dict[str, torch.Tensor], **arguments: Any) -> tuple[Report, float]:
    """Generates a text that copies its input, without and with fastgen: tokens and random numbers are equal.

    Returns the report and the largest difference of the logits of a step.
    """
    source = inputs.get("input_ids")
    rows = next(iter(inputs.values())).shape[0] if source is None else source.shape[0]
    start = 1 if source is None or model.config.is_encoder_decoder else source.shape[1]
    texts = copying(token_ids(rows, PROMPT) if source is None else source, NEW)
    seen: list[list[Any]] = []

    def call() -> torch.Tensor:
        noting = Noting()
        seen.append(noting.calls)
        processors = [noting, Forced(texts, start)]
        return model.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, num_beams=1, eos_token_id=None, logits_processor=processors,
            **arguments,
        )  # fmt: skip

    both = run_both(call)
    assert torch.equal(both.stock, both.fast)
    stock, fast = ([scores for _, scores in calls] for calls in seen)
    assert len(stock) == len(fast) == NEW
    differences = [(one - other).nan_to_num().abs().max().item() for one, other in zip(stock, fast)]
    return both.report, max(differences)


def forced_calls_of(name: str, rows: int, calls: int) -> list[tuple[Report, float]]:
    """Returns the results of `calls` calls of `forced_call` with one tiny model; the first also proves drafts."""
    inputs = inputs_of(name, *(PROMPT - 5 * row for row in range(rows)))
    model = tiny(name)
    return [forced_call(model, inputs) for _ in range(calls)]
