"""Finished inputs, samples and rows leave the batch; outputs and random numbers stay those of the library."""

from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import tiny_models
import torch
from copied_text import Noting
from hooks import broken, errors_noted, limits, replaced, watched
from parity import run_both, same_tokens
from reports import LEFT, PREFILL, capturing
from tiny_models import tiny, token_ids
from transformers import LogitsProcessor

import fastgen
from fastgen.optimizer.decoding.call import current_call
from fastgen.optimizer.decoding.report import COMPACTION, LOOP
from fastgen.optimizer.transformers import token_loop

ENDS = {"eos_token_id": list(range(3, 90, 6)), "max_new_tokens": 30, "do_sample": False}
SAMPLES = ENDS | {"do_sample": True, "num_return_sequences": 8}
WAYS = pytest.mark.parametrize("num_beams", (1, 3), ids=("greedy", "beams"))

pytestmark = pytest.mark.usefixtures("share_always")


def inputs_of(name: str, seed: int = 1) -> dict[str, torch.Tensor]:
    return tiny_models.inputs_of(name, *(Random(seed).randint(2, 7) for _ in range(5)), seed=seed)


@WAYS
def test_steps_have_fewer_rows_after_inputs_finish(num_beams):
    with watched("decode step") as steps:
        tiny("llama").generate(**inputs_of("llama"), **ENDS, num_beams=num_beams)
    rows = [len(step.result) for step in steps]
    assert rows[0] == 5 * num_beams and rows[-1] < rows[0] and rows == sorted(rows, reverse=True)


def test_each_input_has_as_many_samples_as_any_has_left():
    rows = []

    def counted(compact: Callable, step: Any, batch_index: torch.Tensor, rows_left: torch.Tensor) -> None:
        compact(step, batch_index, rows_left)
        rows.append((step.rows, step.rows_per_input, len(batch_index)))

    with replaced("compact a step", counted):
        same_tokens(tiny("llama"), inputs_of("llama"), **SAMPLES)
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
        same_tokens(tiny("llama"), inputs_of("llama"), **arguments, pad_token_id=0)
    assert len(draws) > 20


def test_samples_stay_if_torch_draws_in_another_way():
    with replaced("draw as torch", lambda original, device: False):
        assert LEFT not in same_tokens(tiny("llama"), inputs_of("llama"), **SAMPLES).shared


@pytest.mark.parametrize("number", (torch.nan, torch.inf))
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_that_is_not_finite_raises_the_librarys_error(name, number):
    model, states = tiny(name), []
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
    """A processor that forbids each row another token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[torch.arange(len(scores)), torch.arange(len(scores)) + 30] = -torch.inf
        return scores


@WAYS
@pytest.mark.parametrize(("coupled_by", "code"), (("processor", "PROCESSOR_BY_ROW"), ("products", "ROWS_COUPLED")))
def test_a_row_that_others_depend_on_stays(coupled_by, code, num_beams):
    """A processor of user code may count rows, and products may scale all rows alike."""
    model, arguments = tiny("llama"), ENDS | {"num_beams": num_beams}
    if coupled_by == "processor":
        arguments["logits_processor"] = [ByPlace()]
    else:
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    report = same_tokens(model, inputs_of("llama"), **arguments)
    assert LEFT not in report.shared and report.codes(COMPACTION) == {code}
    assert coupled_by == "products" or "ByPlace" in str(report)


def test_a_streamer_gets_the_tokens_of_all_rows():
    model, inputs, notes = tiny("llama"), inputs_of("llama"), []

    def call() -> torch.Tensor:
        noting = Noting()
        notes.append(noting.calls)
        return model.generate(**inputs, **ENDS, streamer=noting)

    both = run_both(call)
    assert torch.equal(both.stock, both.fast) and both.report.codes(COMPACTION) == {"STREAMER"}
    stock, fast = ([tokens.tolist() for tokens, _ in calls] for calls in notes)
    assert stock == fast


def test_repeated_rows_of_a_caller_leave_together():
    report = same_tokens(tiny("llama"), {"input_ids": token_ids(4, 5).repeat_interleave(3, dim=0)}, **ENDS)
    assert {LEFT, PREFILL} <= set(report.shared)


@pytest.mark.parametrize(
    ("others", "codes"),
    [
        ({"return_dict_in_generate": True, "output_attentions": True}, {"OUTPUTS"}),
        ({"num_beams": 1}, set()),
        ({"num_beams": 1, "return_dict_in_generate": True}, set()),
    ],
)
def test_one_row_and_further_outputs_stay_with_the_library(others, codes):
    model = tiny("gpt2")
    arguments = {**ENDS, "num_beams": 3, **others}
    input_ids = token_ids(4 if arguments["num_beams"] > 1 else 1, 5)
    with capturing("off"), watched("decode step") as steps:
        report = run_both(lambda: model.generate(input_ids, **arguments)).report
    assert not steps and report.codes(LOOP) == codes


@WAYS
def test_after_an_error_of_a_leaving_input_the_library_restarts(num_beams):
    model, arguments = tiny("llama"), {**ENDS, "num_beams": num_beams}
    if num_beams > 1:
        arguments["early_stopping"] = True
    # The first input leaves while caches are full of keys.
    with broken("compact a step's cache", TypeError("ours")), errors_noted() as errors:
        report = same_tokens(model, inputs_of("llama"), **arguments)
    assert not report.shared and "ERROR" in report.codes() and errors == ["ours"]


@pytest.mark.parametrize("owner", ["model", "class"])
def test_a_replaced_method_of_the_librarys_loop_is_called(monkeypatch, owner):
    model, called = tiny("bart"), []
    update = model._update_finished_beams
    for expected in (0, 1):
        model.generate(**inputs_of("bart"), **ENDS, num_beams=3)
        assert bool(called) == expected
        replaced = model if owner == "model" else type(model)
        monkeypatch.setattr(replaced, "_update_finished_beams", lambda *_, **more: called.append(1) or update(**more))


def test_a_model_that_reorders_its_cache_itself_gets_it():
    model, moved = tiny("gpt2"), set()

    def reorder(cache, beam_idx):
        moved.add((beam_idx.shape[0], current_call() is not None))
        cache.reorder_cache(beam_idx)
        return cache

    model._reorder_cache = reorder
    assert LEFT not in same_tokens(model, inputs_of("gpt2"), **ENDS, num_beams=3).shared
    assert moved == {(15, False), (15, True)}  # by the library's loop, and by fastgen's


def test_scores_that_become_nan_restart_with_all_inputs():
    model, restarts = tiny("bart"), 0
    model.model.decoder.embed_positions.weight.data[10] = torch.nan
    for seed in range(6):
        report = same_tokens(model, inputs_of("bart", seed), **ENDS | {"max_new_tokens": 20}, num_beams=3)
        restarts += "NAN" in report.codes()
    assert restarts


def test_an_ended_row_without_tokens_raises_the_librarys_error():
    model, others = tiny("llama"), [token for token in range(99) if token != 7]
    input_ids = torch.tensor([others, [5] * len(others), [6] * len(others)])
    arguments = {"do_sample": True, "no_repeat_ngram_size": 1, "eos_token_id": 7, "max_new_tokens": 20}
    for context in (fastgen.disabled(), nullcontext()):
        with context, pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(input_ids, **arguments, attention_mask=torch.ones_like(input_ids))
