"""The best next tokens are those of `torch.topk` over all of them, in its order, equal scores too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_kernels import needs_library, torch_threads
from torch.nn import functional

from fastgen.ops import beam_top_k
from fastgen.ops.beam_top_k import best_in_one_stage, best_of_all, best_of_allowed
from fastgen.testing import limits, watched

SHAPES = {"inputs": st.integers(1, 3), "beams": st.integers(1, 12), "seed": st.integers(0, 10**6)}


def scores_of_beams(inputs: int, beams: int, in_race: int) -> torch.Tensor:
    """Those beyond the first `in_race` are out of the race, as the library has them."""
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
def test_of_allowed_tokens_alone(inputs, beams, vocabulary, seed, in_race, share, kind):
    """Left alone where scores are equal and torch's order is another: as on a GPU, and with a vocabulary that small."""
    torch.manual_seed(seed)
    logits = 3 * torch.randn(inputs * beams, vocabulary)
    logits = logits if kind == "any" else logits.round()
    if kind == "equal rows":
        logits = logits[:1].repeat(inputs * beams, 1)
    is_allowed = torch.rand_like(logits) < share
    is_allowed[:, 50] = True
    beam_scores, k = scores_of_beams(inputs, beams, in_race), 2 * beams
    masked = functional.log_softmax(logits, dim=-1).masked_fill(~is_allowed, -torch.inf)
    found = best_of_allowed(logits, beam_scores, *is_allowed.nonzero().unbind(1), k)
    if found is None:
        best = best_in_one_stage(masked, beam_scores, k + 1)[0]
        assert vocabulary == 60 and (best[:, 1:] == best[:, :-1]).any()
    else:
        assert all(map(torch.equal, found, best_in_one_stage(masked, beam_scores, k)))


def check(inputs: int, beams: int, vocabulary: int, k: int, digits: int | None, in_race: int, threads: int = 1) -> None:
    """Of log-probabilities, many of which are equal if they are rounded, and some -inf, as processors leave them."""
    log_probs = functional.log_softmax(3 * torch.randn(inputs * beams, vocabulary), dim=-1)
    log_probs = log_probs if digits is None else log_probs.round(decimals=digits)
    log_probs.masked_fill_(torch.rand_like(log_probs) < 0.2, -torch.inf)
    beam_scores = scores_of_beams(inputs, beams, in_race)
    with torch_threads(threads):
        found = beam_top_k._choose(log_probs, beam_scores, k)
    assert all(map(torch.equal, found, best_in_one_stage(log_probs, beam_scores, k)))


@needs_library
@settings(max_examples=300, deadline=None)
@given(
    **SHAPES,
    vocabulary=st.integers(130, 3000),
    in_race=st.integers(1, 12),
    digits=st.sampled_from([0, 2, None]),
    threads=st.integers(1, 3),
)
def test_of_all_tokens_in_torchs_order_of_equal_scores(inputs, beams, vocabulary, seed, in_race, digits, threads):
    torch.manual_seed(seed)
    check(inputs, beams, vocabulary, 2 * beams, digits, in_race, threads)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_of_scores_that_are_not_finite(value):
    log_probs, beam_scores = functional.log_softmax(torch.randn(8, 900), dim=-1), scores_of_beams(2, 4, 4)
    log_probs[1, 4:300] = value
    log_probs[6] = value
    found, expected = best_of_all(log_probs, beam_scores, 8, log_probs), best_in_one_stage(log_probs, beam_scores, 8)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("has_processors", [False, True])
@pytest.mark.parametrize("digits", [0, None])
def test_best_of_all_are_those_of_one_stage_also_in_parts(has_processors, digits):
    logits, beam_scores = 5 * torch.randn(28, 1001), scores_of_beams(7, 4, 4)
    logits = logits if digits is None else logits.round(decimals=digits)
    log_probs = functional.log_softmax(logits, dim=-1)
    expected = best_in_one_stage(log_probs, beam_scores, 8)
    with limits(beams_of_part=9000):
        found = best_of_all(logits, beam_scores, 8, log_probs if has_processors else None)
    assert all(map(torch.equal, found, expected))


@needs_library
@pytest.mark.parametrize(
    ("k", "dtype", "keeps_order", "is_asked"),
    [
        (8, torch.float32, True, True),
        (8, torch.float32, False, False),
        (80, torch.float32, True, False),  # of so many torch has no heap
        (8, torch.float64, True, False),
    ],
)
def test_what_the_kernel_cannot_do_as_torch_is_left_to_torch(k, dtype, keeps_order, is_asked, monkeypatch):
    monkeypatch.setattr(beam_top_k, "_chooses_as_torch", lambda: keeps_order)
    logits, beam_scores = torch.randn(4, 1000, dtype=dtype), torch.zeros(1, 4, dtype=dtype)
    expected = best_in_one_stage(functional.log_softmax(logits, dim=-1), beam_scores, k)
    with watched("top k in one stage") as in_one_stage:
        assert all(map(torch.equal, best_of_all(logits, beam_scores, k), expected))
    assert bool(in_one_stage) is not is_asked


def test_equal_scores_are_left_alone_if_torch_has_no_order(monkeypatch):
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
