"""Scores of tokens in chunks: values and gradients are those of torch's own operations."""

from __future__ import annotations

import pytest
import torch

from fastgen.ops import token_scores as module
from fastgen.ops.token_scores import token_scores


@pytest.fixture(params=(50, 1 << 22), ids=("chunks", "one chunk"))
def logits_and_tokens(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", request.param)
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 17, dtype=torch.float64, generator=random).mul_(4).requires_grad_()
    return logits, torch.randint(17, (3, 5), generator=random)


def expected(logits, tokens, temperature):
    distributions = (logits / temperature).log_softmax(dim=-1)
    log_probs = distributions.gather(-1, tokens[..., None]).squeeze(-1)
    return [log_probs, -(distributions.exp() * distributions).sum(dim=-1)]


@pytest.mark.parametrize("entropy", (False, True))
def test_values_and_gradients_are_those_of_log_softmax(logits_and_tokens, entropy):
    logits, tokens = logits_and_tokens
    scores = token_scores(logits, tokens, 0.7, entropy)
    wanted = expected(logits, tokens, 0.7)[: 1 + entropy]
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(sum(s.square().sum() for s in each), logits)[0] for each in (scores, wanted)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


def test_entropy_alone_has_a_gradient(logits_and_tokens):
    logits, tokens = logits_and_tokens
    gradients = [torch.autograd.grad(each[1].sum(), logits)[0] for each in
                 (token_scores(logits, tokens, 1.0, True), expected(logits, tokens, 1.0))]  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_low_precision_is_scored_in_float32(logits_and_tokens):
    logits, tokens = logits_and_tokens
    rounded = logits.detach().bfloat16().requires_grad_()
    (log_probs,) = token_scores(rounded, tokens, 0.7, False)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected(rounded.double(), tokens, 0.7)[0], rtol=0, atol=1e-5)
    log_probs.sum().backward()
    assert rounded.grad.dtype == torch.bfloat16


def test_saved_tensors_hold_the_logits_once(logits_and_tokens):
    logits, tokens = logits_and_tokens
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda x: x):
        token_scores(logits, tokens, 0.7, True)
    assert sorted(saved) == sorted([logits.numel(), *[tokens.numel()] * 3])
