"""GPT-2's activation is fused inside generate, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES
from torch.nn import functional
from transformers.activations import NewGELUActivation

import fastgen
from fastgen.optimizer import report


@pytest.fixture
def fused(monkeypatch):
    calls = []
    gelu = functional.gelu
    monkeypatch.setattr(functional, "gelu", lambda *args, **kwargs: calls.append(kwargs) or gelu(*args, **kwargs))
    return calls


def test_the_fused_activation_is_the_same_function(fused):
    states = torch.cat([torch.linspace(-12, 12, 10001), torch.tensor([-1e4, -0.0, 0.0, 1e4])])
    with torch.no_grad(), report.recording("model"):
        found = NewGELUActivation()(states)
        assert fused == [{"approximate": "tanh"}]
        with fastgen.disabled():
            expected = NewGELUActivation()(states)
    assert len(fused) == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_generate_uses_it(fused):
    gpt2 = next(architecture for architecture in ARCHITECTURES if architecture.id == "gpt2")
    gpt2.model().generate(**gpt2.inputs(), max_new_tokens=3)
    assert len(fused) == 6  # 3 forwards of 2 layers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_left_to_the_original(dtype, fused):
    with torch.no_grad(), report.recording("model"):
        NewGELUActivation()(torch.randn(5).to(dtype))
    assert not fused


def test_training_and_calls_outside_generate_are_left_to_the_original(fused):
    states = torch.randn(5, requires_grad=True)
    NewGELUActivation()(states).sum().backward()
    with report.recording("model"):
        NewGELUActivation()(states).sum().backward()
    with torch.no_grad():
        NewGELUActivation()(states)
    assert not fused and states.grad is not None
