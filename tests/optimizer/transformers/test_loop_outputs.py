"""Scores, logits, beam indices and caches come out of fastgen's loops as out of the library's, whose loops rest."""

import itertools
from typing import Any

import pytest
import torch
from copied_text import Forced, copying
from hooks import costs
from parity import assert_equal_outputs, run_both
from reports import LEFT, PREFILL, capturing, replays
from tiny_models import inputs_of, padded, tiny, token_ids
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria

import fastgen
from fastgen.optimizer.decoding.report import COMPACTION, LOOP
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN
from fastgen.testing import configured

NEW = {"max_new_tokens": 26, "do_sample": False}
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True, "temperature": 1.3},
    "beams that end": {"num_beams": 4, "length_penalty": -1.0, "eos_token_id": [5, 6, 7, 8, 9, 11, 12]},
    "beams that stop": {"num_beams": 4, "early_stopping": True, "eos_token_id": [5, 6, 7, 8, 9, 11, 12]},
}
DICT = {"return_dict_in_generate": True}
OUTPUTS: dict[str, dict[str, Any]] = {
    "no outputs": DICT,
    "scores": DICT | {"output_scores": True},
    "logits": DICT | {"output_logits": True},
    "both": DICT | {"output_scores": True, "output_logits": True},
}
WAYS = pytest.mark.parametrize("way", DECODING)
GRAPHS = pytest.mark.parametrize("cuda_graphs", ("off", "on"))

pytestmark = pytest.mark.usefixtures("share_always")


@WAYS
@GRAPHS
@pytest.mark.parametrize(
    ("name", "outputs"), [*itertools.product(("llama", "bart"), OUTPUTS), ("gpt2", "both"), ("t5", "both")]
)
def test_outputs_are_those_of_the_library(name, outputs, way, cuda_graphs):
    model, inputs = tiny(name), padded(9, 5)
    with capturing(cuda_graphs):
        for _ in range(2):  # the second call replays from its first steps on
            both = run_both(lambda: model.generate(**inputs, **NEW | DECODING[way] | OUTPUTS[outputs]))
            assert_equal_outputs(both.stock, both.fast)
    assert not both.report.codes(LOOP) or (way == "greedy" and cuda_graphs == "off")
    assert bool(replays(both.report)) == (cuda_graphs == "on" and LAYERS_ARE_KNOWN)


@pytest.mark.parametrize("way", ("greedy", "samples", "beams", "sampled beams"))
def test_transition_scores_are_those_of_the_library(way):
    model = tiny("llama")

    def transitions() -> torch.Tensor:
        output = model.generate(**padded(9, 5), **NEW | DECODING[way] | OUTPUTS["scores"])
        beams = {"beam_indices": output.beam_indices} if "beam" in way else {}
        return model.compute_transition_scores(output.sequences, output.scores, **beams, normalize_logits=True)

    with capturing("on"):
        both = run_both(transitions)
    torch.testing.assert_close(both.fast, both.stock, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", ("samples", "beams that end", "sampled beams"))
def test_no_input_leaves_whose_outputs_are_returned(way):
    ends = {"eos_token_id": list(range(3, 90, 6)), "max_new_tokens": 30}
    model, inputs = tiny("llama"), inputs_of("llama", 6, 3, 5, 7)
    both = run_both(lambda: model.generate(**inputs, **DECODING[way] | ends | OUTPUTS["scores"]))
    assert_equal_outputs(both.stock, both.fast)
    assert LEFT not in both.report.shared and PREFILL in both.report.shared
    assert both.report.codes(COMPACTION) <= {"RETURN_DICT", "SAMPLED_BEAMS"}


def test_inputs_of_sampled_beams_stay():
    ends = {"eos_token_id": list(range(3, 90, 6)), "max_new_tokens": 30, "early_stopping": True}
    model, inputs = tiny("llama"), inputs_of("llama", 6, 3, 5, 7)
    both = run_both(lambda: model.generate(**inputs, **DECODING["sampled beams"] | ends))
    assert torch.equal(both.stock, both.fast) and both.report.codes(COMPACTION) == {"SAMPLED_BEAMS"}


@pytest.mark.parametrize("outputs", OUTPUTS)
@GRAPHS
def test_a_trie_gives_outputs_of_every_step(outputs, cuda_graphs):
    model = tiny("llama")
    outputs_of_trie = [*token_ids(40, 8, seed=4).tolist(), [7, 8], [7, 9, 10]]
    trie = fastgen.PrefixTrie([[*output, 2] for output in outputs_of_trie], at_dead_ends=[2])
    arguments = NEW | DECODING["beams"] | OUTPUTS[outputs] | {"prefix_allowed_tokens_fn": trie.after(9)}
    with capturing(cuda_graphs):
        both = run_both(lambda: model.generate(**padded(9, 9), **arguments))
    assert_equal_outputs(both.stock, both.fast)


@pytest.mark.parametrize("outputs", ({"output_attentions": True}, {"output_hidden_states": True}))
@WAYS
def test_states_of_layers_are_collected_by_the_library(way, outputs):
    model = tiny("llama")
    with capturing("on"):
        both = run_both(lambda: model.generate(**padded(9, 5), **NEW | DECODING[way] | DICT | outputs))
    assert_equal_outputs(both.stock, both.fast)
    assert "OUTPUTS" in both.report.codes(LOOP)


@pytest.mark.skipif(not LAYERS_ARE_KNOWN, reason="no drafts in this version of transformers")
@GRAPHS
def test_drafted_steps_have_scores_too(cuda_graphs):
    model, inputs = tiny("llama"), inputs_of("llama", 30)
    processor = Forced(copying(inputs["input_ids"], 40), 30)
    arguments = {"max_new_tokens": 40, "eos_token_id": None, "logits_processor": [processor]} | OUTPUTS["both"]
    with capturing(cuda_graphs, drafts="auto"), costs(min_computed=0.0):
        both = run_both(lambda: model.generate(**inputs, **arguments))
    assert_equal_outputs(both.stock, both.fast)
    assert both.report.steps_saved


class InPlace(LogitsProcessor):
    """Writes into the scores, which the library also returns as logits."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 3:9] = -5.0
        return scores


@pytest.mark.parametrize("way", ("greedy", "samples", "beams", "sampled beams"))
@GRAPHS
def test_a_processor_may_write_into_the_scores(way, cuda_graphs):
    model = tiny("gpt2")
    arguments = NEW | DECODING[way] | OUTPUTS["both"] | {"logits_processor": [InPlace()]}
    with capturing(cuda_graphs):
        both = run_both(lambda: model.generate(**padded(9, 5), **arguments))
    assert_equal_outputs(both.stock, both.fast)


# Criteria of the program.


class Noting(StoppingCriteria):
    """Ends rows by their tokens, and notes what it gets."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((input_ids.clone(), scores if scores is None else len(scores), kwargs))
        return (input_ids[:, -3:].sum(dim=1) % 11 == 0) | (input_ids.shape[1] > 30)


@WAYS
@GRAPHS
@pytest.mark.parametrize("outputs", ({}, OUTPUTS["scores"]), ids=("tokens", "scores"))
def test_a_criterion_of_the_program_gets_what_it_gets_there(way, cuda_graphs, outputs):
    model, notes = tiny("llama"), []

    def call() -> Any:
        notes.append(Noting())
        return model.generate(**padded(9, 5), **NEW | DECODING[way] | outputs, stopping_criteria=[notes[-1]])

    with capturing(cuda_graphs):
        both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)
    assert_equal_outputs(notes[0].calls, notes[1].calls)
    assert not both.report.codes(LOOP) or (way == "greedy" and cuda_graphs == "off")


