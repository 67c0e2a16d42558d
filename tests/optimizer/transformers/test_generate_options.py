"""Every option of `generate` gives what the unpatched library gives, and `explain()` says what was shared."""

from __future__ import annotations

import pytest
import torch
from architectures import VOCABULARY
from parity import (
    BEAMS,
    CROSS,
    PREFILL,
    PROMPT,
    SAMPLES,
    assert_equal_outputs,
    assert_same,
    compared,
    is_shared,
    left_alone_because,
    padded,
    run_both,
    tiny,
    token_ids,
    whisper,
)
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.optimizer.decoding.report import KV_CACHE

NAMES = ("llama", "gpt2", "bart", "t5")


@pytest.fixture(scope="module")
def models():
    kinds = {"bart": "seq2seq", "t5": "seq2seq"}
    return {name: tiny(name, kinds.get(name, "causal")) for name in NAMES}


pytestmark = pytest.mark.usefixtures("share_always")


def what_is_shared(name: str) -> tuple[str, ...]:
    return (PROMPT,) if name in ("llama", "gpt2") else (PROMPT, CROSS)


OPTIONS = {
    "beams, one returned": {"num_beams": 4},
    "early_stopping": BEAMS | {"early_stopping": True},
    "early_stopping never": BEAMS | {"early_stopping": "never", "length_penalty": 2.0},
    "length_penalty": BEAMS | {"length_penalty": -1.0, "early_stopping": False},
    "no_repeat_ngram_size": BEAMS | {"no_repeat_ngram_size": 2},
    "repetition_penalty": BEAMS | {"repetition_penalty": 1.7},
    "bad_words_ids": BEAMS | {"bad_words_ids": [[7], [11, 12]], "suppress_tokens": [20, 21]},
    "min_new_tokens": BEAMS | {"min_new_tokens": 6},
    "sequence_bias": BEAMS | {"sequence_bias": [[[31], 4.0]]},
    "prefix_allowed_tokens_fn": BEAMS
    | {"prefix_allowed_tokens_fn": lambda batch, ids: [2, 30 + batch, *range(40, 60)]},
    "forced_eos_token_id": BEAMS | {"forced_eos_token_id": 2},
    "max_length": BEAMS | {"max_new_tokens": None, "max_length": 14},
    "beam samples": BEAMS | {"do_sample": True, "temperature": 1.3},
    "samples": SAMPLES,
    "top_k": SAMPLES | {"top_k": 5, "temperature": 0.7},
    "top_p": SAMPLES | {"top_p": 0.8, "top_k": 0, "min_p": 0.01},
    "typical_p": SAMPLES | {"typical_p": 0.6, "epsilon_cutoff": 0.001},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_option_gives_the_same_from_shared_caches(models, name, options):
    inputs = padded(9, 5, side="left" if name in ("llama", "gpt2") else "right")
    report = assert_same(models[name], inputs, **{"max_new_tokens": 7} | options)
    assert is_shared(report, *what_is_shared(name)), report


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("mask", (True, False), ids=("mask", "no mask"))
def test_padding_on_either_side_with_and_without_mask(models, name, side, mask):
    inputs = padded(4, 9, 1, side=side)
    if not mask:
        del inputs["attention_mask"]
    for arguments in (BEAMS, SAMPLES):
        assert is_shared(assert_same(models[name], inputs, **arguments), *what_is_shared(name))


@pytest.mark.parametrize("name", NAMES)
def test_short_prompt_is_computed_once_and_repeated(models, name, repeated):
    for arguments in (BEAMS, SAMPLES):
        report = assert_same(models[name], padded(9, 5), **arguments)
        assert report.shared == ["prefill: one row per input"]
        assert "FEW_KEYS" in report.codes(KV_CACHE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", ({}, {"do_sample": True}), ids=("greedy", "sample"))
def test_one_sequence_for_each_input_is_left_alone(models, name, arguments):
    report = assert_same(models[name], padded(9, 5), max_new_tokens=5, **arguments)
    assert left_alone_because(report, "ONE_ROW_PER_INPUT")


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_the_caller_has_repeated_are_shared(models, name):
    repeated = {key: value.repeat_interleave(3, dim=0) for key, value in padded(9, 5).items()}
    report = assert_same(models[name], repeated, max_new_tokens=7, do_sample=True)
    assert is_shared(report, *what_is_shared(name)) and report.inputs == 2
    repeated["input_ids"][:, -1] = torch.arange(10, 16)
    assert left_alone_because(assert_same(models[name], repeated, max_new_tokens=7), "ONE_ROW_PER_INPUT")


@pytest.mark.parametrize("name", ("bart", "t5"))
def test_encoder_no_repeat_ngram_size(models, name):
    assert is_shared(assert_same(models[name], padded(9, 5), **BEAMS, encoder_no_repeat_ngram_size=1), CROSS)


@pytest.mark.parametrize("name", ("bart", "t5"))
def test_decoder_prompt_of_several_tokens_with_and_without_its_mask(models, name):
    inputs = padded(9, 5, side="right") | {"decoder_input_ids": token_ids(2, 4, seed=3)}
    assert is_shared(assert_same(models[name], inputs, **BEAMS), PROMPT, CROSS)
    inputs["decoder_attention_mask"] = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for arguments in (BEAMS, SAMPLES):
        assert is_shared(assert_same(models[name], inputs, **arguments), PROMPT, CROSS)


@pytest.mark.parametrize("name", ("mbart", "m2m_100"))
def test_forced_language_token(name):
    model = tiny(name, "seq2seq")
    both = compared(model, padded(9, 5, side="right"), **BEAMS, forced_bos_token_id=42)
    assert is_shared(both.report, PROMPT, CROSS)
    assert (both.fast.sequences[:, 1] == 42).all()


@pytest.mark.parametrize("name", NAMES)
def test_attentions_and_hidden_states(models, name):
    models[name].set_attn_implementation("eager")
    try:
        for arguments in (BEAMS, SAMPLES):
            everything = {"output_attentions": True, "output_hidden_states": True}
            report = assert_same(models[name], padded(9, 5, side="right"), **arguments, **everything)
            assert is_shared(report, *what_is_shared(name))
            assert report.kernels["matmul"]
    finally:
        models[name].set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_chunked_prefill(models, name):
    for arguments in (BEAMS, SAMPLES):
        assert is_shared(assert_same(models[name], padded(9, 5), **arguments, prefill_chunk_size=4), PROMPT)


@pytest.mark.parametrize("inputs", (1, 3))
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES, {"max_new_tokens": 7}), ids=("beams", "samples", "greedy"))
def test_chunked_prefill_raises_the_error_of_the_library(inputs, arguments):
    """Whisper's steps cannot go on from it."""
    model, features = whisper(), torch.randn(inputs, 8, 40)

    def call():
        with pytest.raises(TypeError) as raised:
            model.generate(features, decoder_input_ids=token_ids(inputs, 4), **arguments, prefill_chunk_size=2)
        return str(raised.value)

    both = run_both(call)
    assert both.stock == both.fast


