"""`fastgen.token_log_probs` against a forward of all rows by the library, with gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny, token_ids

import fastgen


def test_entropy_and_temperature_are_those_of_trl():
    model, input_ids = tiny("llama"), token_ids(3, 12)
    log_probs, entropies = fastgen.token_log_probs(model, input_ids, None, 5, temperature=0.7, entropy=True)
    distributions = (model(input_ids).logits[:, -6:-1] / 0.7).log_softmax(dim=-1)
    expected = distributions.gather(-1, input_ids[:, -5:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, -(distributions.exp() * distributions).sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", (0, 12))
def test_completion_length_must_leave_a_prompt(length):
    with pytest.raises(ValueError, match=f"completion_length is {length} .accepted: 1 to 11"):
        fastgen.token_log_probs(tiny("llama"), token_ids(3, 12), None, length)
