"""What a program changes in fairseq's models within a call does under fastgen what it did."""

from __future__ import annotations

from argparse import Namespace
from random import Random
from typing import Any

import pytest

pytest.importorskip("fairseq")

from fairseq import search
from fairseq_generation import assert_same_hypotheses, run_both
from fairseq_models import CASES
from fuzz_changes import CHANGES as CHANGES_OF_ALL_HOSTS
from fuzz_changes import adapter, other_weight_data
from parity import capturing, replays
from torch import nn

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
            self.change(Random(1), self.changed)
        return super().step(step, *args, **kwargs)


def nothing(random: Random, model: Any) -> None:
    pass


def look_at_the_attention(random: Random, model: Any) -> None:
    def weigh(module: nn.Module, args: Any, output: Any) -> Any:
        attended, weights = output
        return attended * (2 if weights is None else 1 + weights.amax()), weights

    model.decoder.layers[0].encoder_attn.register_forward_hook(weigh)


def generated(*changes: Any) -> list[Any]:
    """What calls on one model give, in each of which it is changed."""
    case, outputs = CASES["transformer"](), []
    for change in changes:
        generator = case.task.build_generator(case.models, Namespace(beam=3, max_len_b=24, min_len=20))
        generator.search = Changing(case.task.target_dictionary, change, case.models[0])
        outputs.append(case.task.inference_step(generator, case.models, case.sample))
        case.models[0].eval()
    return outputs


CHANGES = [change for change in CHANGES_OF_ALL_HOSTS if change is not adapter]


@pytest.mark.parametrize("change", [*CHANGES, look_at_the_attention])
def test_a_search_that_changes_the_model_within_a_call(change):
    both = run_both(lambda: generated(nothing, change, nothing))
    for stock, fast in zip(both.stock, both.fast, strict=True):
        assert_same_hypotheses(stock, fast)


def test_steps_are_captured_until_a_search_changes_the_model():
    generated(nothing)
    assert replays(fastgen.explain()) > 10
    generated(nothing, other_weight_data)
    report = fastgen.explain()
    assert "MODEL_CHANGED" in report.codes() and 0 < replays(report) < 20
