"""The caller's cache is used by captured steps and shared prompts, and left as the library leaves it."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from copied_text import Forced, copying
from hooks import broken, costs, errors_noted
from parity import assert_equal_caches, assert_equal_outputs, outcome, run_both
from reports import CROSS, LEFT, PREFILL, PROMPT, capturing, replays
from tiny_models import inputs_of, tiny, token_ids
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor, StoppingCriteria

import fastgen
from fastgen.optimizer.decoding.report import COMPACTION, LOOP, STEPS
from fastgen.optimizer.decoding.report import PREFILL as OF_PREFILL
from fastgen.optimizer.transformers.checks import CallChecks
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN

NEW = {"max_new_tokens": 26, "do_sample": False}
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
}
WAYS = pytest.mark.parametrize("way", DECODING)
GRAPHS = pytest.mark.parametrize("cuda_graphs", ("off", "on"))
FILLED = 5  # of the prompt's tokens

pytestmark = pytest.mark.usefixtures("share_always")


def rows_of(way: str) -> int:
    """Returns the number of rows of an input."""
    return DECODING[way].get("num_beams", DECODING[way].get("num_return_sequences", 1))


def filled_cache(model: Any, prompt: torch.Tensor, rows_per_input: int) -> DynamicCache:
    """Returns a cache with the first tokens of the prompt, for all rows of each input."""
    cache = DynamicCache(config=model.config)
    with fastgen.disabled(), torch.no_grad():
        model(prompt[:, :FILLED].repeat_interleave(rows_per_input, dim=0), past_key_values=cache, use_cache=True)
    return cache


def both_with(model: Any, prompt: torch.Tensor, cache: Any, **arguments: Any) -> Any:
    """Generates with copies of this cache, without and with fastgen, and compares outputs and caches."""
    caches = []

    def call() -> Any:
        caches.append(copy.deepcopy(cache))
        return outcome(lambda: model.generate(prompt, past_key_values=caches[-1], **NEW | arguments))

    both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert_equal_caches(*caches, 1e-4)
    return both


@WAYS
@GRAPHS
@pytest.mark.parametrize(("name", "inputs"), [("llama", 1), ("llama", 2), ("gpt2", 2), ("mistral", 2)])
def test_a_conversation_continues(name, way, cuda_graphs, inputs):
    model, prompt = tiny(name), token_ids(inputs, 9)
    arguments = DECODING[way]
    rows_per_input = rows_of(way)
    cache = filled_cache(model, prompt, rows_per_input)
    with capturing(cuda_graphs):
        for _ in range(2):
            report = both_with(model, prompt, cache, **arguments).report
    assert not report.codes(LOOP) or (way == "greedy" and cuda_graphs == "off")
    assert bool(replays(report)) == (cuda_graphs == "on" and LAYERS_ARE_KNOWN)
    assert ({PREFILL, PROMPT} <= {text.partition(", 2 layers")[0] for text in report.shared}) == (way != "greedy")


@WAYS
@GRAPHS
@pytest.mark.parametrize("name", ("llama", "bart", "t5"))
def test_an_empty_cache_is_filled(name, way, cuda_graphs):
    model, prompt = tiny(name), token_ids(2, 9)
    cache = DynamicCache(config=model.config)
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
    with capturing(cuda_graphs):
        report = both_with(model, prompt, cache, **DECODING[way]).report
    assert bool(replays(report)) == (cuda_graphs == "on" and LAYERS_ARE_KNOWN)
    assert (CROSS in str(report)) == (model.config.is_encoder_decoder and way != "greedy")


@pytest.mark.parametrize("way", ("samples", "beams"))
def test_rows_with_other_keys_are_not_merged(way):
    model, prompt = tiny("llama"), token_ids(2, 9)
    cache = filled_cache(model, token_ids(6, 9, seed=5), 1)
    report = both_with(model, prompt, cache, **DECODING[way]).report
    assert "ROWS_DIFFER" in report.codes(OF_PREFILL) and not report.shared


def test_a_cache_of_other_rows_raises_the_librarys_error():
    model, prompt = tiny("llama"), token_ids(2, 9)
    stock, fast, _ = both_with(model, prompt, filled_cache(model, prompt, 2), num_beams=3)
    assert stock == fast and isinstance(stock, tuple)


@WAYS
@GRAPHS
def test_two_turns_of_a_chat(way, cuda_graphs):
    model, prompt = tiny("llama"), token_ids(1, 9)
    arguments = NEW | DECODING[way]
    rows = rows_of(way)

    def turns() -> Any:
        cache = DynamicCache(config=model.config)
        first = model.generate(prompt, past_key_values=cache, **arguments)
        more = torch.cat([first[:1], token_ids(1, 4, seed=9)], dim=1)
        cache.crop(-2)
        second = model.generate(more.repeat(rows, 1), past_key_values=cache, **NEW)
        return first, second, cache

    with capturing(cuda_graphs):
        both = run_both(turns)
    assert_equal_outputs(both.stock, both.fast)


class Failing(LogitsProcessor):
    """Raises an error after a number of steps."""

    def __init__(self, after: int = 3) -> None:
        self.after, self.calls = after, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.after:
            raise ZeroDivisionError("theirs")
        return scores


@WAYS
@GRAPHS
def test_after_an_error_of_the_program_the_cache_is_as_there(way, cuda_graphs):
    model, prompt = tiny("llama"), token_ids(2, 9)
    rows_per_input = rows_of(way)
    caches = []
    for without in (True, False):
        caches.append(filled_cache(model, prompt, rows_per_input))
        arguments = NEW | DECODING[way] | {"logits_processor": [Failing()]}
        torch.manual_seed(0)
        patches = fastgen.disabled() if without else fastgen.enabled()
        with capturing(cuda_graphs), patches, pytest.raises(ZeroDivisionError, match="theirs"):
            model.generate(prompt, past_key_values=caches[-1], **arguments)
    assert_equal_caches(*caches, 1e-4)


@pytest.mark.parametrize("part", ("decode step", "expand a prefill"))
def test_after_an_error_of_fastgen_the_library_continues_from_it(part):
    model, prompt = tiny("llama"), token_ids(2, 9)
    cache = filled_cache(model, prompt, 3)
    with capturing("on"), broken(part, TypeError("ours")), errors_noted() as errors:
        both_with(model, prompt, cache, num_beams=3)
    assert errors


class Reading(StoppingCriteria):
    """Notes what the cache holds at each step."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.notes: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.notes.append((int(self.cache.get_seq_length()), [layer.keys + 0 for layer in self.cache.layers]))
        return torch.zeros(len(input_ids), dtype=torch.bool)


