"""n-gram blocking in transformers: the scores of the library, and no tensor of user code is written."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hooks import fresh_trust, proven, refused, replaced
from parity import assert_equal_outputs, outcome, run_both
from tiny_models import token_ids, unchanged
from torch.overrides import TorchFunctionMode
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteria,
)
from versions import needs

import fastgen
from fastgen.optimizer.decoding.call import generate_call

VOCABULARY = 12
BAN = {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "max_new_tokens": 14}
PROMPTS = token_ids(2, 9) % 7 + 5


@pytest.fixture
def calls():
    """The names of the forms that ran, in the order of the calls."""
    calls = []

    def counted(name):
        return lambda form, *args, **kwargs: calls.append(name) or form(*args, **kwargs)

    with replaced("no-repeat n-gram", counted("copy")), replaced("no-repeat n-gram, in place", counted("in place")):
        yield calls


def rows(count: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 4, (count, length), generator=torch.Generator().manual_seed(seed))


def stock(call):
    with fastgen.disabled():
        return call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ngram_size", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("beams", [None, 1, 3], ids=("row", "input", "input, with beams"))
def test_ngrams_are_banned_as_in_the_library(ngram_size, beams, dtype, calls):
    if beams:
        count, arguments = 4 * beams, (ngram_size, rows(4, 6, seed=1))
        processor = EncoderNoRepeatNGramLogitsProcessor(*arguments)
        original = stock(lambda: EncoderNoRepeatNGramLogitsProcessor(*arguments))
    else:
        count, processor = 5, NoRepeatNGramLogitsProcessor(ngram_size)
        original = processor
    for length in range(1, 12):
        input_ids, scores = rows(count, length, seed=length), torch.randn(count, VOCABULARY).to(dtype)
        before = scores.clone()
        banned = processor(input_ids, scores)
        assert torch.equal(scores, before) and banned.dtype == dtype
        expected = stock(lambda: original(input_ids, scores))  # noqa: B023
        assert torch.equal(banned, expected) and (banned is scores) == (expected is scores)
    assert calls == ["copy"] * (11 if beams else 12 - ngram_size)


def encoder_ban(encoder_input_ids: Any, ngram_size: Any = 2, ngrams: list | None = None) -> torch.Tensor:
    """Returns the scores after the tokens 1 and 2. ngrams: those that user code sets in the processor."""
    processor = EncoderNoRepeatNGramLogitsProcessor(ngram_size, encoder_input_ids)
    if ngrams is not None:
        processor.generated_ngrams = ngrams
    return processor(torch.tensor([[1], [2]]), torch.zeros(2, VOCABULARY))


def row_ban(ngram_size: Any, tokens: tuple[int, ...] = (1, 2, 1)) -> torch.Tensor:
    processor = NoRepeatNGramLogitsProcessor(3)
    processor.ngram_size = ngram_size
    return processor(torch.tensor([tokens]), torch.zeros(1, VOCABULARY))


UNUSUAL = {"no tokens": torch.zeros(2, 0, dtype=torch.long), "padding": torch.tensor([[1, -1], [3, 4]])}
UNUSUAL |= {"numpy": rows(2, 3).numpy(), "one dimension": torch.tensor([1, 2, 3])}
UNUSUAL_SIZES = [(what, size) for what in UNUSUAL for size in (1, 2, True)]
SAME: dict[str, Callable[[], torch.Tensor]] = {
    "other dictionaries": lambda: encoder_ban(rows(2, 6), ngrams=[{(1,): [3]}, {}]),
    **{f"{what}, {size}": functools.partial(encoder_ban, UNUSUAL[what], size) for what, size in UNUSUAL_SIZES},
    **{f"an n-gram size of {size!r}": functools.partial(row_ban, size) for size in (np.int64(2), True, 0, -1)},
    "tokens outside of the vocabulary": functools.partial(row_ban, 2, (5, 99, 5, 3, 5)),
}
OUTSIDE = needs("transformers", "5.23", "an IndexError")


@pytest.mark.parametrize("what", [pytest.param(what, marks=[OUTSIDE] * ("outside" in what)) for what in SAME])
def test_unusual_arguments_and_changes_are_as_in_the_library(what):
    both = run_both(lambda: outcome(SAME[what]), must_report=False)
    assert_equal_outputs(both.stock, both.fast)


class TestDictionariesOfTheLibrary:
    def test_dictionaries_are_there_to_be_read(self):
        encoder_input_ids = torch.tensor([[1, 2, 3], [3, 2, 1]])
        processor = EncoderNoRepeatNGramLogitsProcessor(2, encoder_input_ids)
        expected = stock(lambda: EncoderNoRepeatNGramLogitsProcessor(2, encoder_input_ids))
        encoder_input_ids.fill_(4)  # they are those of the tokens at the time
        assert processor(torch.tensor([[1], [9]]), torch.zeros(2, 5)).isinf().nonzero().tolist() == [[0, 2]]
        ngrams = processor.generated_ngrams
        assert ngrams == list(ngrams) == expected.generated_ngrams and len(ngrams) == 2
        assert repr(ngrams) == repr(expected.generated_ngrams) and vars(processor).keys() == vars(expected).keys()
        assert (processor.ngram_size, processor.batch_size) == (expected.ngram_size, expected.batch_size)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
    def test_dictionaries_serve_copies_and_the_library(self, duplicate):
        processor = EncoderNoRepeatNGramLogitsProcessor(2, rows(2, 6))
        input_ids, scores = rows(4, 5, seed=2), torch.zeros(4, VOCABULARY)
        expected = processor(input_ids, scores)
        assert expected.isinf().any()
        assert torch.equal(stock(lambda: duplicate(processor)(input_ids, scores)), expected)
        fastgen.disable()
        try:
            assert torch.equal(duplicate(processor)(input_ids, scores), expected)
            assert torch.equal(processor(input_ids, scores), expected)
        finally:
            fastgen.enable()


class TestLeftToTheLibrary:
    def test_double_precision_and_gradients_are_left_alone(self, calls):
        processor, tokens = NoRepeatNGramLogitsProcessor(1), torch.tensor([[3]])
        assert processor(tokens, torch.zeros(1, 5, dtype=torch.float64)).isinf().any()
        scores = torch.zeros(1, 5, requires_grad=True)
        processor(tokens, scores).nan_to_num(neginf=0.0).sum().backward()
        assert scores.grad.tolist() == [[1, 1, 1, 0, 1]] and not calls

    def test_transformed_calls_are_left_alone(self, calls):
        processor, input_ids = NoRepeatNGramLogitsProcessor(2), rows(2, 6)
        scores = torch.randn(3, 2, VOCABULARY)
        mapped = torch.func.vmap(lambda scores: processor(input_ids, scores))
        assert torch.equal(mapped(scores), stock(lambda: mapped(scores))) and not calls
        assert torch.equal(mapped(scores)[2], processor(input_ids, scores[2])) and calls == ["copy"]

    def test_encoder_tokens_of_another_dtype_are_left_alone(self, calls):
        processor = EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1, 2, 3]], dtype=torch.int32))
        with generate_call("model") as call:
            scores = processor(torch.tensor([[1]]), torch.zeros(1, 5))
        assert scores.isinf().nonzero().tolist() == [[0, 2]] and not calls
        assert call.report.codes() == {"SHAPES"} and "torch.int32 on cpu (supported: torch.int64" in str(call.report)

    @needs("transformers", "5.17", "more rows than scores are no error")
    def test_wrong_arguments_have_the_librarys_errors(self, calls):
        for ngram_size in (0, -1, 2.0):
            with pytest.raises(ValueError, match="strictly positive integer"):
                EncoderNoRepeatNGramLogitsProcessor(ngram_size, rows(1, 3))
        with pytest.raises((RuntimeError, IndexError)):
            NoRepeatNGramLogitsProcessor(1)(rows(3, 4), torch.zeros(2, 5))
        assert not calls


# Inside `generate` the scores are written in place only if nobody else holds them.

DECODING = {
    "beam search": {"num_beams": 3, "num_return_sequences": 3},
    "sampling": {"do_sample": True, "num_return_sequences": 4},
    "beam sampling": {"do_sample": True, "num_beams": 2},
    "greedy": {},
}


@pytest.mark.parametrize("is_returned", (False, True), ids=("scores", "logits too"))
@pytest.mark.parametrize("arguments", DECODING.values(), ids=DECODING)
@pytest.mark.parametrize("name", ("gpt2", "bart"))
def test_generate_bans_in_place_but_not_in_returned_logits(name, arguments, is_returned, calls):
    arguments = {**BAN, **arguments, "return_dict_in_generate": True, "output_scores": True}
    model = unchanged(name)
    both = run_both(lambda: model.generate(PROMPTS, **arguments, output_logits=is_returned))
    assert torch.equal(both.stock.sequences, both.fast.sequences)
    torch.testing.assert_close(both.stock.scores, both.fast.scores)
    assert any(score.isinf().any() for score in both.fast.scores)
    if is_returned:
        torch.testing.assert_close(both.stock.logits, both.fast.logits)
        assert not any(logits.isinf().any() for logits in both.fast.logits)
    assert calls and set(calls) == {"copy" if is_returned else "in place"}


class Keeps(LogitsProcessor):
    """A processor that holds all scores that it sees."""

    def __init__(self):
        self.held = []

    def __call__(self, input_ids, scores):
        self.held.append(scores)
        return scores


def wrap_the_loop(model: Any, keeps: Keeps, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    own = type(model)._sample

    @functools.wraps(own)
    def sample(self, input_ids, logits_processor, **kwargs):
        return own(self, input_ids, LogitsProcessorList([keeps, *logits_processor]), **kwargs)

    monkeypatch.setattr(type(model), "_sample", sample)
    return {}


def wrap_a_call(model: Any, keeps: Keeps, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    own = NoRepeatNGramLogitsProcessor.__call__

    @functools.wraps(own)
    def call(self, input_ids, scores, **kwargs):
        keeps(input_ids, scores)
        return own(self, input_ids, scores, **kwargs)

    monkeypatch.setattr(NoRepeatNGramLogitsProcessor, "__call__", call)
    return {}


def add_by_the_model(model: Any, keeps: Keeps, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    own = model._get_logits_processor
    added = lambda **kwargs: LogitsProcessorList([keeps, *own(**kwargs)])  # noqa: E731
    monkeypatch.setattr(model, "_get_logits_processor", added, raising=False)
    return {}


def pass_it_first(model: Any, keeps: Keeps, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    processors = LogitsProcessorList([keeps, NoRepeatNGramLogitsProcessor(1)])
    return {"logits_processor": processors, "no_repeat_ngram_size": None}


def pass_it_last(model: Any, keeps: Keeps, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([keeps])}


HOLDERS = {
    "a processor that the model adds": (add_by_the_model, "copy"),
    "a loop that is wrapped": (wrap_the_loop, "copy"),
    "a processor's call that is wrapped": (wrap_a_call, "copy"),
    "a processor of the caller, first": (pass_it_first, "copy"),
    "a processor of the caller, last": (pass_it_last, "in place"),
}


def assert_held_equal(model: Any, keeps: Keeps, banned: bool = False, **arguments: Any) -> None:
    """Asserts that scores which user code holds do not change afterwards."""

    def call():
        del keeps.held[:]
        return model.generate(PROMPTS, **{"no_repeat_ngram_size": 1, "max_new_tokens": 6} | arguments), keeps.held[:]

    (tokens, stock), (fast_tokens, fast), _ = run_both(call)
    assert torch.equal(tokens, fast_tokens) and len(fast) == len(stock) > 0
    torch.testing.assert_close(fast, stock)
    assert any(scores.isinf().any() for scores in fast) == banned


@pytest.mark.parametrize("holder", HOLDERS)
def test_scores_that_user_code_holds_are_not_written(holder, calls, monkeypatch):
    hold, form = HOLDERS[holder]
    model, keeps = copy.copy(unchanged("gpt2")), Keeps()
    assert_held_equal(model, keeps, banned=form == "in place", **hold(model, keeps, monkeypatch))
    assert set(calls) == {form}


@pytest.mark.parametrize("num_beams", [1, 2])
def test_scores_that_a_function_mode_sees_are_not_written(num_beams, calls):
    keeps = Keeps()

    class Keeping(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if func in (torch.Tensor.to, torch.nn.functional.log_softmax) and result.dim() == 2:
                keeps(None, result)
            return result

    model = unchanged("gpt2")
    with Keeping():
        assert_held_equal(model, keeps, num_beams=num_beams)
    assert set(calls) == {"copy"}


def test_scores_that_another_processor_has_seen_are_copied(calls):
    model = unchanged("gpt2")
    both = run_both(lambda: model.generate(PROMPTS, **BAN, repetition_penalty=1.3, num_beams=2))
    assert torch.equal(both.stock, both.fast) and set(calls) == {"copy"}


def test_a_list_that_the_caller_uses_meanwhile_is_copied(calls):
    """Without a processor of its own, transformers passes the caller's list to the loop."""
    mine, scores = LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)]), torch.zeros(2, VOCABULARY * 20)

    class Uses(StoppingCriteria):
        def __call__(self, input_ids, _, **kwargs):
            assert mine(input_ids, scores).isinf().any() and not scores.isinf().any()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    unchanged("gpt2").generate(PROMPTS, max_new_tokens=5, logits_processor=mine, stopping_criteria=[Uses()])
    assert calls == ["in place", "copy"] * 5


UNKNOWN = ("transformers.generation.logits_process",)


def test_processors_of_an_unknown_source_are_compared_once(calls):
    processor, input_ids, scores = NoRepeatNGramLogitsProcessor(2), rows(2, 6), torch.randn(2, VOCABULARY)
    expected = stock(lambda: processor(input_ids, scores))
    with fresh_trust(unknown=UNKNOWN):
        for _ in range(2):
            assert torch.equal(processor(input_ids, scores), expected)
        assert calls == ["copy", "copy"] and len(proven()) == 1


@pytest.mark.filterwarnings("ignore:fastgen leaves")
def test_processors_of_an_unknown_source_that_ban_others_stay():
    processor, input_ids, scores = NoRepeatNGramLogitsProcessor(1), rows(2, 6), torch.randn(2, VOCABULARY)
    wrong = replaced("no-repeat n-gram", lambda ban, input_ids, scores, *args, **kwargs: scores)
    with fresh_trust(unknown=UNKNOWN), wrong:
        for _ in range(2):
            assert torch.equal(processor(input_ids, scores), stock(lambda: processor(input_ids, scores)))
        assert refused() == {"it bans other tokens than fastgen"}
