"""Products through oneDNN: the same numbers, only where it was measured, and only in fp32."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from architecture_parity import measure
from architectures import ARCHITECTURES
from torch.nn import functional

import fastgen
from fastgen.ops import cpu_linear as op
from fastgen.optimizer.decoding import gain, linear_mode
from fastgen.optimizer.decoding.linear_mode import FastLinear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(op, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(op, "machine_reasons", list)
    monkeypatch.setattr(gain, "MIN_LARGE_PER_MODULE", 0)


@pytest.mark.parametrize("rows", [(2, 1), (4, 1), (3, 5), (64, 1), (200,)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_products_are_those_of_torch(rows, with_bias, kind, everywhere):
    torch.manual_seed(0)
    states, weight = torch.randn(*rows, 48), torch.randn(1003, 48)
    bias = torch.randn(1003) if with_bias else None
    if kind == "addmm":
        states, bias = states.reshape(-1, 48), torch.randn(1003)

    def product() -> torch.Tensor:
        return functional.linear(states, weight, bias) if kind == "linear" else torch.addmm(bias, states, weight.t())

    with torch.no_grad():
        expected = product()
        with FastLinear(usage := Counter()):
            found = product()
    assert usage == {"cpu_linear": 1}
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "bart", "t5", "whisper", "llama"])
@pytest.mark.parametrize("mode", ["beam search", "sampling", "greedy"])
def test_generation_uses_it_and_gives_the_same_tokens(name, mode, everywhere):
    architecture = next(architecture for architecture in ARCHITECTURES if architecture.id == name)
    parity = measure(architecture.model(), architecture.inputs(), mode)
    assert parity.tokens_equal
    assert parity.largest_score_difference < 1e-4
    assert parity.report.kernels["cpu_linear"] > 0


def test_other_machines_are_left_alone(everywhere, monkeypatch):
    monkeypatch.setattr(op, "machine_reasons", lambda: ["CPU unknown"])
    architecture = next(architecture for architecture in ARCHITECTURES if architecture.id == "gpt2")
    assert measure(architecture.model(), architecture.inputs(), "greedy").report.kernels["cpu_linear"] == 0


def test_small_models_are_left_alone(monkeypatch):
    monkeypatch.setattr(op, "machine_reasons", list)
    architecture = next(architecture for architecture in ARCHITECTURES if architecture.id == "gpt2")
    monkeypatch.setattr(linear_mode, "FastLinear", pytest.fail)  # it costs something for every call of torch
    architecture.model().generate(**architecture.inputs(), max_new_tokens=3)


def test_small_products_other_types_gradients_autocast_and_strided_rows_are_left_alone():
    states, weight = torch.randn(4, 1024), torch.randn(1024, 1024)
    assert not op.can_multiply(states, weight, None)  # gradients are recorded
    with torch.no_grad():
        assert op.can_multiply(states, weight, None)
        assert not op.can_multiply(states, weight[:100], None)
        assert not op.can_multiply(states[:1], weight, None)
        assert not op.can_multiply(states.t().contiguous().t(), weight, None)
        assert not op.can_multiply(states.double(), weight.double(), None)
        assert not op.can_multiply(states.bfloat16(), weight.bfloat16(), None)
        assert not op.can_multiply(states, weight, torch.randn(1, 1024))
        assert not op.can_multiply(states[:, :100], weight, None)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not op.can_multiply(states, weight, None)


def test_a_forward_after_generate_is_the_library_s(everywhere):
    architecture = next(architecture for architecture in ARCHITECTURES if architecture.id == "gpt2")
    model = architecture.model()
    model.generate(**architecture.inputs(), max_new_tokens=3)
    used = fastgen.explain().kernels["cpu_linear"]
    with torch.no_grad():
        model(**architecture.inputs())
    assert used == fastgen.explain().kernels["cpu_linear"] > 0
