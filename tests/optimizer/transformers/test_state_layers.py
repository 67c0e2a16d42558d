"""Linear attention and state spaces: captured steps keep, reorder and compact the states of rows like their keys."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from architecture_parity import shares
from auto_models import auto_model
from hooks import broken, costs, errors_noted, fresh_trust
from parity import assert_equal_caches, assert_same, compared
from reports import LEFT, capturing, replays
from tiny_models import padded
from transformers import DynamicCache

import fastgen
from fastgen.models.cache_names import CACHE
from fastgen.optimizer.transformers import compat

ENDS = [*range(2, 12)]  # so many of 99 tokens that some rows end early
CLASSES = """
    Bamba FalconH1 FalconMamba GraniteMoeHybrid Jamba KimiLinear Lfm2 Lfm2Moe Mamba Mamba2 NemotronH OlmoHybrid
    Qwen3Next Qwen3_5 Qwen3_5Moe Zamba Zamba2
""".split()
ONLY_STATES = {"Mamba", "Mamba2", "FalconMamba"}
MODES = {
    "greedy": {"do_sample": False},
    "samples": {"do_sample": True, "num_return_sequences": 4},
    "beams": {"num_beams": 4, "do_sample": False, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True},
}

pytestmark = pytest.mark.skipif(not compat.LAYERS_ARE_KNOWN, reason="steps are captured from transformers 5.17 on")


@pytest.fixture(autouse=True)
def accepted() -> Iterator[None]:
    """Outputs of first uses, of modeling files that no test has seen, would be the library's."""
    with fresh_trust(accepted=True):
        yield


def model_of(name: str, ends: bool = False) -> Any:
    kind = f"{name}ForCausalLM"
    if not hasattr(transformers, kind):
        pytest.skip(f"this version has no {kind}")
    model = auto_model(kind)
    model.generation_config.eos_token_id = ENDS if ends else None
    return model


@pytest.mark.parametrize("name", CLASSES)
def test_captured_steps_with_states_give_the_same(name, share_always):
    model, inputs = model_of(name), padded(12, 9, 4)
    with capturing():
        for mode, arguments in MODES.items():
            report = assert_same(model, inputs, max_new_tokens=20, output_logits=False, **arguments)
            assert replays(report) > 12, (mode, report)
            shared = "prefill" if name in ONLY_STATES else "prefill, prompt"
            assert mode == "greedy" or shares(report) == shared, mode


# One of each kind of state; test_auto_classes.py lets rows of all classes leave captured steps.
@pytest.mark.parametrize("captured", (True, False), ids=("captured", "eager"))
@pytest.mark.parametrize("name", ("FalconMamba", "Mamba2", "FalconH1", "KimiLinear", "Lfm2Moe", "Qwen3Next", "Zamba2"))
def test_states_leave_with_rows_that_have_ended(name, captured, share_always):
    model, inputs = model_of(name, ends=True), padded(12, 10, 7, 9)
    plain = {"return_dict_in_generate": False, "output_scores": False, "output_logits": False}
    with capturing("on" if captured else "off"), costs(min_leaving=0.0, min_steps_expected=1):
        for mode, arguments in MODES.items():
            report = assert_same(model, inputs, max_new_tokens=14, **plain, **arguments)
            assert bool(replays(report)) is captured, mode
            if mode == "samples":
                assert LEFT in report.shared


@pytest.mark.parametrize("name", ("Qwen3Next", "FalconH1", "Mamba2", "Lfm2Moe"))
def test_a_cache_with_states_continues_after_a_call(name):
    """The caller gets copies of its own: later calls overwrite the graph's tensors."""
    model, inputs = model_of(name), padded(10, 10)
    with capturing():
        both = compared(model, inputs, max_new_tokens=12, do_sample=False)
        assert replays(both.report)
        cache = next(value for value in both.fast.values() if isinstance(value, DynamicCache))
        before = copy.deepcopy(cache)
        model.generate(**padded(10, 10, seed=5), max_new_tokens=12, do_sample=False)
        assert_equal_caches(before, cache, tolerance=0)


@pytest.mark.parametrize("name", ("Qwen3Next", "FalconH1"))
def test_the_states_of_a_callers_cache_are_continued(name):
    model, inputs = model_of(name), padded(10, 10)

    def call() -> Any:
        cache = DynamicCache(config=model.config)
        torch.manual_seed(3)
        first = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=4, do_sample=False)
        mask = torch.ones_like(first)
        return model.generate(first, attention_mask=mask, **{CACHE: cache}, max_new_tokens=12, do_sample=False)

    with capturing():
        with fastgen.disabled():
            expected = call()
        assert torch.equal(call(), expected)
        assert replays(fastgen.explain())


def test_states_are_restored_before_a_loop_starts_again():
    """The library's loop runs after an error of fastgen's, from the caller's states before the call."""
    model, inputs = model_of("Qwen3Next"), padded(10, 10)

    def call() -> Any:
        cache = DynamicCache(config=model.config)
        with fastgen.disabled():
            first = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=4, do_sample=False)
        mask = torch.ones_like(first)
        return model.generate(first, attention_mask=mask, **{CACHE: cache}, max_new_tokens=12, do_sample=False)

    with fastgen.disabled():
        expected = call()
    with capturing(), broken("decode step", TypeError("ours"), after=6), errors_noted() as errors:
        assert torch.equal(call(), expected)
    assert len(errors) == 1 and "ours" in errors[0]


def test_graphs_with_states_serve_later_calls():
    model = model_of("Qwen3Next")
    with capturing():
        for seed in (1, 2, 3):
            inputs = padded(12, 9, seed=seed)
            report = assert_same(model, inputs, max_new_tokens=12, num_beams=2, do_sample=False, output_logits=False)
        assert replays(report) > 8
