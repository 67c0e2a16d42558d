"""Untested model classes and versions of transformers are compared before they are trusted."""

import functools
import random
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from parity import run_both, same_tokens
from tiny_models import tiny
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.optimizer.decoding.report import PREFILL
from fastgen.optimizer.transformers import TESTED, checks, verification
from fastgen.testing import as_untested, forget_verified, refused_classes, replaced, verified, watched

BEAMS = {"num_beams": 3, "max_new_tokens": 6}
INPUT_IDS = torch.randint(5, 99, (2, 9), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": INPUT_IDS}


@pytest.fixture(autouse=True)
def _share_small_prompts_and_forget_afterwards(share_always):
    with forget_verified():
        yield


@pytest.fixture
def newer_transformers():
    with as_untested() as failures:
        yield failures


@pytest.fixture
def wrong_attention():
    with replaced("shared attention", lambda attention, *args, **kwargs: attention(*args, **kwargs) * 1.5):
        yield


def make(model_class: type = LlamaForCausalLM) -> LlamaForCausalLM:
    model = tiny("llama")
    model.generation_config.eos_token_id = None
    model.__class__ = model_class
    return model


def own_class() -> type:
    # transformers reads the file of a class's module
    sys.modules.setdefault("own_package", types.ModuleType("own_package")).__file__ = __file__
    return type("OwnLlama", (LlamaForCausalLM,), {"__module__": "own_package"})


def test_tested_versions_and_classes_are_trusted(rows):
    model = make()
    model.generate(INPUT_IDS, **BEAMS)
    assert rows == [2, 6, 6, 6, 6, 6]


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_a_newer_version_is_compared_once_per_class_and_mode(mode, newer_transformers, rows):
    model, steps = make(), verification.STEPS
    compared = [6] * steps + 2 * ([2] + [6] * (steps - 1))
    for first in (compared, []):
        both = run_both(lambda: model.generate(INPUT_IDS, **mode, max_new_tokens=6))
        assert torch.equal(both.stock, both.fast) and "prefill: one row per input" in both.report.shared
        assert rows == [6] * 6 + first + [2, 6, 6, 6, 6, 6]
        rows.clear()
    assert not newer_transformers


def test_a_difference_on_a_newer_version_switches_patches_off(newer_transformers, wrong_attention):
    model = make()
    same_tokens(model, INPUTS, **BEAMS)
    [(group, reason)] = newer_transformers
    assert group == "transformers.shared_caches" and "logits of step 1 differ by" in reason
    assert fastgen.explain().codes(PREFILL) == {"DIFFERS"} and "logits of step 1 differ by" in str(fastgen.explain())


def test_a_class_outside_transformers_that_differs_is_left_alone(wrong_attention, rows):
    model = make(own_class())
    with pytest.warns(RuntimeWarning, match="own_package.OwnLlama"):
        same_tokens(model, INPUTS, **BEAMS)
    rows.clear()
    same_tokens(model, INPUTS, **BEAMS)
    assert set(rows) == {6}  # without another comparison
    states = [state for state in fastgen.status() if state.group == verification.GROUP]
    assert states and all(state.state == "applied" for state in states)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_class_outside_transformers_is_shared_after_comparing(rows, dtype):
    model = make(own_class()).to(dtype)
    model.generate(INPUT_IDS, **BEAMS)
    rows.clear()
    model.generate(INPUT_IDS, **BEAMS)
    assert rows == [2, 6, 6, 6, 6, 6]


def test_a_class_is_verified_in_a_call_that_can_be_repeated():
    class Streamer(BaseStreamer):
        def put(self, value):
            pass

        def end(self):
            pass

    model = make(own_class())
    sampling = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    model.generate(INPUT_IDS, **sampling, streamer=Streamer())
    assert fastgen.explain().shared == []
    assert fastgen.explain().codes(PREFILL) == {"UNVERIFIED"} and "a call with streamer" in str(fastgen.explain())
    model.generate(INPUT_IDS, **sampling)
    model.generate(INPUT_IDS, **sampling, streamer=Streamer())
    assert "prefill: one row per input" in fastgen.explain().shared


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_prompt_too_short_to_share_is_compared_too(repeated, wrong_attention, dtype):
    model = make(own_class()).to(dtype)
    with pytest.warns(RuntimeWarning, match="own_package.OwnLlama"):
        model.generate(INPUT_IDS[:, :2], num_beams=3, max_new_tokens=6)
    assert not verified()


class OwnLlama(LlamaForCausalLM):
    """A class that drops in training mode; with a switch on, rows depend on how many there are."""

    couples = False

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        logits = functional.dropout(outputs.logits, 0.3, self.training)
        if self.couples or getattr(self.config, "couples", False):
            logits = logits.roll(len(logits), -1) + logits.flip(0).roll(1, -1)
        outputs.logits = logits
        return outputs


SWITCHES = {
    "training mode": lambda model: model.train(),
    "attribute": lambda model: setattr(model, "couples", True),
    "attribute of the class": lambda model: setattr(type(model), "couples", True),
    "configuration": lambda model: setattr(model.config, "couples", True),
}


@pytest.mark.filterwarnings("ignore:fastgen leaves this model class alone")
@pytest.mark.parametrize("is_another", [False, True], ids=("the same model", "another model"))
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_class_is_trusted_for_similar_models_only(switch, is_another):
    kind = type("Own", (OwnLlama,), {"__module__": own_class().__module__})
    model = make(kind)
    same_tokens(model, INPUTS, **BEAMS)
    assert fastgen.explain().shared and verified()
    with watched("verify a class") as comparisons:
        other = make(kind)
        same_tokens(other, INPUTS, **BEAMS)
        assert fastgen.explain().shared and not comparisons
        model = other if is_another else model
        SWITCHES[switch](model)
        same_tokens(model, INPUTS, **BEAMS)
    assert not fastgen.explain().shared
    if switch == "training mode":  # a reason without a comparison
        assert not comparisons and not refused_classes()
        assert any("is in training mode" in reason.text for _, reason in fastgen.explain().not_done)


def test_another_dtype_or_attention_is_compared_again():
    model = make(own_class())
    model.generate(INPUT_IDS, **BEAMS)
    model.config._attn_implementation = "eager"
    model.generate(INPUT_IDS, **BEAMS)
    model.double().generate(INPUT_IDS, num_beams=3, max_new_tokens=6)
    assert len(verified()) == 3


def test_a_model_that_differs_in_every_call_is_left_alone():
    model = make(own_class())
    for calls in range(verification.MOST + 2):
        model.calls = calls
        model.generate(INPUT_IDS, **BEAMS)
    assert not fastgen.explain().shared and "UNVERIFIED" in fastgen.explain().codes()


def test_too_few_new_tokens_verify_nothing(rows):
    model = make(own_class())
    model.generate(INPUT_IDS, num_beams=3, max_new_tokens=1)
    assert rows == [6] and not verified()
    assert fastgen.explain().codes(PREFILL) == {"UNVERIFIED"} and "fewer than 4 new" in str(fastgen.explain())


def test_a_model_whose_modules_hold_rows_is_left_alone():
    class Keeping(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            self.last = output.logits[:, -1]
            return output

    model = make(Keeping)
    for _ in range(2):
        same_tokens(model, INPUTS, **BEAMS)
        assert not verified() and not fastgen.explain().shared


def test_an_early_end_does_not_hide_a_difference(wrong_attention):
    model = make(own_class())
    with fastgen.disabled():
        first = model.generate(INPUT_IDS[:1], max_new_tokens=1)[0, -1].item()
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": 8}
    with pytest.warns(RuntimeWarning, match="own_package.OwnLlama"):
        output = model.generate(INPUT_IDS[:1], **sampling, eos_token_id=first)
    assert output.shape == (3, INPUT_IDS.shape[1] + 1)


def test_an_error_of_user_code_refuses_no_class():
    model = make(own_class())
    with pytest.raises(IndexError):
        model.generate(torch.full((2, 9), 1000), num_beams=3, max_new_tokens=6)
    assert not refused_classes()
    model.generate(INPUT_IDS, **BEAMS)
    assert "prefill: one row per input" in fastgen.explain().shared


def test_greedy_decoding_of_one_row_needs_no_comparison(newer_transformers, rows):
    model = make()
    model.generate(INPUT_IDS, max_new_tokens=4)
    assert rows == [2, 2, 2, 2]


def waits_for_another_model(self, original, **kwargs):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(make(own_class()).generate, INPUT_IDS, num_beams=2, max_new_tokens=5).result()
    return original(**kwargs)


def keeps_what_fits_one_input(self, original, **kwargs):
    output = original(**kwargs)
    before = getattr(self, "before", None) if kwargs["input_ids"].shape[1] == 1 else None
    state = [output.logits[:, -1:].detach() * 0.1]  # where no check looks for rows
    self.before = {"kept": [state]}
    if before is not None:
        output.logits = output.logits + before["kept"][0][0]
    return output


def draws_from_pythons_random_numbers(self, original, **kwargs):
    output = original(**kwargs)
    output.logits = output.logits * random.uniform(0.5, 1.5)
    return output


@pytest.mark.parametrize(
    "forward", (waits_for_another_model, keeps_what_fits_one_input, draws_from_pythons_random_numbers)
)
def test_forwards_of_user_code_do_as_in_the_library(forward):
    library = LlamaForCausalLM.forward
    own = {"forward": lambda self, **kwargs: forward(self, functools.partial(library, self), **kwargs)}
    model = make(type("Own", (LlamaForCausalLM,), own | {"__module__": "own_package"}))

    def call(inputs):
        random.seed(5)
        tokens = model.generate(INPUT_IDS[:inputs], do_sample=True, num_return_sequences=4, max_new_tokens=6)
        return tokens.tolist(), random.getstate()

    for inputs in (1, 2):
        both = run_both(functools.partial(call, inputs))
        assert both.stock == both.fast


def test_methods_of_the_first_call_are_not_cut_short():
    class Busy(LlamaForCausalLM):
        busy = False

        def _beam_search(self, *args, **kwargs):
            assert not self.busy
            self.busy = True
            result = super()._beam_search(*args, **kwargs)
            self.busy = False
            return result

    model = make(Busy)
    model.generate(INPUT_IDS, **BEAMS)
    assert not model.busy


def test_a_warning_turned_into_an_error_costs_no_output(wrong_attention):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_tokens(make(own_class()), INPUTS, **BEAMS)


def test_a_report_names_an_untested_class_or_version():
    model = tiny("llama")
    assert checks.untested_reasons(model) == []
    with as_untested():
        (newer,) = checks.untested_reasons(model)
    assert newer.text == f"transformers {transformers.__version__} is newer than the newest tested {TESTED[1]}"
    model.__class__ = type("Mine", (type(model),), {"__module__": "user_code"})
    (foreign,) = checks.untested_reasons(model)
    assert (foreign.code, foreign.text) == ("UNTESTED", "user_code.Mine is not a class of transformers")
