"""A comparison of a model class of the program's holds for models that are like the one compared, and for no others."""

from __future__ import annotations

import copy
import sys
import types
from typing import Any

import pytest
import torch
from architectures import SPECIAL
from parity import lively, run_both
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import fastgen
from fastgen import testing
from fastgen.optimizer.transformers import verification

CONFIG = LlamaConfig(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    pad_token_id=SPECIAL["pad_token_id"],
    coupling=0.0,
)
INPUT_IDS = torch.randint(5, 99, (2, 9), generator=torch.Generator().manual_seed(0))
BEAMS = {"num_beams": 4, "max_new_tokens": 8}


class OwnLlama(LlamaForCausalLM):
    """Drops in training mode; where it is told to, rows depend on how many there are."""

    couples = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        logits = functional.dropout(outputs.logits, 0.3, self.training)
        if self.couples or self.config.coupling:
            logits = logits.roll(len(logits), -1) + logits.flip(0).roll(1, -1)
        outputs.logits = logits
        return outputs


@pytest.fixture(autouse=True)
def forgotten(monkeypatch, share_always):
    # transformers reads the file of a class's module
    sys.modules.setdefault("own_package", types.ModuleType("own_package")).__file__ = __file__
    monkeypatch.setattr(OwnLlama, "__module__", "own_package")
    with testing.forget_verified():
        yield


def make(**config: Any) -> OwnLlama:
    torch.manual_seed(0)
    changed = copy.deepcopy(CONFIG)
    changed.update(config)
    return lively(OwnLlama(changed)).eval()


def compared(model: OwnLlama) -> OwnLlama:
    both = run_both(lambda: model.generate(INPUT_IDS, **BEAMS))
    assert torch.equal(both.stock, both.fast) and both.report.shared and testing.verified()
    return model


def train(model: OwnLlama) -> OwnLlama:
    return model.train()


def flip_the_flag(model: OwnLlama) -> OwnLlama:
    model.couples = True
    return model


def flip_the_flag_of_the_class(model: OwnLlama) -> OwnLlama:
    OwnLlama.couples = True
    return model


def change_the_configuration(model: OwnLlama) -> OwnLlama:
    model.config.coupling = 1.0
    return model


def make_another(model: OwnLlama) -> OwnLlama:
    return make(coupling=1.0)


@pytest.mark.filterwarnings("ignore:fastgen leaves this model class alone")
@pytest.mark.parametrize(
    "change", [train, flip_the_flag, flip_the_flag_of_the_class, change_the_configuration, make_another]
)
def test_a_class_that_was_verified_is_not_trusted_after_a_change(monkeypatch, change):
    monkeypatch.setattr(OwnLlama, "couples", False)
    model = change(compared(make()))
    both = run_both(lambda: model.generate(INPUT_IDS, **BEAMS))
    assert torch.equal(both.stock, both.fast) and not both.report.shared


def test_a_class_of_the_program_in_training_mode_is_left_alone_without_a_comparison():
    model = make().train()
    model.generate(INPUT_IDS, **BEAMS)
    assert not testing.verified() and not testing.refused_classes()
    assert any("is in training mode" in reason.text for _, reason in fastgen.explain().not_done)


def test_models_that_are_alike_are_compared_once():
    compared(make())
    with testing.watched("verify a class") as comparisons:
        compared(make())
    assert not comparisons


def test_a_model_that_differs_in_every_call_is_not_compared_for_ever():
    model = make()
    for calls in range(verification.MOST + 2):
        model.calls = calls
        model.generate(INPUT_IDS, **BEAMS)
    assert not fastgen.explain().shared and "UNVERIFIED" in fastgen.explain().codes()
