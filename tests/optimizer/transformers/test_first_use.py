"""Code that no test has seen, classes and versions of transformers, is compared at its first use."""

import functools
import random
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from edited_host import edited, run
from hooks import fresh_trust, proven, refused, replaced, watched
from parity import run_both, same_tokens
from tiny_models import tiny
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.models.mistral.modeling_mistral import MistralMLP

import fastgen
from fastgen.optimizer.decoding.report import PREFILL
from fastgen.optimizer.transformers import first_use
from fastgen.optimizer.transformers.beam_search import BeamSearch
from fastgen.optimizer.transformers.row_draws import RowDraws

BEAMS = {"num_beams": 3, "max_new_tokens": 6}
INPUT_IDS = torch.randint(5, 99, (2, 9), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": INPUT_IDS}


@pytest.fixture(autouse=True)
def _share_small_prompts_and_forget_afterwards(share_always):
    with fresh_trust():
        yield


@pytest.fixture
def newer_transformers():
    with fresh_trust(unknown=("transformers.",)):
        yield


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


def test_a_class_whose_module_is_not_imported_is_compared():
    model = make(type("Own", (LlamaForCausalLM,), {"__module__": "a_module_that_was_never_imported"}))
    model.generate(INPUT_IDS, **BEAMS)
    assert "FIRST_USE" in fastgen.explain().codes()


def test_a_class_that_a_model_gets_later_is_compared():
    model = make()
    with fresh_trust(unknown=("transformers.models.mistral.",)):
        assert "prefill: one row per input" in run_both(lambda: model.generate(INPUT_IDS, **BEAMS)).report.shared
        model.model.layers[0].mlp = MistralMLP(model.config)
        for code in ("UNVERIFIED", "FIRST_USE", None):
            both = run_both(lambda: model.generate(INPUT_IDS, **BEAMS))
            assert torch.equal(both.stock, both.fast)
            assert both.report.codes() & {"UNVERIFIED", "FIRST_USE"} == {code} - {None}
            assert bool(both.report.shared) == (code is None)


MODES = [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", (8, 60))
def test_unknown_sources_are_compared_once_per_class_and_mode(mode, steps, newer_transformers):
    model = make()
    for codes in ({"FIRST_USE"}, set()):
        both = run_both(lambda: model.generate(INPUT_IDS, **mode, max_new_tokens=steps))
        assert torch.equal(both.stock, both.fast)
        assert codes <= both.report.codes() and ("FIRST_USE" in both.report.codes()) == bool(codes)
        assert len(proven()) == 1
    assert ("prefill: one row per input" in both.report.shared) == bool(mode)


def test_the_comparison_shares_and_captures_and_does_neither(newer_transformers, rows):
    make().generate(INPUT_IDS, num_beams=3, max_new_tokens=30)
    theirs, all_on, plain = rows[:30], rows[30 : -first_use.PLAIN_STEPS], rows[-first_use.PLAIN_STEPS :]
    assert set(theirs) == set(plain) == {6}
    assert all_on[0] == 2 and len(all_on) < 15  # the rest are replays


@pytest.mark.parametrize("mode", MODES)
def test_a_difference_leaves_the_class_to_transformers(mode, newer_transformers, wrong_attention):
    model = make()
    with pytest.warns(RuntimeWarning, match="fastgen leaves .*LlamaForCausalLM .* to the library"):
        same_tokens(model, INPUTS, **{**BEAMS, **mode})
    assert "DIFFERS" in fastgen.explain().codes(PREFILL)
    same_tokens(model, INPUTS, **{**BEAMS, **mode})
    assert fastgen.explain().codes(PREFILL) == {"DIFFERS"} and not proven()


@pytest.mark.filterwarnings("ignore:fastgen leaves")
@pytest.mark.parametrize("steps", (8, 60))
def test_an_error_of_fastgens_own_loop_shows(steps, newer_transformers, monkeypatch):
    enter = BeamSearch.enter
    monkeypatch.setattr(BeamSearch, "enter", lambda self, scores, *args: enter(self, scores * 1.25, *args))
    for _ in range(2):
        same_tokens(make(), INPUTS, num_beams=3, max_new_tokens=steps)
    assert refused() and not proven()


def test_a_library_with_other_methods_of_beam_search_is_compared(newer_transformers):
    """A later library may have renamed what the comparison notes scores of beams with."""
    method, model = "_update_finished_beams", make()
    names = {method: property(), "__module__": LlamaForCausalLM.__module__}  # reading the property raises an error
    model.__class__ = type("Renamed", (LlamaForCausalLM,), names)
    assert not hasattr(model, method)
    for codes in ({"FIRST_USE"}, set()):
        same_tokens(model, INPUTS, max_new_tokens=6)
        assert codes <= fastgen.explain().codes()
    assert len(proven()) == 1


def test_a_class_outside_transformers_that_differs_is_left_alone(wrong_attention, rows):
    model = make(own_class())
    with pytest.warns(RuntimeWarning, match="own_package.OwnLlama"):
        same_tokens(model, INPUTS, **BEAMS)
    rows.clear()
    same_tokens(model, INPUTS, **BEAMS)
    assert set(rows) == {6}  # without another comparison


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
    assert fastgen.explain().codes(PREFILL) == {"FIRST_USE"}
    model.generate(INPUT_IDS, **sampling)
    model.generate(INPUT_IDS, **sampling, streamer=Streamer())
    assert "prefill: one row per input" in fastgen.explain().shared


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_prompt_too_short_to_share_is_compared_too(repeated, wrong_attention, dtype):
    model = make(own_class()).to(dtype)
    with pytest.warns(RuntimeWarning, match="own_package.OwnLlama"):
        model.generate(INPUT_IDS[:, :2], num_beams=3, max_new_tokens=6)
    assert not proven()


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


@pytest.mark.filterwarnings("ignore:fastgen leaves")
@pytest.mark.parametrize("is_another", [False, True], ids=("the same model", "another model"))
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_class_is_trusted_for_similar_models_only(switch, is_another):
    kind = type("Own", (OwnLlama,), {"__module__": own_class().__module__})
    model = make(kind)
    same_tokens(model, INPUTS, **BEAMS)
    same_tokens(model, INPUTS, **BEAMS)
    assert fastgen.explain().shared and proven()
    with watched("trial") as comparisons:
        other = make(kind)
        same_tokens(other, INPUTS, **BEAMS)
        assert fastgen.explain().shared and not comparisons
        model = other if is_another else model
        SWITCHES[switch](model)
        same_tokens(model, INPUTS, **BEAMS)
    assert not fastgen.explain().shared
    if switch == "training mode":  # a reason without a comparison
        assert not comparisons and not refused()
        assert any("is in training mode" in reason.text for _, reason in fastgen.explain().not_done)


def test_arguments_that_autograd_has_recorded_can_be_repeated(newer_transformers):
    model = tiny("bart")

    def call():
        encoded = model.get_encoder()(INPUT_IDS)  # the library repeats the rows of what it gets
        assert encoded.last_hidden_state.requires_grad
        return model.generate(encoder_outputs=encoded, **BEAMS)

    for shared in (False, True):
        both = run_both(call)
        assert torch.equal(both.stock, both.fast) and bool(both.report.shared) == shared


def test_a_cache_of_the_caller_is_left_as_the_library_leaves_it(newer_transformers):
    model, lengths = make(), []
    for _ in range(2):
        cache = DynamicCache(config=model.config)
        model.generate(INPUT_IDS, past_key_values=cache, max_new_tokens=6)
        lengths.append(cache.get_seq_length())
    assert lengths == [INPUT_IDS.shape[1] + 5] * 2


def test_a_seed_for_each_row_can_be_repeated(newer_transformers):
    model, options = make(), {"do_sample": True, "max_new_tokens": 6}
    for shown in ({"FIRST_USE"}, set()):
        draws = [RowDraws([(5, row, 0) for row in range(2)], INPUT_IDS.device) for _ in range(2)]
        with fastgen.disabled():
            expected = model.generate(INPUT_IDS, **options, logits_processor=draws[:1])
        assert torch.equal(model.generate(INPUT_IDS, **options, logits_processor=draws[1:]), expected)
        assert shown <= fastgen.explain().codes()
    assert len(proven()) == 1


def test_another_dtype_or_attention_is_compared_again():
    model = make(own_class())
    model.generate(INPUT_IDS, **BEAMS)
    model.config._attn_implementation = "eager"
    model.generate(INPUT_IDS, **BEAMS)
    model.double().generate(INPUT_IDS, num_beams=3, max_new_tokens=6)
    assert len(proven()) == 3


def test_a_model_that_differs_in_every_call_is_left_alone():
    model = make(own_class())
    for calls in range(first_use.MOST_TRIALS + 2):
        model.calls = calls
        model.generate(INPUT_IDS, **BEAMS)
    assert not fastgen.explain().shared and "UNVERIFIED" in fastgen.explain().codes()


def test_too_few_new_tokens_verify_nothing(rows):
    model = make(own_class())
    model.generate(INPUT_IDS, num_beams=3, max_new_tokens=1)
    assert rows == [6] and not proven()
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
        assert not fastgen.explain().shared


def test_an_early_end_shows_nothing(wrong_attention):
    model = make(own_class())
    with fastgen.disabled():
        first = model.generate(INPUT_IDS[:1], max_new_tokens=1)[0, -1].item()
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": 8}
    for _ in range(2):
        output = model.generate(INPUT_IDS[:1], **sampling, eos_token_id=first)
        assert output.shape == (3, INPUT_IDS.shape[1] + 1) and not proven() and not refused()


def test_an_error_of_user_code_refuses_no_class():
    model = make(own_class())
    with pytest.raises(IndexError):
        model.generate(torch.full((2, 9), 1000), num_beams=3, max_new_tokens=6)
    assert not refused()
    model.generate(INPUT_IDS, **BEAMS)
    model.generate(INPUT_IDS, **BEAMS)
    assert "prefill: one row per input" in fastgen.explain().shared


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


# Hosts that were edited, in processes of their own.

PROGRAM = """
import torch, fastgen
from tiny_models import tiny

inputs = torch.arange(20, 60).view(2, 20)
for mode in MODES:
    model = tiny("bart")
    for _ in range(3):
        outputs = {}
        for name, context in (("stock", fastgen.disabled), ("fast", fastgen.enabled)):
            with context():
                torch.manual_seed(0)
                outputs[name] = model.generate(inputs, max_new_tokens=40, **mode)
        print(torch.equal(outputs["stock"], outputs["fast"]), sorted(fastgen.explain().codes()), fastgen.explain())
    print(END)
"""
END = "end of a mode"
UTILS = "generation/utils.py"
HARMLESS = ("next_token_scores", "scores_of_next_tokens"), ("topk_log_probs", "log_probs_of_top_k")
LENGTH_PENALTY = ("** length_penalty)", "** (3 * length_penalty - 4))")
CHOICE = ("torch.argmax(next_token_scores", "torch.argmin(next_token_scores")
IN_SUBSTANCE = {
    "loops": ([{"num_beams": 4, "eos_token_id": 7}, {}], UTILS, (LENGTH_PENALTY, CHOICE)),
    "model": ([{}], "models/bart/modeling_bart.py", [("residual + hidden_states", "residual - hidden_states")]),
    "order of processors": (
        [{"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 3.0}],
        "generation/logits_process.py",
        [("for processor in self:", "for processor in reversed(self):")],
    ),
}


def run_modes(modes, host, cache):
    """Runs three calls of each mode in a process; returns what it prints for each mode."""
    printed = run(f"MODES, END = {modes!r}, {END!r}\n{PROGRAM}", host, FASTGEN_CACHE=str(cache)).split(END)
    assert len(printed) == len(modes) + 1
    return printed[:-1]


@pytest.mark.slow
def test_a_loop_with_renamed_variables_is_fast_in_the_next_call(tmp_path):
    host = edited(tmp_path / "host", UTILS, *HARMLESS)
    for printed in run_modes(MODES, host, tmp_path / "cache"):
        first, second, _ = printed.split("True ")[1:]
        assert "FIRST_USE" in first and "FIRST_USE" not in second and "DIFFERS" not in second
    for later in run_modes(MODES, host, tmp_path / "cache"):  # another process
        assert later.count("True") == 3 and "FIRST_USE" not in later


@pytest.mark.slow
@pytest.mark.parametrize("change", IN_SUBSTANCE)
def test_a_host_that_changed_in_substance_gives_its_own_answer(tmp_path, change):
    modes, file, replacements = IN_SUBSTANCE[change]
    for printed in run_modes(modes, edited(tmp_path / "host", file, *replacements), tmp_path / "cache"):
        assert printed.count("True ") == 3
        assert change != "loops" or printed.count("DIFFERS") == 3
