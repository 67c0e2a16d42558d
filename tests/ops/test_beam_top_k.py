"""The best next tokens are those of `torch.topk` over all of them, in its order, equal scores too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fastgen.ops import beam_top_k
from fastgen.ops.beam_top_k import (
    best_in_one_stage,
    best_in_two_stages,
    best_of_all,
    best_of_allowed,
    log_probs_in_parts,
)

SHAPES = {"inputs": st.integers(1, 3), "beams": st.integers(1, 12), "seed": st.integers(0, 10**6)}


def scores_of_beams(inputs: int, beams: int, in_race: int) -> torch.Tensor:
    """Those beyond the first `in_race` are out of the race, as the library has them."""
    scores = -torch.rand(inputs, beams).cumsum(1)
    scores[:, in_race:] = -1e9
    return scores


@settings(max_examples=150, deadline=None)
@given(**SHAPES, in_race=st.integers(1, 12), share=st.sampled_from([0.001, 0.02, 0.6]), equal=st.booleans())
def test_of_allowed_tokens_alone(inputs, beams, seed, in_race, share, equal):
    torch.manual_seed(seed)
    logits = 3 * torch.randn(inputs * beams, 200)
    if equal:
        logits = logits.round()[:1].repeat(inputs * beams, 1)
    is_allowed = torch.rand_like(logits) < share
    is_allowed[:, 150] = True
    beam_scores, k = scores_of_beams(inputs, beams, in_race), 2 * beams
    masked = functional.log_softmax(logits, dim=-1).masked_fill(~is_allowed, -torch.inf)
    found = best_of_allowed(logits, beam_scores, *is_allowed.nonzero().unbind(1), k)
    assert all(map(torch.equal, found, best_in_one_stage(masked, beam_scores, k)))


@settings(max_examples=150, deadline=None)
@given(**SHAPES, in_race=st.integers(1, 12), digits=st.sampled_from([0, 2, None]))
def test_in_two_stages(inputs, beams, seed, in_race, digits):
    torch.manual_seed(seed)
    log_probs = functional.log_softmax(3 * torch.randn(inputs * beams, 60), dim=-1)
    log_probs = log_probs if digits is None else log_probs.round(decimals=digits)
    beam_scores, k = scores_of_beams(inputs, beams, in_race), 2 * beams
    found, expected = best_in_two_stages([log_probs], beam_scores, k), best_in_one_stage(log_probs, beam_scores, k)
    if found is None:  # two of the best k + 1 are equal
        best = best_in_one_stage(log_probs, beam_scores, k + 1)[0]
        assert (best[:, 1:] == best[:, :-1]).any()
    else:
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("equal", [False, True])
def test_many_scores_are_those_of_one_stage(equal):
    log_probs, beam_scores = functional.log_softmax(torch.randn(8, 60_000), dim=-1), scores_of_beams(2, 4, 4)
    if equal:
        log_probs = log_probs.round()
    expected = best_in_one_stage(log_probs, beam_scores, 8)
    assert all(map(torch.equal, best_of_all(log_probs, beam_scores, 8, log_probs), expected))


def test_equal_scores_and_those_that_are_no_numbers_are_left_to_one_stage():
    log_probs = -torch.arange(60.0).repeat(2, 1)
    assert best_in_two_stages([log_probs], torch.tensor([[0.0, -0.5]]), 4) is not None
    assert best_in_two_stages([log_probs], torch.tensor([[0.0, -1.0]]), 4) is None
    log_probs[1, 3] = torch.nan
    assert best_in_two_stages([log_probs], torch.tensor([[0.0, -0.5]]), 4) is None


def test_parts_are_those_of_one_softmax(monkeypatch):
    logits = 5 * torch.randn(7, 1001)
    monkeypatch.setattr(beam_top_k, "PART", 2002)
    parts = list(log_probs_in_parts(logits))
    assert len(parts) == 4 and torch.equal(torch.cat(parts), functional.log_softmax(logits, dim=-1))


@settings(max_examples=100, deadline=None)
@given(**SHAPES, in_race=st.integers(1, 12), digits=st.sampled_from([0, None]))
def test_where_the_order_of_equal_scores_is_another(inputs, beams, seed, in_race, digits):
    """As on a GPU, and with a vocabulary as small as this one."""
    torch.manual_seed(seed)
    logits = 3 * torch.randn(inputs * beams, 60)
    logits = logits if digits is None else logits.round(decimals=digits)
    is_allowed = torch.rand_like(logits) < 0.5
    beam_scores, k = scores_of_beams(inputs, beams, in_race), 2 * beams
    masked = functional.log_softmax(logits, dim=-1).masked_fill(~is_allowed, -torch.inf)
    found = best_of_allowed(logits, beam_scores, *is_allowed.nonzero().unbind(1), k)
    if found is None:
        best = best_in_one_stage(masked, beam_scores, k + 1)[0]
        assert (best[:, 1:] == best[:, :-1]).any()
    else:
        assert all(map(torch.equal, found, best_in_one_stage(masked, beam_scores, k)))


def test_equal_scores_are_left_alone_where_torch_has_another_order(monkeypatch):
    logits, beam_scores = torch.zeros(2, 200), torch.tensor([[0.0, -1.0]])
    allowed = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([3, 4, 5, 3, 4, 5])
    assert best_of_allowed(logits, beam_scores, *allowed, 4) is not None
    monkeypatch.setattr(beam_top_k, "keeps_order", lambda: False)
    assert best_of_allowed(logits, beam_scores, *allowed, 4) is None


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_what_is_not_finite_is_left_alone(value):
    logits = torch.randn(2, 200)
    logits[1, 4] = value
    assert best_of_allowed(logits, torch.zeros(1, 2), torch.tensor([0, 1]), torch.tensor([3, 4]), 4) is None


@pytest.mark.parametrize(("beams", "k", "is_asked"), [(4, 8, False), (8, 16, True), (8, 30_000, False)])
def test_two_stages_are_for_many_scores(monkeypatch, beams, k, is_asked):
    asked, logits, beam_scores = [], torch.randn(beams, 30_000), torch.zeros(1, beams)
    monkeypatch.setattr(beam_top_k, "best_in_two_stages", lambda *arguments: asked.append(arguments))
    expected = best_in_one_stage(functional.log_softmax(logits, dim=-1), beam_scores, k)
    assert all(map(torch.equal, best_of_all(logits, beam_scores, k), expected)) and len(asked) == is_asked
