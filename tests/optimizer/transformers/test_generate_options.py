"""The matrix of architectures and options of `generate`: each agrees with the unpatched library.

Each case runs three ways: with all outputs from shared caches, and with tokens only in eager and in captured steps,
which finished inputs leave. What is peculiar to an option follows below the matrix.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import VOCABULARY
from parity import assert_equal_outputs, assert_same, compared, outcome, run_both, same_tokens
from reports import CROSS, LEFT, PREFILL, PROMPT, capturing, is_shared, left_alone_because, replays
from tiny_models import BEAMS, BOTH, GREEDY, SAMPLES, inputs_of, padded, tiny, token_ids, unchanged
from transformers.generation.streamers import BaseStreamer

import fastgen
from fastgen.optimizer.decoding.report import Report
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN

pytestmark = pytest.mark.usefixtures("share_always")

NAMES = ("llama", "gpt2", "bart", "t5")
ENDS = {"eos_token_id": list(range(3, 90, 6)), "max_new_tokens": 30}
SAMPLE = {"do_sample": True}
ONE_ROW = {"do_sample": False}

# The ways of decoding, with which every architecture runs.
DECODING: dict[str, dict[str, Any]] = {
    "greedy": ONE_ROW,
    "sample": SAMPLE,
    "beams": BEAMS,
    "early_stopping": BEAMS | {"early_stopping": True},
    "samples": SAMPLES,
    "beam samples": BEAMS | SAMPLE | {"temperature": 1.3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    **DECODING,
    "beams, one returned": {"num_beams": 4},
    "early_stopping never": BEAMS | {"early_stopping": "never", "length_penalty": 2.0},
    "early_stopping never, no length_penalty": BEAMS | {"early_stopping": "never", "length_penalty": 0.0},
    "length_penalty": BEAMS | {"length_penalty": -1.0, "early_stopping": False},
    "no_repeat_ngram_size": BEAMS | {"no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "no_repeat_ngram_size 1": ONE_ROW | {"no_repeat_ngram_size": 1, "suppress_tokens": [20, 21]},
    "repetition_penalty": BEAMS | {"repetition_penalty": 1.7},  # which knows the padding of each row
    "repetition_penalty, greedy": ONE_ROW | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 1},
    "repetition_penalty, samples": SAMPLES | {"repetition_penalty": 1.4, "top_k": 0},
    "bad_words_ids": BEAMS | {"bad_words_ids": [[7], [11, 12]], "suppress_tokens": [20, 21]},
    "bad_words_ids, greedy": ONE_ROW | {"bad_words_ids": [[7], [11, 12]], "repetition_penalty": 1.4},
    "min_new_tokens": BEAMS | {"min_new_tokens": 6},
    "min_length": ONE_ROW | {"min_length": 10},
    "sequence_bias": BEAMS | {"sequence_bias": [[[31], 4.0]]},
    "prefix_allowed_tokens_fn": BEAMS
    | {"prefix_allowed_tokens_fn": lambda batch, ids: [2, 30 + batch, *range(40, 60)]},
    "forced_eos_token_id": BEAMS | {"forced_eos_token_id": 2, "exponential_decay_length_penalty": (3, 1.2)},
    "max_length": BEAMS | {"max_new_tokens": None, "max_length": 14},
    "top_k": SAMPLES | {"top_k": 5, "temperature": 0.7},
    "top_p": SAMPLES | {"top_p": 0.8, "top_k": 0, "min_p": 0.01, "min_new_tokens": 5},
    "typical_p": SAMPLES | {"typical_p": 0.6, "epsilon_cutoff": 0.001},
}
ENCODER_OPTIONS = {"encoder_no_repeat_ngram_size": BEAMS | {"encoder_no_repeat_ngram_size": 1}}
OTHERS = ("gpt2", "t5", "bloom")
MATRIX = pytest.mark.parametrize(
    ("name", "option"),
    [("llama", option) for option in OPTIONS]
    + [("bart", option) for option in OPTIONS | ENCODER_OPTIONS]
    + [(name, option) for name in OTHERS for option in DECODING],
)
# Options under which some models' inputs end too late, or together; and those of the library's own loop.
MAY_STAY = {"beams", "beams, one returned", "bad_words_ids", "early_stopping never", "max_length", "min_new_tokens"}
MAY_STAY |= {"prefix_allowed_tokens_fn", "sequence_bias", "encoder_no_repeat_ngram_size", "beam samples"}


def what_is_shared(name: str) -> tuple[str, ...]:
    return (PROMPT, CROSS) if unchanged(name).config.is_encoder_decoder else (PROMPT,)


@MATRIX
def test_option_gives_the_same_outputs_from_shared_caches(name, option):
    arguments = {"max_new_tokens": 7} | (OPTIONS | ENCODER_OPTIONS)[option]
    report = assert_same(unchanged(name), inputs_of(name, 9, 5), **arguments)
    if report.rows == report.inputs:
        assert left_alone_because(report, "ONE_ROW_PER_INPUT")
    else:
        assert is_shared(report, *what_is_shared(name)), report


@MATRIX
def test_option_gives_the_same_tokens_as_inputs_leave(name, option):
    """In eager steps and in captured ones."""
    model, arguments, left = unchanged(name), (OPTIONS | ENCODER_OPTIONS)[option] | ENDS, 0
    for seed in range(3):
        with capturing("on" if seed == 1 else "off"):
            report = same_tokens(model, inputs_of(name, 6, 3, 5, 7, seed=seed), **arguments)
        left += LEFT in report.shared
        may_capture = seed == 1 and LAYERS_ARE_KNOWN and name != "bloom"
        assert bool(replays(report)) == may_capture
    assert left or option in MAY_STAY


# Other inputs and outputs: architectures, inputs that replace the usual ones, further arguments.
DECODER_ONLY, ENCODER_DECODERS = ("llama", "gpt2"), ("bart", "t5")
PROMPTED = {"decoder_input_ids": token_ids(2, 4, seed=3)}
MASKED = PROMPTED | {"decoder_attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])}
EVERYTHING = {"output_attentions": True, "output_hidden_states": True}
CALLS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "padding on the left": (NAMES, padded(4, 9, 1), {}),
    "padding on the right": (NAMES, padded(4, 9, 1, side="right"), {}),
    "padding on the left, no mask": (NAMES, padded(4, 9, 1) | {"attention_mask": None}, {}),
    "padding on the right, no mask": (NAMES, padded(4, 9, 1, side="right") | {"attention_mask": None}, {}),
    "a prompt of the decoder": (ENCODER_DECODERS, PROMPTED, {}),
    "a padded prompt of the decoder": (ENCODER_DECODERS, MASKED, {}),
    "a language token": (("mbart", "m2m_100"), {}, {"forced_bos_token_id": 42}),
    "attentions and hidden states": (("llama-eager", "bart-eager"), {}, EVERYTHING),
    "a prefill in chunks": (DECODER_ONLY, {}, {"prefill_chunk_size": 4}),
    "no cache": (NAMES, {}, {"use_cache": False}),
}


@BOTH
@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (names, *_) in CALLS.items() for name in names])
def test_inputs_and_outputs_of_all_kinds_are_the_same(call, name, arguments):
    _, inputs, options = CALLS[call]
    both = compared(unchanged(name), inputs_of(name, 9, 5) | inputs, **arguments, **options)
    if "use_cache" in options:  # only the first step is computed once per input
        assert both.report.shared == [PREFILL] and not both.report.kernels
    else:
        assert is_shared(both.report, *what_is_shared(name))
    assert "forced_bos_token_id" not in options or (both.fast.sequences[:, 1] == 42).all()


@pytest.mark.parametrize("name", DECODER_ONLY)
def test_guidance_keeps_its_own_cache(name):
    arguments = {"guidance_scale": 1.6, "negative_prompt_ids": token_ids(6, 4, seed=8)}
    assert is_shared(assert_same(unchanged(name), padded(9, 5), **BEAMS, **arguments), PROMPT)


@pytest.mark.parametrize("how", ("prompt lookup", "assistant"))
def test_drafted_tokens_are_left_to_the_library(how):
    drafts = {"prompt_lookup_num_tokens": 3} if how == "prompt lookup" else {"assistant_model": tiny("llama")}
    inputs = {"input_ids": token_ids(1, 4).repeat(1, 4)}
    assert left_alone_because(assert_same(unchanged("llama"), inputs, **drafts, max_new_tokens=9), "NO_PREFILL")


@pytest.mark.parametrize("inputs", (1, 3))
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES, GREEDY), ids=("beams", "samples", "greedy"))
def test_chunked_prefill_raises_the_error_of_the_library(inputs, arguments):
    """Whisper's steps cannot continue after it."""
    options = {"decoder_input_ids": token_ids(inputs, 4), "prefill_chunk_size": 2, **arguments}
    model, features = unchanged("whisper"), torch.randn(inputs, 8, 40)
    both = run_both(lambda: outcome(lambda: model.generate(features, **options), TypeError))
    assert both.stock == both.fast and both.stock[0] == "TypeError"