@pytest.mark.parametrize("name", NAMES)
def test_without_cache_only_the_first_step_is_computed_once(models, name):
    for arguments in (BEAMS, SAMPLES):
        report = assert_same(models[name], padded(9, 5), **arguments, use_cache=False)
        assert report.shared == [PREFILL] and not report.kernels


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_guidance_keeps_its_own_cache(models, name):
    arguments = {"guidance_scale": 1.6, "negative_prompt_ids": token_ids(6, 4, seed=8)}
    assert is_shared(assert_same(models[name], padded(9, 5), **BEAMS, **arguments), PROMPT)


def test_prompt_lookup_is_left_alone(models):
    inputs = {"input_ids": token_ids(1, 4).repeat(1, 4)}
    report = assert_same(models["llama"], inputs, prompt_lookup_num_tokens=3, max_new_tokens=9)
    assert left_alone_because(report, "NO_PREFILL")


def test_assisted_decoding_is_left_alone(models):
    both = compared(models["llama"], {"input_ids": token_ids(1, 6)}, assistant_model=tiny("llama"), max_new_tokens=9)
    assert left_alone_because(both.report, "NO_PREFILL")


@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
@pytest.mark.parametrize("length", (6, 13, 20), ids="{} tokens".format)
@pytest.mark.parametrize("weight", ("q_proj", "k_proj"))
@pytest.mark.parametrize("attention", ("sdpa", "eager"))
@pytest.mark.parametrize("name", ("llama", "bart"))
def test_weights_of_attention_that_are_no_numbers_give_what_the_library_gives(
    name, attention, weight, length, arguments
):
    model = tiny(name, "seq2seq" if name == "bart" else "causal")
    model.set_attn_implementation(attention)
    for parameter_name, parameter in model.named_parameters():
        if weight in parameter_name:
            torch.nn.init.constant_(parameter, torch.nan)

    def call():
        try:
            outputs = model.generate(
                token_ids(2, length), **arguments, return_dict_in_generate=True, output_logits=True
            )
            return outputs.logits, outputs.sequences, model.generate(token_ids(2, length), **arguments)
        except RuntimeError as error:  # there is nothing to draw from
            return str(error)

    both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)


class RecordingStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


class StatefulProcessor(LogitsProcessor):
    def __init__(self) -> None:
        self.calls: list = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        bias = torch.zeros(VOCABULARY)
        bias[len(self.calls) % VOCABULARY] = 5.0
        return scores + bias


class StatefulCriterion(StoppingCriteria):
    def __init__(self) -> None:
        self.calls: list = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), len(scores) if scores is not None else None, sorted(kwargs)))
        return torch.full((input_ids.shape[0],), len(self.calls) >= 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES), ids=("beams", "samples"))
def test_own_processor_and_criterion_are_called_alike(models, name, arguments):
    used = []

    def call():
        used.append((StatefulProcessor(), StatefulCriterion()))
        processor, criterion = used[-1]
        own = {"logits_processor": [processor], "stopping_criteria": [criterion]}
        return models[name].generate(**padded(9, 5), **arguments, **own)

    both = run_both(call)
    assert torch.equal(both.stock, both.fast)
    assert is_shared(both.report, *what_is_shared(name))
    (stock_processor, stock_criterion), (processor, criterion) = used
    assert processor.calls == stock_processor.calls and len(processor.calls) == 4
    assert criterion.calls == stock_criterion.calls


class WritingProcessor(LogitsProcessor):
    """Writes into `input_ids` in one step of its call, and notes what it was given in each."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.clone())
        if len(self.seen) == self.step:
            input_ids[:, 1::2] = 50 + torch.arange(len(input_ids))[:, None]
        return scores


@pytest.mark.parametrize("step", (1, 2, 4))
@pytest.mark.parametrize(
    "arguments", (BEAMS, SAMPLES, {"num_beams": 1, "max_new_tokens": 7}), ids=("beams", "samples", "greedy")
)
@pytest.mark.parametrize("penalty", (1.0, 1.7), ids=("alone", "before a processor that reads"))
@pytest.mark.parametrize("name", NAMES)
def test_processor_that_writes_into_input_ids_gives_the_tokens_of_the_library(models, name, penalty, arguments, step):
    def call():
        processor, input_ids = WritingProcessor(step), token_ids(2, 6)
        options = {"logits_processor": [processor], "repetition_penalty": penalty, "no_repeat_ngram_size": 2}
        return models[name].generate(input_ids, **arguments, **options), input_ids, processor.seen

    (stock, stock_prompt, stock_seen), (fast, prompt, seen), _ = run_both(call)
    assert torch.equal(stock, fast) and torch.equal(stock_prompt, prompt)
    assert len(stock_seen) == len(seen) and all(map(torch.equal, stock_seen, seen))


def test_streamer_gets_the_same_tokens(models):
    used = []

    def call():
        used.append(RecordingStreamer())
        return models["llama"].generate(**padded(9), do_sample=True, max_new_tokens=6, streamer=used[-1])

    both = run_both(call)
    assert left_alone_because(both.report, "ONE_ROW_PER_INPUT")
    assert used[0].calls == used[1].calls and used[1].calls[-1] == "end"


@pytest.mark.parametrize("name", NAMES)
def test_error_of_a_processor_comes_through_and_the_next_call_works(models, name):
    error = LookupError("from the processor")

    def fail(input_ids, scores):
        raise error

    with pytest.raises(LookupError) as caught:
        models[name].generate(**padded(9, 5), **BEAMS, logits_processor=[fail])
    assert caught.value is error
    states = {state.state for state in fastgen.status() if state.name.startswith("transformers.")}
    assert states <= {"applied", "pending"}  # pending: of models that nobody has imported
    assert is_shared(assert_same(models[name], padded(9, 5), **BEAMS), *what_is_shared(name))
