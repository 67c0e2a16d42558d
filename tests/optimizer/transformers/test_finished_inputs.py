"""Finished inputs, samples and rows leave the batch; the outputs stay those of the library, with its random numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch
from capturing import capturing
from parity import padded, run_both, tiny, token_ids
from sharing import sharing
from transformers import LogitsProcessor

import fastgen
from fastgen.optimizer.decoding.call import current_call
from fastgen.optimizer.decoding.report import COMPACTION, LOOP
from fastgen.optimizer.transformers import token_loop
from fastgen.testing import broken, errors_noted, limits, replaced, watched

LEFT = "finished inputs: removed from the batch"
MODELS = ("bart", "t5", "marian", "gpt2", "llama", "gemma2", "bloom")
ENDS = {"eos_token_id": list(range(3, 90, 6)), "max_new_tokens": 30, "do_sample": False}


@pytest.fixture(autouse=True)
def _share():
    with sharing("always"):
        yield


def kind(name: str) -> str:
    return "seq2seq" if name in ("bart", "t5", "marian") else "causal"


def inputs_of(name: str, seed: int = 1) -> dict[str, torch.Tensor]:
    lengths = [Random(seed).randint(2, 7) for _ in range(5)]
    return padded(*lengths, side="left" if kind(name) == "causal" else "right", seed=seed)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_all_inputs_together(name, num_beams):
    model, left = tiny(name, kind(name)), 0
    for seed in range(6):
        stock, fast, report = run_both(
            lambda seed=seed: model.generate(**inputs_of(name, seed), **ENDS, num_beams=num_beams)
        )
        assert torch.equal(stock, fast)
        left += LEFT in report.shared
    assert left


@pytest.mark.parametrize("num_beams", [1, 3])
def test_steps_get_fewer_rows(num_beams):
    with watched("decode step") as steps:
        tiny("llama").generate(**inputs_of("llama"), **ENDS, num_beams=num_beams)
    rows = [len(step.result) for step in steps]
    assert rows[0] == 5 * num_beams and rows[-1] < rows[0] and rows == sorted(rows, reverse=True)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "early_stopping": True},
        {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.0},
        {"num_beams": 4, "num_return_sequences": 4, "length_penalty": -1.0},
        {"num_beams": 2, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
        {"num_beams": 3, "repetition_penalty": 1.4},  # which knows the padding of each row
        {"repetition_penalty": 1.4, "bad_words_ids": [[7], [11, 12]]},
        {"no_repeat_ngram_size": 1, "suppress_tokens": [20, 21]},
        {"num_beams": 3, "forced_eos_token_id": 5, "exponential_decay_length_penalty": (3, 1.2)},
    ],
)
@pytest.mark.parametrize("name", ["bart", "llama"])
def test_options(name, options):
    model, left = tiny(name, kind(name)), 0
    for seed in range(5):
        stock, fast, report = run_both(lambda seed=seed: model.generate(**inputs_of(name, seed), **ENDS, **options))
        assert torch.equal(stock, fast)
        left += LEFT in report.shared
    assert left


SAMPLES = (
    {"num_return_sequences": 4},
    {"num_return_sequences": 4, "temperature": 1.4, "top_p": 0.9},
    {"num_return_sequences": 3, "repetition_penalty": 1.4, "top_k": 0},
    {"num_return_sequences": 1},
)


@pytest.mark.parametrize("options", SAMPLES, ids=str)
@pytest.mark.parametrize("name", ["bart", "llama", "gemma2"])
@pytest.mark.parametrize("captures", (False, True), ids=("eager", "captured"))
def test_samples_leave_one_by_one_and_a_seed_gives_the_same(name, options, captures):
    model, left = tiny(name, kind(name)), 0
    arguments = {**ENDS, "do_sample": True, "max_new_tokens": 40, **options}
    with capturing() if captures else capturing("off"):
        for seed in range(5):
            stock, fast, report = run_both(lambda seed=seed: model.generate(**inputs_of(name, seed), **arguments))
            assert torch.equal(stock, fast)
            left += LEFT in report.shared
    assert left


def test_steps_get_as_many_samples_of_each_input_as_one_has_left():
    rows = []

    def counted(compact: Callable, step: Any, batch_index: torch.Tensor, kept: torch.Tensor) -> None:
        compact(step, batch_index, kept)
        rows.append((step.rows, step.rows_per_input, len(batch_index)))

    with replaced("compact a step", counted):
        stock, fast, _ = run_both(
            lambda: tiny("llama").generate(**inputs_of("llama"), **ENDS | {"do_sample": True}, num_return_sequences=8)
        )
    assert torch.equal(stock, fast)
    assert rows and all(count == per_input * inputs for count, per_input, inputs in rows)
    assert any(per_input < 8 for _, per_input, _ in rows) and rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("most_bits", (1, 7000, 1 << 20))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_tokens_are_drawn_as_torch_draws_them(most_bits, dtype, monkeypatch):
    monkeypatch.setattr(token_loop, "MOST_BITS", most_bits)
    probs = (3 * torch.randn(9, 3000)).softmax(dim=-1).to(dtype)
    for index in (range(9), (0,), (8,), (1, 2, 5, 8), (3, 4)):
        rows = torch.tensor(index)
        torch.manual_seed(5)
        expected, state = torch.multinomial(probs, num_samples=1).squeeze(1), torch.get_rng_state()
        torch.manual_seed(5)
        assert torch.equal(token_loop._draw(probs[rows], 9, rows), expected[rows])
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("eos", (None, 2))
def test_large_vocabularies_are_drawn_from_on_all_threads(eos):
    arguments = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 30, "eos_token_id": eos}
    with capturing(), limits(min_elements_to_draw=0), watched("draw samples") as draws:
        stock, fast, _ = run_both(lambda: tiny("llama").generate(**inputs_of("llama"), **arguments, pad_token_id=0))
    assert torch.equal(stock, fast) and len(draws) > 20


def test_where_torch_draws_in_another_way_all_samples_stay():
    model = tiny("llama")
    arguments = {**ENDS, "do_sample": True, "num_return_sequences": 4}
    with replaced("draw as torch", lambda original: False):
        stock, fast, report = run_both(lambda: model.generate(**inputs_of("llama"), **arguments))
    assert torch.equal(stock, fast) and LEFT not in report.shared


def test_a_library_that_refuses_to_draw_raises_its_error_after_rows_have_left():
    model = tiny("llama")

    def refused(compact: Callable, loop: Any) -> None:
        compact(loop)
        if loop.finished:
            model.lm_head.weight.data[5] = torch.nan

    message = "probability tensor contains either `inf`, `nan` or element < 0"
    with replaced("compact samples", refused), pytest.raises(RuntimeError, match=message):
        model.generate(**inputs_of("llama"), **ENDS | {"do_sample": True}, num_return_sequences=8)


@pytest.mark.parametrize("number", (torch.nan, torch.inf))
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_that_is_not_finite_raises_the_librarys_error(name, number):
    model, states = tiny(name, kind(name)), []
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.get_input_embeddings().weight.data[model.generation_config.pad_token_id] = number
    arguments = {**ENDS, "do_sample": True, "num_return_sequences": 3}
    for context in (fastgen.disabled(), nullcontext()):
        torch.manual_seed(3)
        with context, pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(token_ids(1, 6), **arguments)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class ByPlace(LogitsProcessor):
    """Forbids each row another token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[torch.arange(len(scores)), torch.arange(len(scores)) + 30] = -torch.inf
        return scores


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_processor_of_the_program_keeps_all_rows(num_beams):
    model = tiny("gpt2")
    stock, fast, report = run_both(
        lambda: model.generate(**inputs_of("gpt2"), **ENDS, num_beams=num_beams, logits_processor=[ByPlace()])
    )
    assert torch.equal(stock, fast) and LEFT not in report.shared
    assert report.codes(COMPACTION) == {"PROCESSOR_BY_ROW"} and "ByPlace" in str(report)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_model_whose_products_scale_all_rows_alike_keeps_them(num_beams):
    model = torch.ao.quantization.quantize_dynamic(tiny("llama"), {torch.nn.Linear})
    stock, fast, report = run_both(lambda: model.generate(token_ids(6, 9), **ENDS, num_beams=num_beams))
    assert torch.equal(stock, fast) and LEFT not in report.shared
    assert report.codes(COMPACTION) == {"ROWS_COUPLED"}