@BOTH
@pytest.mark.parametrize("length", (6, 20), ids="{} tokens".format)
@pytest.mark.parametrize("weight", ("q_proj", "k_proj"))
@pytest.mark.parametrize("name", ("llama", "llama-eager", "bart", "bart-eager"))
def test_attention_of_nan_is_as_in_the_library(name, weight, length, arguments):
    model = tiny(name)
    for parameter_name, parameter in model.named_parameters():
        if weight in parameter_name:
            torch.nn.init.constant_(parameter, torch.nan)

    def call():
        outputs = model.generate(token_ids(2, length), **arguments, return_dict_in_generate=True, output_logits=True)
        return outputs.logits, outputs.sequences, model.generate(token_ids(2, length), **arguments)

    both = run_both(lambda: outcome(call, RuntimeError))  # with samples there is nothing to draw from
    assert_equal_outputs(both.stock, both.fast)


# User code in a call: it is called as often, with the same arguments, as by the library.


class Noting(BaseStreamer):
    """A streamer, with methods for a processor and a criterion, that notes its arguments. writes_in: a step."""

    def __init__(self, writes_in: int = 0) -> None:
        self.writes_in, self.seen, self.steps = writes_in, [], 0

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")

    def processor(self, input_ids, scores):
        self.put(input_ids)
        self.steps += 1
        if self.steps == self.writes_in:
            input_ids[:, 1::2] = 50 + torch.arange(len(input_ids))[:, None]
        return scores + 5.0 * (torch.arange(VOCABULARY) == self.steps)

    def criterion(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores), sorted(kwargs)))
        return torch.full((input_ids.shape[0],), self.steps >= 4)


