"""A model that accelerate has prepared with mixed precision casts each weight once in a call, to the same bits."""

from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from parity import assert_equal_outputs, run_both
from tiny_models import padded, tiny, token_ids, under_autocast
from torch.profiler import profile
from transformers import LogitsProcessor

import fastgen
from fastgen.optimizer.transformers import call as calls
from fastgen.optimizer.transformers.call import CAST_ONCE
from fastgen.testing import configured

NEW = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
}
WAYS = pytest.mark.parametrize("way", DECODING)


@contextmanager
def casting_in_each_step() -> Any:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(calls, "_can_keep_casts", lambda call, model: False))
        yield


@WAYS
@pytest.mark.parametrize("name", ("llama", "gpt2", "bart"))
def test_casts_of_a_call_are_those_of_each_step(name, way):
    model = under_autocast(name)
    both = run_both(lambda: model.generate(**padded(9, 5), **NEW | DECODING[way]), without=casting_in_each_step)
    assert CAST_ONCE in both.report.shared
    assert_equal_outputs(both.stock, both.fast, tolerance=0.0)


def test_outputs_under_autocast_are_those_of_the_library():
    model = under_autocast("llama")
    with configured(share="never"):
        both = run_both(lambda: model.generate(token_ids(1, 9), **NEW))
    assert_equal_outputs(both.stock, both.fast, tolerance=0.0)


def number_of_casts(model: Any) -> int:
    with profile() as events:
        model.generate(token_ids(1, 9), **NEW)
    return sum(event.count for event in events.key_averages() if event.key == "aten::_to_copy")


def test_each_weight_is_cast_once():
    model = under_autocast("llama")
    with casting_in_each_step():
        in_each_step = number_of_casts(model)
    weights = sum(module.weight.requires_grad for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert number_of_casts(model) <= in_each_step - weights * (NEW["max_new_tokens"] - 1)


@pytest.mark.parametrize("trains", (True, False), ids=("trainable", "frozen"))
def test_the_next_call_sees_new_weights(trains):
    model = under_autocast("llama")
    model.requires_grad_(trains)

    def call() -> Any:
        first = model.generate(token_ids(1, 9), **NEW)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05)
        second = model.generate(token_ids(1, 9), **NEW)
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(0.05)
        return first, second

    with configured(share="never"):
        both = run_both(call)
    assert_equal_outputs(both.stock, both.fast, tolerance=0.0)
    assert not torch.equal(both.fast[0].logits[0], both.fast[1].logits[0])


class Changing(LogitsProcessor):
    """Changes a weight in the third step."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            with torch.no_grad():
                self.model.lm_head.weight.mul_(1.5)
        return scores


def test_weights_that_change_in_a_call_are_cast_in_each_step():
    models = [under_autocast("llama") for _ in range(2)]
    remaining = iter(models)

    def call() -> Any:
        model = next(remaining)
        return model.generate(token_ids(1, 9), **NEW, logits_processor=[Changing(model)])

    with configured(share="never"):
        both = run_both(call)
    assert_equal_outputs(both.stock, both.fast, tolerance=0.0)
    assert CAST_ONCE not in both.report.shared


def test_casts_that_do_not_fit_are_not_kept():
    model = under_autocast("llama")
    with mock.patch.object(calls, "free_memory", lambda device: 1000):
        model.generate(token_ids(1, 9), **NEW)
    assert CAST_ONCE not in fastgen.explain().shared


def test_gradients_after_a_call_are_those_without_it():
    model = under_autocast("llama")
    gradients = []
    for generates in (False, True):
        model.zero_grad()
        if generates:
            model.generate(token_ids(1, 9), **NEW)
        model(input_ids=token_ids(1, 9), labels=token_ids(1, 9)).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    assert_equal_outputs(*gradients, tolerance=0.0)


def test_an_autocast_around_the_call_keeps_its_casts():
    model = tiny("llama")
    with configured(share="never"), torch.autocast("cpu", dtype=torch.bfloat16):
        both = run_both(lambda: model.generate(token_ids(1, 9), **NEW))
    assert_equal_outputs(both.stock, both.fast, tolerance=0.0)
    assert CAST_ONCE not in both.report.shared