def test_repeated_rows_of_a_caller_leave_together():
    model = tiny("llama")
    input_ids = token_ids(4, 5).repeat_interleave(3, dim=0)
    stock, fast, report = run_both(lambda: model.generate(input_ids, **ENDS))
    assert torch.equal(stock, fast) and {LEFT, "prefill: one row per input"} <= set(report.shared)


@pytest.mark.parametrize(
    ("others", "codes"),
    [
        ({"do_sample": True}, {"SAMPLED_BEAMS"}),
        ({"return_dict_in_generate": True}, {"RETURN_DICT"}),
        ({"num_beams": 1}, set()),
        ({"num_beams": 1, "return_dict_in_generate": True}, set()),
    ],
)
def test_one_row_and_what_returns_more_than_tokens_stay_with_the_library(others, codes):
    model = tiny("gpt2")
    arguments = {**ENDS, "num_beams": 3, **others}
    input_ids = token_ids(4 if arguments["num_beams"] > 1 else 1, 5)
    with capturing("off"), watched("decode step") as steps:
        report = run_both(lambda: model.generate(input_ids, **arguments)).report
    assert not steps and report.codes(LOOP) == codes


@pytest.mark.parametrize("num_beams", [1, 3])
def test_after_an_error_of_a_leaving_input_the_library_begins_anew(num_beams):
    model, arguments = tiny("llama"), {**ENDS, "num_beams": num_beams}
    if num_beams > 1:
        arguments["early_stopping"] = True
    # When the first input leaves, with caches full of keys.
    with broken("compact a step's cache", TypeError("ours")), errors_noted() as errors:
        stock, fast, report = run_both(lambda: model.generate(**inputs_of("llama"), **arguments))
    assert torch.equal(stock, fast) and LEFT in report.shared and errors == ["ours"]


