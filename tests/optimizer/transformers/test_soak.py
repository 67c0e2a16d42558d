"""The soak test in short, and whether it would find what it looks for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("peft")

from soak import soak

import fastgen
from fastgen.ops import cpu_linear

pytestmark = pytest.mark.filterwarnings("ignore")


def test_models_that_change_between_calls_give_the_results_of_the_library():
    result = soak(calls=80)
    assert not result.differences and not result.has_grown
    assert result.counts["equal, shared"] > 20


def test_soak_finds_copies_of_weights_that_are_stale(monkeypatch):
    copies = {}

    def multiply(rows, weight, bias=None):
        copy = copies.setdefault((weight.data_ptr(), weight.shape), weight.detach().clone())
        return cpu_linear.onednn_linear(rows, copy, bias)

    monkeypatch.setitem(cpu_linear.gemm_backends(torch.float32), cpu_linear.ONEDNN, multiply)
    assert any(line.startswith("different") for line in soak(calls=40).differences)


def test_soak_finds_what_grows(monkeypatch):
    kept, explain = [], fastgen.explain
    monkeypatch.setattr(fastgen, "explain", lambda: kept.append(kept_memory()) or explain())

    def kept_memory():
        return torch.zeros(1 << 16)

    assert soak(calls=20).has_grown