def same_notes(name: str, arguments: Callable[[Noting], dict[str, Any]], writes_in: int = 0) -> tuple[list, Report]:
    """Compares the notes of two equal calls; returns them and the report of the second."""
    model, notes = unchanged(name), []

    def call() -> Any:
        noting, input_ids = Noting(writes_in), token_ids(2, 6)
        notes.append(noting.seen)
        return model.generate(input_ids, **arguments(noting)), input_ids

    both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert notes[0] == notes[1] != []
    return notes[0], both.report


@BOTH
@pytest.mark.parametrize("name", NAMES)
def test_a_processor_and_criterion_are_called_alike(name, arguments):
    def with_parts(noting):
        parts = {"logits_processor": [noting.processor], "stopping_criteria": [noting.criterion]}
        return arguments | parts

    seen, report = same_notes(name, with_parts)
    assert is_shared(report, *what_is_shared(name)) and len(seen) == 8


@pytest.mark.parametrize("step", (1, 2, 4))
@pytest.mark.parametrize("arguments", (BEAMS, SAMPLES, GREEDY), ids=("beams", "samples", "greedy"))
@pytest.mark.parametrize("penalty", (1.0, 1.7), ids=("alone", "before a processor that reads"))
@pytest.mark.parametrize("name", ("llama", "bart"))
def test_a_processor_may_write_into_input_ids(name, penalty, arguments, step):
    options = {"repetition_penalty": penalty, "no_repeat_ngram_size": 2, **arguments}
    same_notes(name, lambda noting: options | {"logits_processor": [noting.processor]}, step)


def test_a_streamer_gets_the_same_tokens():
    inputs = {"input_ids": token_ids(1, 6), "do_sample": True, "max_new_tokens": 6}
    used = [Noting(), Noting()]
    model, streamers = unchanged("llama"), iter(used)
    both = run_both(lambda: model.generate(**inputs, streamer=next(streamers)))
    assert left_alone_because(both.report, "ONE_ROW_PER_INPUT")
    assert used[0].seen == used[1].seen and used[1].seen[-1] == "end"


@pytest.mark.parametrize("name", NAMES)
def test_an_error_of_a_processor_is_raised_once(name):
    error = LookupError("from the processor")

    def fail(input_ids, scores):
        raise error

    with pytest.raises(LookupError) as caught:
        unchanged(name).generate(**padded(9, 5), **BEAMS, logits_processor=[fail])
    assert caught.value is error
    states = {state.state for state in fastgen.status() if state.name.startswith("transformers.")}
    assert states <= {"applied", "pending"}  # patches of models that nobody has imported are pending
    assert is_shared(assert_same(unchanged(name), padded(9, 5), **BEAMS), *what_is_shared(name))
