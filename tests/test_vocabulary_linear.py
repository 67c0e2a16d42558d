"""The projection to the vocabulary through oneDNN: the same numbers, only where it was measured, and only in fp32."""

from __future__ import annotations

import pytest
import torch
from architecture_parity import measure
from architectures import ARCHITECTURES
from torch.nn import functional

import fastgen
from fastgen.ops import vocabulary_linear as op

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(op, "MIN_WEIGHT_ELEMENTS", 0)
    monkeypatch.setattr(op, "machine_reasons", list)


@pytest.mark.parametrize("rows", [(1, 1), (4, 1), (3, 5), (64, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_linear(rows, with_bias):
    torch.manual_seed(0)
    states, weight = torch.randn(*rows, 48), torch.randn(1003, 48)
    bias = torch.randn(1003) if with_bias else None
    with torch.no_grad():
        assert op.can_multiply(states, weight)
        found, expected = op.vocabulary_linear(states, weight, bias), functional.linear(states, weight, bias)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "bart", "t5", "whisper"])
@pytest.mark.parametrize("mode", ["beam search", "sampling", "greedy"])
def test_generation_uses_it_and_gives_the_same_tokens(name, mode, everywhere):
    architecture = next(architecture for architecture in ARCHITECTURES if architecture.id == name)
    parity = measure(architecture.model(), architecture.inputs(), mode)
    assert parity.tokens_equal
    assert parity.largest_score_difference < 1e-4
    assert parity.report.kernels["vocabulary_linear"] > 0


def test_small_weights_half_precision_and_other_machines_are_left_alone(monkeypatch):
    monkeypatch.setattr(op, "machine_reasons", lambda: ["CPU unknown"])
    large = torch.empty(1 << 14, 1 << 9)
    assert op.unsupported_reasons(large) == ["CPU unknown"]
    assert op.unsupported_reasons(large.half()) == ["dtype torch.float16 (supported: torch.float32)"]
    assert "gains from" in op.unsupported_reasons(large[:100])[0]


def test_gradients_autocast_and_strided_rows_are_left_alone():
    states, weight = torch.randn(4, 48), torch.randn(1003, 48)
    assert not op.can_multiply(states, weight)  # gradients are enabled
    with torch.no_grad():
        assert not op.can_multiply(states.t().contiguous().t(), weight)
        assert not op.can_multiply(states.double(), weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not op.can_multiply(states, weight)


def test_other_threads_and_later_calls_keep_the_library_s_linear(everywhere):
    architecture = next(architecture for architecture in ARCHITECTURES if architecture.id == "gpt2")
    model = architecture.model()
    model.generate(**architecture.inputs(), max_new_tokens=3)
    used = fastgen.explain().kernels["vocabulary_linear"]
    with torch.no_grad():
        model(**architecture.inputs())
    assert used == fastgen.explain().kernels["vocabulary_linear"] == 2  # the prefill slices its rows
