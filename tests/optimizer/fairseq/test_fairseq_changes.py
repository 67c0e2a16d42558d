"""What a program changes in fairseq's models within a call does under fastgen what it did."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import search
from fairseq.modules import MultiheadAttention
from fairseq_generation import assert_same_hypotheses, run_both
from fairseq_models import CASES
from parity import capturing, replays
from torch import nn
from torch.nn import functional

import fastgen

AT = 8


@pytest.fixture(autouse=True)
def captured():
    with capturing():
        yield


class Changing(search.BeamSearch):
    """Changes the model in one of its steps."""

    def __init__(self, dictionary: Any, change: Any, model: Any) -> None:
        super().__init__(dictionary)
        self.change, self.changed = change, model

    def step(self, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == AT:
            self.change(self.changed)
        return super().step(step, *args, **kwargs)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) * 2


def add_a_hook(model: Any) -> None:
    model.decoder.layers[0].fc2.register_forward_hook(lambda module, args, output: output * 2)


def look_at_the_attention(model: Any) -> None:
    def weigh(module: nn.Module, args: Any, output: Any) -> Any:
        attended, weights = output
        return attended * (2 if weights is None else 1 + weights.amax()), weights

    model.decoder.layers[0].encoder_attn.register_forward_hook(weigh)


def give_a_weight_other_data(model: Any) -> None:
    weight = model.decoder.layers[1].fc2.weight
    weight.data = -weight.data


def replace_a_module(model: Any) -> None:
    model.decoder.layers[0].fc2 = Doubled(model.decoder.layers[0].fc2)


def replace_an_attention(model: Any) -> None:
    old = model.decoder.layers[1].self_attn
    new = MultiheadAttention(old.embed_dim, old.num_heads, self_attention=True)
    new.load_state_dict(old.state_dict())
    model.decoder.layers[1].self_attn = new.eval()


def replace_a_forward(model: Any) -> None:
    layer = model.decoder.layers[0]
    forward = layer.fc1.forward
    layer.fc1.forward = lambda states: forward(states) * 2


def replace_the_activation(model: Any) -> None:
    model.decoder.layers[0].activation_fn = lambda states: functional.relu(states) * 2


def train(model: Any) -> None:
    model.decoder.layers[0].train()


CHANGES = (
    add_a_hook,
    look_at_the_attention,
    give_a_weight_other_data,
    replace_a_module,
    replace_an_attention,
    replace_a_forward,
    replace_the_activation,
    train,
)


def generated(change: Any) -> list[Any]:
    """Of three calls on one model, in the second of which it is changed."""
    case, found = CASES["transformer"](), []
    for what in (lambda model: None, change, lambda model: None):
        generator = case.task.build_generator(case.models, Namespace(beam=3, max_len_b=24, min_len=20))
        generator.search = Changing(case.task.target_dictionary, what, case.models[0])
        found.append(case.task.inference_step(generator, case.models, case.sample))
        case.models[0].eval()
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_search_that_changes_the_model_within_a_call(change):
    both = run_both(lambda: generated(change))
    for stock, fast in zip(both.stock, both.fast, strict=True):
        assert_same_hypotheses(stock, fast)


def test_a_search_of_the_program_that_changes_nothing_is_captured():
    generated(lambda model: None)
    assert replays(fastgen.explain()) > 10


def test_a_call_of_fairseq_whose_model_was_changed_says_so():
    case = CASES["transformer"]()
    for what in (lambda model: None, give_a_weight_other_data):
        generator = case.task.build_generator(case.models, Namespace(beam=3, max_len_b=24, min_len=20))
        generator.search = Changing(case.task.target_dictionary, what, case.models[0])
        case.task.inference_step(generator, case.models, case.sample)
    report = fastgen.explain()
    assert "MODEL_CHANGED" in report.codes()
    assert 0 < replays(report) < 20
