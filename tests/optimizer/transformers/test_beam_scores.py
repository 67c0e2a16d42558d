"""Beam search returns the scores of its hypotheses without those of every token at every step, if asked to."""

import types
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hooks import fresh_trust
from own_models import by_einsum, odd_model
from parity import run_both
from tiny_models import BEAMS, padded, tiny, unchanged

from fastgen.optimizer.decoding.call import current_call
from fastgen.optimizer.decoding.report import LOOP
from fastgen.optimizer.transformers.outputs import SEQUENCES_SCORES, only_outputs

ASKED = {"return_dict_in_generate": True, "output_scores": True}


@pytest.mark.parametrize("name", ["gpt2", "bart"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_return_sequences": 1},
        {"max_new_tokens": 30, "eos_token_id": [2, *range(20, 40)]},  # some inputs end before others
        {"do_sample": True, "temperature": 1.3},
        {"max_time": 1000.0},
    ],
    ids=["beams", "one returned", "some end", "beam samples", "another criterion"],
)
def test_beam_scores_are_those_of_the_library(name, arguments):
    model = unchanged(name)
    with only_outputs(SEQUENCES_SCORES):
        stock, fast, report = run_both(lambda: model.generate(**padded(9, 5, 7), **ASKED | BEAMS | arguments))
    assert torch.equal(fast.sequences, stock.sequences)
    assert torch.allclose(fast.sequences_scores, stock.sequences_scores, rtol=0, atol=1e-4)
    assert stock.scores and fast.scores is None
    assert not report.codes(LOOP)


@pytest.mark.parametrize(("outputs", "context"), [({"output_logits": True}, only_outputs), ({}, nullcontext)])
def test_all_scores_come_with_other_outputs_or_by_default(outputs, context):
    model = unchanged("gpt2")
    with context(SEQUENCES_SCORES):
        stock, fast, _ = run_both(lambda: model.generate(**padded(9, 5), **BEAMS, **ASKED, **outputs))
    assert len(fast.scores) == len(stock.scores) > 0 and fast.sequences_scores is not None


def test_a_model_with_its_own_finished_beams_keeps_its_scores():
    model = tiny("gpt2")
    original = model._update_finished_beams

    def halved(self: Any, *args: Any, **kwargs: Any) -> Any:
        sequences, scores, *others = original(*args, **kwargs)
        return sequences, scores / 2, *others

    model._update_finished_beams = types.MethodType(halved, model)
    with only_outputs(SEQUENCES_SCORES):
        stock, fast, _ = run_both(lambda: model.generate(**padded(9, 5), **BEAMS, **ASKED))
    assert fast.scores and torch.equal(fast.sequences_scores, stock.sequences_scores)


def test_scores_of_a_class_of_user_code_are_those_of_the_library(share_always):
    user_code = []

    def attend(*states: torch.Tensor) -> torch.Tensor:
        user_code.extend([call.host.user_code] if (call := current_call()) is not None else [])
        return by_einsum(*states)

    model = odd_model(attend)
    call = partial(model.generate, **padded(9, 5), **BEAMS, **ASKED)
    with fresh_trust(), only_outputs(SEQUENCES_SCORES):
        first = run_both(call)
        user_code.clear()
        stock, fast, report = run_both(call)
    assert "FIRST_USE" in first.report.codes() and torch.equal(first.fast.sequences, stock.sequences)
    assert report.shared and set(user_code) == {True}
    assert torch.equal(fast.sequences, stock.sequences) and fast.scores is None
    assert torch.allclose(fast.sequences_scores, stock.sequences_scores, rtol=0, atol=1e-4)
