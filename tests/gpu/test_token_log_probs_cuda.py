"""Scores of given tokens on a GPU: one forward of all rows with gradients, common beginnings once without."""

import torch
from tiny_models import tiny
from versions import needs_gpu

import fastgen
from fastgen.testing import configured

pytestmark = needs_gpu

ROWS, PROMPT, COMPLETION = 4, 12, 5


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    prompt = torch.randint(5, 90, (1, PROMPT), generator=random).expand(ROWS, -1)
    input_ids = torch.cat([prompt, torch.randint(5, 90, (ROWS, COMPLETION), generator=random)], dim=1).cuda()
    return input_ids, torch.ones_like(input_ids)


def of_model(model: torch.nn.Module, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=input_ids, attention_mask=mask).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, input_ids[:, PROMPT:, None])[..., 0]


def test_token_log_probs_with_gradients_come_from_one_forward():
    model = tiny("llama").cuda()
    with configured(share="always"):
        scores = fastgen.token_log_probs(model, *batch(), COMPLETION)
    assert "ATTENTION" in fastgen.explain().codes() and not fastgen.explain().prefix_length
    expected = of_model(model, *batch())
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    if torch.version.cuda is None:  # the twin computes no backward
        return
    (ours,), (theirs,) = (torch.autograd.grad(each.sum(), [model.lm_head.weight]) for each in (scores, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_token_log_probs_without_gradients_share_beginnings():
    model = tiny("llama").cuda()
    with torch.no_grad(), configured(share="always"):
        scores = fastgen.token_log_probs(model, *batch(), COMPLETION)
        assert fastgen.explain().prefix_length
        torch.testing.assert_close(scores, of_model(model, *batch()), rtol=1e-4, atol=1e-4)