class Answering(StoppingCriteria):
    """Answers by a function of the tokens."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self.answer(input_ids)


def written(input_ids: torch.Tensor) -> torch.Tensor:
    input_ids[:, -1].add_(1).remainder_(90)
    input_ids[:, 0] = 9
    return input_ids[:, -1] % 7 == 0


ANSWERS = {
    "bytes": lambda ids: (ids[:, -1] % 5 == 0).to(torch.uint8),
    "integers": lambda ids: (ids[:, -1] % 5 == 0).long(),
    "written tokens": written,
    "a column": lambda ids: (ids[:, -1] % 5 == 0)[:, None],
}


@pytest.mark.parametrize(
    ("way", "answer"),
    [(way, answer) for answer in ANSWERS for way in DECODING if "beams" not in way or answer == "written tokens"]
    + [("beams", answer) for answer in ANSWERS if answer != "written tokens"],
)
@GRAPHS
def test_criteria_may_answer_in_any_way(answer, way, cuda_graphs):
    """What the library refuses raises an error of the same class."""
    model = tiny("llama")

    def call() -> Any:
        criteria = [Answering(ANSWERS[answer])]
        try:
            return model.generate(**padded(9, 9), **NEW | DECODING[way], stopping_criteria=criteria)
        except Exception as error:
            return type(error).__name__

    with capturing(cuda_graphs):
        both = run_both(call)
    assert_equal_outputs(both.stock, both.fast)


@pytest.mark.parametrize("way", ("greedy", "samples"))
@GRAPHS
def test_without_an_end_token_ended_rows_go_on(way, cuda_graphs):
    model = tiny("llama")
    arguments = NEW | DECODING[way] | {"eos_token_id": None, "pad_token_id": None}
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    criteria = [Answering(lambda ids: ids[:, -1] % 3 == 0)]
    with capturing(cuda_graphs):
        both = run_both(lambda: model.generate(**padded(9, 9), **arguments, stopping_criteria=criteria))
    assert torch.equal(both.stock, both.fast)


def characters(size: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are one character each."""
    vocabulary = {"abcdef": 0, **{chr(256 + token): token for token in range(1, size)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="abcdef")))


@WAYS
def test_stop_strings_end_the_same_rows(way):
    model = tiny("llama")
    stops = [chr(256 + token) for token in (7, 19, 33, 52)]
    arguments = {"stop_strings": stops, "tokenizer": characters(model.config.vocab_size)}
    input_ids = token_ids(2, 14)
    input_ids[:, :10] = input_ids[0, :10]
    with capturing("on"), configured(share="always"):
        both = run_both(lambda: model.generate(input_ids, **NEW | DECODING[way] | arguments))
    report = both.report
    assert torch.equal(both.stock, both.fast) and not report.codes(LOOP)
    assert bool(replays(report)) == LAYERS_ARE_KNOWN == bool(report.prefix_length)
    assert (PREFILL in report.shared) == (way != "greedy") and not report.codes() & {
        "ARGUMENT_TYPE",
        "ARGUMENT_COLUMNS",
    }


def test_an_error_of_a_criterion_is_the_callers():
    class Failing(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            raise ZeroDivisionError("theirs")

    with pytest.raises(ZeroDivisionError, match="theirs"):
        tiny("llama").generate(token_ids(2, 5), **NEW, num_beams=3, stopping_criteria=[Failing()])


@WAYS
def test_half_precision_gives_outputs_of_the_same_form(way):
    model = tiny("llama").to(torch.bfloat16)
    with configured(share="always"), capturing("on"):
        stock, fast, _ = run_both(
            lambda: model.generate(**padded(9, 5), **NEW | DECODING[way] | OUTPUTS["both"]), must_report=True
        )
    assert list(stock) == list(fast) and stock.scores[0].dtype == fast.scores[0].dtype == torch.float32
