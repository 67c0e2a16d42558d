"""Beams choose the next tokens that `torch.topk` over all scores would choose, in its order, equal scores too."""

import pytest
import torch
from hooks import limits, watched
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_kernels import needs_library, torch_threads
from torch.nn import functional

from fastgen.ops import beams as kernels
from fastgen.ops.beams import best_in_one_stage, best_of_all, best_of_allowed

SHAPES = {"inputs": st.integers(1, 3), "beams": st.integers(1, 12), "seed": st.integers(0, 10**6)}


def scores_of_beams(inputs: int, beams: int, in_race: int) -> torch.Tensor:
    """Returns the scores of beams, of which all after the first `in_race` are out of the race, as in the library."""
    scores = -torch.rand(inputs, beams).cumsum(1)
    scores[:, in_race:] = -1e9
    return scores


@settings(max_examples=200, deadline=None)
@given(
    **SHAPES,
    vocabulary=st.sampled_from([60, 200]),
    in_race=st.integers(1, 12),
    share=st.sampled_from([0.001, 0.02, 0.6]),
    kind=st.sampled_from(["any", "rounded", "equal rows"]),
)
def test_allowed_tokens_alone_give_the_same_choice(inputs, beams, vocabulary, seed, in_race, share, kind):
    """The op declines if scores are equal and torch orders them otherwise: on a GPU, and with so small a vocabulary."""
    torch.manual_seed(seed)
    logits = 3 * torch.randn(inputs * beams, vocabulary)
    logits = logits if kind == "any" else logits.round()
    if kind == "equal rows":
        logits = logits[:1].repeat(inputs * beams, 1)
    is_allowed = torch.rand_like(logits) < share
    is_allowed[:, 50] = True
    beam_scores, k = scores_of_beams(inputs, beams, in_race), 2 * beams
    masked = functional.log_softmax(logits, dim=-1).masked_fill(~is_allowed, -torch.inf)
    choice = best_of_allowed(logits, beam_scores, *is_allowed.nonzero().unbind(1), k)
    if choice is None:
        best = best_in_one_stage(masked, beam_scores, k + 1)[0]
        assert vocabulary == 60 and (best[:, 1:] == best[:, :-1]).any()
    else:
        assert all(map(torch.equal, choice, best_in_one_stage(masked, beam_scores, k)))


def check(inputs: int, beams: int, vocabulary: int, k: int, digits: int | None, in_race: int, threads: int = 1) -> None:
    """Compares the choice from log-probabilities: many are equal if they are rounded, some are -inf."""
    log_probs = functional.log_softmax(3 * torch.randn(inputs * beams, vocabulary), dim=-1)
    log_probs = log_probs if digits is None else log_probs.round(decimals=digits)
    log_probs.masked_fill_(torch.rand_like(log_probs) < 0.2, -torch.inf)
    beam_scores = scores_of_beams(inputs, beams, in_race)
    with torch_threads(threads):
        choice = kernels._choose(log_probs, beam_scores, k)
    assert all(map(torch.equal, choice, best_in_one_stage(log_probs, beam_scores, k)))


@needs_library
@settings(max_examples=300, deadline=None)
@given(
    **SHAPES,
    vocabulary=st.integers(130, 3000),
    in_race=st.integers(1, 12),
    digits=st.sampled_from([0, 2, None]),
    threads=st.integers(1, 3),
)
def test_all_tokens_come_in_torchs_order_of_equal_scores(inputs, beams, vocabulary, seed, in_race, digits, threads):
    torch.manual_seed(seed)
    check(inputs, beams, vocabulary, 2 * beams, digits, in_race, threads)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_nan_and_infinite_scores_are_chosen_as_by_torch(value):
    log_probs, beam_scores = functional.log_softmax(torch.randn(8, 900), dim=-1), scores_of_beams(2, 4, 4)
    log_probs[1, 4:300] = value
    log_probs[6] = value
    choice, expected = best_of_all(log_probs, beam_scores, 8, log_probs), best_in_one_stage(log_probs, beam_scores, 8)
    torch.testing.assert_close(choice[0], expected[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(choice[1], expected[1])


@pytest.mark.parametrize("has_processors", [False, True])
@pytest.mark.parametrize("digits", [0, None])
def test_two_stages_in_parts_choose_as_one_stage(has_processors, digits):
    logits, beam_scores = 5 * torch.randn(28, 1001), scores_of_beams(7, 4, 4)
    logits = logits if digits is None else logits.round(decimals=digits)
    log_probs = functional.log_softmax(logits, dim=-1)
    expected = best_in_one_stage(log_probs, beam_scores, 8)
    with limits(beams_of_part=9000):
        choice = best_of_all(logits, beam_scores, 8, log_probs if has_processors else None)
    assert all(map(torch.equal, choice, expected))


@needs_library
@pytest.mark.parametrize(
    ("k", "dtype", "keeps_order", "is_asked"),
    [
        (8, torch.float32, True, True),
        (8, torch.float32, False, False),
        (80, torch.float32, True, False),  # torch has no heap of so many
        (8, torch.float64, True, False),
    ],
)
def test_torch_chooses_if_the_kernel_has_another_order(k, dtype, keeps_order, is_asked, monkeypatch):
    reasons = [] if keeps_order else ["another order"]
    monkeypatch.setattr(kernels.KERNELS[0], "unsupported_reasons", lambda: reasons)
    logits, beam_scores = torch.randn(4, 1000, dtype=dtype), torch.zeros(1, 4, dtype=dtype)
    expected = best_in_one_stage(functional.log_softmax(logits, dim=-1), beam_scores, k)
    with watched("top k in one stage") as in_one_stage:
        assert all(map(torch.equal, best_of_all(logits, beam_scores, k), expected))
    assert bool(in_one_stage) is not is_asked


def test_equal_scores_are_declined_if_torch_has_no_order(monkeypatch):
    logits, beam_scores = torch.zeros(2, 200), torch.tensor([[0.0, -1.0]])
    allowed = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([3, 4, 5, 3, 4, 5])
    assert best_of_allowed(logits, beam_scores, *allowed, 4) is not None
    monkeypatch.setattr(kernels, "keeps_order", lambda: False)
    assert best_of_allowed(logits, beam_scores, *allowed, 4) is None


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_logits_that_are_not_finite_are_declined(value):
    logits = torch.randn(2, 200)
    logits[1, 4] = value
    assert best_of_allowed(logits, torch.zeros(1, 2), torch.tensor([0, 1]), torch.tensor([3, 4]), 4) is None