@WAYS
def test_a_criterion_may_read_the_cache(way):
    model, prompt = tiny("llama"), token_ids(2, 9)
    rows_per_input = rows_of(way)
    notes = []

    def call() -> Any:
        cache = filled_cache(model, prompt, rows_per_input)
        notes.append(Reading(cache))
        return model.generate(prompt, past_key_values=cache, **NEW | DECODING[way], stopping_criteria=[notes[-1]])

    with capturing("on"):
        both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert_equal_outputs(notes[0].notes, notes[1].notes)
    assert "USER_CACHE" in both.report.codes(STEPS)


@pytest.mark.skipif(not LAYERS_ARE_KNOWN, reason="no drafts in this version of transformers")
@GRAPHS
@pytest.mark.parametrize("fails", (False, True), ids=("ends", "fails"))
def test_drafts_leave_exactly_what_counts(cuda_graphs, fails):
    """After an end within a draft and after an error of the program; keys are in one piece, as the library's."""
    model, prompt = tiny("llama"), token_ids(1, 30)
    caches = []

    def call() -> Any:
        caches.append(DynamicCache(config=model.config))
        forces = Forced(copying(prompt, 40), 30)
        arguments = {"max_new_tokens": 25, "eos_token_id": None, "logits_processor": [forces]}
        if fails:
            arguments["logits_processor"] = [forces, Failing(after=17)]
        return outcome(lambda: model.generate(prompt, past_key_values=caches[-1], **arguments))

    processors_of_the_library = mock.patch.object(CallChecks, "runs_user_code", False)
    with capturing(cuda_graphs, drafts="auto"), costs(min_computed=0.0), processors_of_the_library:
        both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert_equal_caches(*caches, 1e-4)
    assert both.report.drafted or fails
    for layer in caches[-1].layers:
        assert layer.keys.is_contiguous() and layer.values.is_contiguous()


@WAYS
@GRAPHS
def test_layers_stay_the_same_objects(way, cuda_graphs):
    """A program may hold the list, a layer, or a shallow copy of the cache."""
    model, prompt = tiny("llama"), token_ids(2, 9)
    rows_per_input = rows_of(way)

    def call() -> Any:
        cache = filled_cache(model, prompt, rows_per_input)
        layers, first, shallow = cache.layers, cache.layers[0], copy.copy(cache)
        model.generate(prompt, past_key_values=cache, **NEW | DECODING[way])
        assert cache.layers is layers and cache.layers[0] is first
        return first.keys, layers[1].values, shallow

    with capturing(cuda_graphs):
        both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)


def test_a_filled_cache_of_cross_attention_is_noticed():
    model, prompt = tiny("bart"), token_ids(2, 9)
    rows = prompt.repeat_interleave(3, dim=0)
    with torch.no_grad():
        filled = model(input_ids=rows, decoder_input_ids=torch.full((6, 1), 2), use_cache=True).past_key_values

    def call() -> Any:
        cross = copy.deepcopy(filled.cross_attention_cache)
        cache = EncoderDecoderCache(DynamicCache(config=model.config), cross)
        return outcome(lambda: model.generate(prompt, past_key_values=cache, **NEW, num_beams=3))

    both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)


class OwnCache:
    """A cache of a program, without layers."""

    def get_seq_length(self) -> int:
        return 0


def test_a_cache_of_another_kind_raises_the_librarys_error():
    model = tiny("llama")
    both = run_both(lambda: outcome(lambda: model.generate(token_ids(1, 5), past_key_values=OwnCache(), **NEW)))
    assert both.stock == both.fast


@pytest.mark.parametrize("way", ("samples", "beams"))
def test_no_row_leaves_the_callers_cache(way):
    model, inputs = tiny("llama"), inputs_of("llama", 6, 3, 5, 7)
    arguments = DECODING[way] | {"eos_token_id": list(range(3, 90, 6)), "early_stopping": way == "beams"}
    cache = DynamicCache(config=model.config)
    report = both_with(model, inputs["input_ids"], cache, attention_mask=inputs["attention_mask"], **arguments).report
    assert LEFT not in report.shared and report.codes(COMPACTION) <= {"USER_CACHE"}
