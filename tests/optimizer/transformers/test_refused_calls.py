"""Calls that the library refuses have its own error, once, at the same point; nothing is switched off."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooks import broken, replaced
from reports import capturing
from tiny_models import tiny, token_ids
from torch import Tensor
from transformers import LogitsProcessor

import fastgen
from fastgen.optimizer import PATCH_SET
from fastgen.testing import configured

GREEDY = {"do_sample": False}
SAMPLES = {"do_sample": True, "num_return_sequences": 3}
BEAMS = {"num_beams": 3}
WAYS = pytest.mark.parametrize("options", (GREEDY, SAMPLES, BEAMS), ids=("greedy", "samples", "beams"))

pytestmark = pytest.mark.usefixtures("share_always")


@pytest.fixture(autouse=True, params=("off", "on"))
def _not_strict(request):
    with configured(strict=False), capturing(request.param):
        yield
    fastgen.enable()


def assert_refused_alike(call: Callable[[], Any]) -> None:
    """Asserts the same error and random numbers without fastgen and with it, and that nothing is switched off."""
    seen = []
    for context in (fastgen.disabled(), fastgen.enabled()):
        torch.manual_seed(3)
        with context, pytest.raises(Exception) as error:
            call()
        seen.append((type(error.value), str(error.value), torch.get_rng_state().tolist()))
    assert seen[0] == seen[1] and not PATCH_SET.switched_off


@WAYS
@pytest.mark.parametrize("shape", [(0, 9), (2, 3, 9), (2, 0)], ids=str)
def test_prompts_of_a_wrong_shape_have_the_librarys_error(shape, options):
    model = tiny("llama")
    assert_refused_alike(lambda: model.generate(token_ids(*shape), max_new_tokens=5, **options))


class Returns(LogitsProcessor):
    """A processor that returns something else in its fifth call. calls: of all processors of this class."""

    calls = 0

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self.change, self.own_calls = change, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        Returns.calls += 1
        self.own_calls += 1
        return self.change(scores) if self.own_calls == 5 else scores


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda scores: scores.tolist(),
    "an error of its own": lambda scores: scores[:, 0, 0, 0],
    "nan": lambda scores: scores * torch.nan,
}


@pytest.mark.parametrize(
    ("change", "options"),
    [(change, options) for change in CHANGES for options in (GREEDY, SAMPLES, BEAMS) if change != "nan"]
    + [("nan", SAMPLES)],
)
def test_a_processor_of_user_code_is_called_once_a_step(options, change):
    model, calls = tiny("llama"), []

    def call():
        Returns.calls, processor = 0, Returns(CHANGES[change])
        try:
            model.generate(token_ids(2, 9), max_new_tokens=12, logits_processor=[processor], **options)
        finally:
            calls.append(Returns.calls)

    assert_refused_alike(call)
    assert calls == [5, 5]


def test_the_state_of_a_librarys_processor_is_restored():
    model, input_ids = tiny("llama"), token_ids(6, 9)
    guided = {"guidance_scale": 1.5, "negative_prompt_ids": input_ids.flip(1)}  # it needs a prompt for each sample
    assert_refused_alike(lambda: model.generate(input_ids, **guided, **SAMPLES, max_new_tokens=12))


@WAYS
def test_too_many_positions_have_the_librarys_error(options):
    model = tiny("gpt2", n_positions=16)
    arguments = {"max_new_tokens": 30, "eos_token_id": list(range(3, 90, 6)), "min_new_tokens": 12, **options}
    assert_refused_alike(lambda: model.generate(token_ids(4, 9), **arguments))
    assert "CAPTURE_REFUSED" not in fastgen.explain().codes()


def test_random_numbers_are_restored_before_a_second_try():
    model, input_ids = tiny("llama"), token_ids(3, 9)
    arguments = {**SAMPLES, "max_new_tokens": 12, "eos_token_id": list(range(3, 90, 6))}
    with fastgen.disabled():
        torch.manual_seed(3)
        stock, state = model.generate(input_ids, **arguments), torch.get_rng_state()
    with broken("compact samples", KeyError("ours"), after=2) as compactions:  # in the third step
        torch.manual_seed(3)
        assert torch.equal(model.generate(input_ids, **arguments), stock) and len(compactions) == 3
        assert torch.equal(torch.get_rng_state(), state)
        reason = "transformers.sample raised KeyError: 'ours'"
        assert PATCH_SET.switched_off == {"transformers.loops": reason}
        model.generate(input_ids, **arguments)
        assert len(compactions) == 3
        assert f"transformers.loops is switched off until fastgen.enable(): {reason}" in str(fastgen.explain())
        assert "SWITCHED_OFF" in fastgen.explain().codes()
    fastgen.enable()
    model.generate(input_ids, **arguments)
    assert not PATCH_SET.switched_off and "SWITCHED_OFF" not in fastgen.explain().codes()


@pytest.mark.parametrize("refused", [True, False])
def test_the_library_is_asked_before_sharing_is_switched_off(refused):
    model, input_ids = tiny("llama"), token_ids(2, 9)

    def fail(expand: Callable, plan: Any, *others: Any) -> None:
        expand(plan, *others)
        if refused:
            plan.checks.model.lm_head = None
        raise KeyError("ours")

    if refused:
        error = pytest.raises(TypeError, match="'NoneType' object is not callable")
        with replaced("expand a prefill", fail), error:
            model.generate(input_ids, **BEAMS, max_new_tokens=5)
        assert not PATCH_SET.switched_off
        return
    with fastgen.disabled():
        stock = model.generate(input_ids, **BEAMS, max_new_tokens=5)
    with replaced("expand a prefill", fail):
        assert torch.equal(model.generate(input_ids, **BEAMS, max_new_tokens=5), stock)
    report = fastgen.explain()
    assert not report.shared and "prompt sharing: KeyError: 'ours'" in report.fallbacks
    assert PATCH_SET.switched_off == {"transformers.shared_caches": "transformers.prefill raised KeyError: 'ours'"}