@pytest.mark.parametrize("owner", ["model", "class"])
def test_a_method_of_the_librarys_loop_that_a_program_has_replaced_is_called(monkeypatch, owner):
    model, called = tiny("bart", "seq2seq"), []
    update = model._update_finished_beams
    for expected in (0, 1):
        model.generate(**inputs_of("bart"), **ENDS, num_beams=3)
        assert bool(called) == expected
        replaced = model if owner == "model" else type(model)
        monkeypatch.setattr(replaced, "_update_finished_beams", lambda *_, **given: called.append(1) or update(**given))


def test_a_model_that_moves_its_cache_itself_is_given_it():
    model, moved = tiny("gpt2"), set()

    def reorder(cache, beam_idx):
        moved.add((beam_idx.shape[0], current_call() is not None))
        cache.reorder_cache(beam_idx)
        return cache

    model._reorder_cache = reorder
    stock, fast, report = run_both(lambda: model.generate(**inputs_of("gpt2"), **ENDS, num_beams=3))
    assert torch.equal(stock, fast) and LEFT not in report.shared
    assert moved == {(15, False), (15, True)}  # by the library's loop, and by fastgen's


def test_all_of_a_search_are_left_in_their_places():
    """Of the inputs that left first the results stand where they belong."""
    model = tiny("llama")
    with watched("compact beams") as compactions:
        _, fast, _ = run_both(lambda: model.generate(**inputs_of("llama"), **ENDS, num_beams=2, early_stopping=True))
    assert len(fast) == 5 and len(compactions) > 1


def test_scores_that_become_nan_after_inputs_have_left_are_those_of_all_inputs_together():
    model, began_anew = tiny("bart", "seq2seq"), 0
    model.model.decoder.embed_positions.weight.data[10] = torch.nan
    for seed in range(6):
        arguments = {**inputs_of("bart", seed), **ENDS, "max_new_tokens": 20, "num_beams": 3}
        stock, fast, report = run_both(lambda arguments=arguments: model.generate(**arguments))
        assert torch.equal(stock, fast)
        began_anew += "NAN" in report.codes()
    assert began_anew


def test_a_row_that_has_ended_and_has_no_token_left_raises_the_librarys_error():
    model, others = tiny("llama"), [token for token in range(99) if token != 7]
    input_ids = torch.tensor([others, [5] * len(others), [6] * len(others)])
    arguments = {"do_sample": True, "no_repeat_ngram_size": 1, "eos_token_id": 7, "max_new_tokens": 20}
    for context in (fastgen.disabled(), nullcontext()):
        with context, pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(input_ids, **arguments, attention_mask=torch.ones_like(input_ids))
