"""n-gram blocking in transformers: the same scores as the library's, and nobody's tensor is written but our own."""

from __future__ import annotations

import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from parity import run_both, tiny, token_ids
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
from fastgen.optimizer.transformers import no_repeat_ngram as patch
from fastgen.testing import as_untested, forget_verified, replaced, verified

VOCABULARY = 12
BAN = {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "max_new_tokens": 14}


@pytest.fixture
def calls():
    """The names of the forms that ran, one for each call of the op."""
    calls = []

    def counted(name):
        return lambda form, *args, **kwargs: calls.append(name) or form(*args, **kwargs)

    with replaced("no-repeat n-gram", counted("copy")), replaced("no-repeat n-gram, in place", counted("in place")):
        yield calls


def rows(count: int, length: int, seed: int = 0, vocabulary: int = 4) -> torch.Tensor:
    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))


def stock(call):
    with fastgen.disabled():
        return call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ngram_size", [1, 2, 3, 9, 10])
def test_a_row_s_own_ngrams_are_banned_as_the_library_does(ngram_size, dtype, calls):
    processor = NoRepeatNGramLogitsProcessor(ngram_size)
    for length in range(1, 12):
        input_ids, scores = rows(5, length, seed=length), torch.randn(5, VOCABULARY).to(dtype)
        before = scores.clone()
        found = processor(input_ids, scores)
        assert torch.equal(scores, before)
        expected = stock(lambda: processor(input_ids, scores))  # noqa: B023
        assert found.dtype == dtype and torch.equal(found, expected)
        assert (found is scores) == (expected is scores)
    assert calls == ["copy"] * (12 - ngram_size)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("ngram_size", [1, 2, 3, 6, 7])
def test_an_input_s_ngrams_are_banned_as_the_library_does(ngram_size, num_beams, calls):
    encoder_input_ids = rows(4, 6, seed=1)
    processor = EncoderNoRepeatNGramLogitsProcessor(ngram_size, encoder_input_ids)
    with fastgen.disabled():
        original = EncoderNoRepeatNGramLogitsProcessor(ngram_size, encoder_input_ids)
    banned = 0
    for length in range(1, 9):
        input_ids, scores = rows(4 * num_beams, length, seed=length), torch.randn(4 * num_beams, VOCABULARY)
        before = scores.clone()
        found = processor(input_ids, scores)
        assert torch.equal(scores, before) and found is not scores
        assert torch.equal(found, stock(lambda: original(input_ids, scores)))  # noqa: B023
        banned += int(found.isinf().sum())
    assert calls == ["copy"] * 8
    assert (banned > 0) == (ngram_size < 6)


def test_one_input_may_have_one_dimension():
    processor = EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([1, 2, 3]))
    found = processor(torch.tensor([[1], [2]]), torch.zeros(2, 5))
    assert found.isinf().nonzero().tolist() == [[0, 2], [1, 3]]


@needs("transformers", "5.23", "an IndexError")
def test_tokens_outside_the_vocabulary_are_ignored():
    input_ids = torch.tensor([[5, 99, 5, 3, 5]])
    scores = torch.zeros(1, 10)
    found = NoRepeatNGramLogitsProcessor(2)(input_ids, scores)
    assert torch.equal(found, stock(lambda: NoRepeatNGramLogitsProcessor(2)(input_ids, scores)))
    assert found.isinf().nonzero().tolist() == [[0, 3]]


class TestTheDictionariesOfTheLibrary:
    def test_are_there_for_who_reads_them(self):
        encoder_input_ids = rows(3, 7)
        found = EncoderNoRepeatNGramLogitsProcessor(3, encoder_input_ids)
        with fastgen.disabled():
            expected = EncoderNoRepeatNGramLogitsProcessor(3, encoder_input_ids)
        assert list(found.generated_ngrams) == expected.generated_ngrams
        assert vars(found).keys() == vars(expected).keys()
        assert (found.ngram_size, found.batch_size) == (expected.ngram_size, expected.batch_size)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_serve_a_processor_that_is_copied_or_used_without_fastgen(self, duplicate):
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

    def test_are_those_of_the_tokens_at_the_time(self):
        encoder_input_ids = torch.tensor([[1, 2, 3]])
        processor = EncoderNoRepeatNGramLogitsProcessor(2, encoder_input_ids)
        encoder_input_ids.fill_(4)
        assert processor(torch.tensor([[1]]), torch.zeros(1, 5)).isinf().nonzero().tolist() == [[0, 2]]
        assert processor.generated_ngrams[0] == {(1,): [2], (2,): [3]}

    @pytest.mark.parametrize(
        "change",
        [
            lambda processor: processor.generated_ngrams[0].clear(),
            lambda processor: processor.generated_ngrams.__setitem__(0, {(1,): [5]}),
            lambda processor: processor.generated_ngrams[1].update({(1,): [5]}),
            lambda processor: processor.generated_ngrams.reverse(),
            lambda processor: setattr(processor, "batch_size", 1),
            lambda processor: setattr(processor, "generated_ngrams", [{(1,): [3]}, {}]),
        ],
    )
    def test_may_be_changed(self, change):
        encoder_input_ids, input_ids, scores = rows(2, 6), torch.tensor([[1], [2]]), torch.zeros(2, VOCABULARY)

        def banned():
            processor = EncoderNoRepeatNGramLogitsProcessor(2, encoder_input_ids)
            change(processor)
            return processor(input_ids, scores)

        assert torch.equal(banned(), stock(banned))

    def test_compare_as_lists(self):
        found, expected = EncoderNoRepeatNGramLogitsProcessor(2, rows(2, 6)), None
        with fastgen.disabled():
            expected = EncoderNoRepeatNGramLogitsProcessor(2, rows(2, 6))
        assert found.generated_ngrams == expected.generated_ngrams and len(found.generated_ngrams) == 2
        assert repr(found.generated_ngrams) == repr(expected.generated_ngrams)

    @pytest.mark.parametrize(
        "encoder_input_ids", [torch.zeros(2, 0, dtype=torch.long), torch.tensor([[1, -1], [3, 4]]), rows(2, 3).numpy()]
    )
    @pytest.mark.parametrize("ngram_size", [1, 2, True])
    def test_unusual_inputs_are_those_of_the_library(self, ngram_size, encoder_input_ids):
        def banned():
            processor = EncoderNoRepeatNGramLogitsProcessor(ngram_size, encoder_input_ids)
            return processor(torch.tensor([[1], [2]]), torch.zeros(2, VOCABULARY))

        assert torch.equal(banned(), stock(banned))


class TestLeftToTheLibrary:
    def test_scores_in_double_precision(self, calls):
        scores = torch.zeros(1, 5, dtype=torch.float64)
        assert NoRepeatNGramLogitsProcessor(1)(torch.tensor([[3]]), scores).isinf().any() and not calls

    def test_scores_that_need_gradients(self, calls):
        scores = torch.zeros(1, 5, requires_grad=True)
        NoRepeatNGramLogitsProcessor(1)(torch.tensor([[3]]), scores).nan_to_num(neginf=0.0).sum().backward()
        assert scores.grad.tolist() == [[1, 1, 1, 0, 1]] and not calls

    def test_transformed_calls(self, calls):
        processor, input_ids = NoRepeatNGramLogitsProcessor(2), rows(2, 6)
        scores = torch.randn(3, 2, VOCABULARY)
        mapped = torch.func.vmap(lambda scores: processor(input_ids, scores))
        assert torch.equal(mapped(scores), stock(lambda: mapped(scores))) and not calls
        assert torch.equal(mapped(scores)[2], processor(input_ids, scores[2])) and calls == ["copy"]

    def test_encoder_tokens_of_another_type(self, calls):
        processor = EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1, 2, 3]], dtype=torch.int32))
        with generate_call("model") as call:
            found = processor(torch.tensor([[1]]), torch.zeros(1, 5))
        assert found.isinf().nonzero().tolist() == [[0, 2]] and not calls
        assert call.report.codes() == {"SHAPES"} and "torch.int32 (supported: torch.int64" in str(call.report)

    @pytest.mark.parametrize("ngram_size", [np.int64(2), True, 0, -1])
    def test_an_ngram_size_that_was_changed(self, ngram_size, calls):
        def banned():
            processor = NoRepeatNGramLogitsProcessor(3)
            processor.ngram_size = ngram_size
            return processor(torch.tensor([[1, 2, 1]]), torch.zeros(1, VOCABULARY))

        try:
            expected = stock(banned)
        except Exception as error:
            with pytest.raises(type(error)):
                banned()
        else:
            assert torch.equal(banned(), expected)
        assert not calls

    @needs("transformers", "5.17", "more rows than scores are no error")
    def test_wrong_arguments(self, calls):
        for ngram_size in (0, -1, 2.0):
            with pytest.raises(ValueError, match="strictly positive integer"):
                EncoderNoRepeatNGramLogitsProcessor(ngram_size, rows(1, 3))
        with pytest.raises((RuntimeError, IndexError)):
            NoRepeatNGramLogitsProcessor(1)(rows(3, 4), torch.zeros(2, 5))
        assert not calls


class TestGenerate:
    """Inside `generate` the scores are written in place only where nobody else holds them."""

    @pytest.mark.parametrize(
        "arguments",
        [
            {"num_beams": 3, "num_return_sequences": 3},
            {"do_sample": True, "num_return_sequences": 4},
            {"do_sample": True, "num_beams": 2},
            {},
        ],
        ids=["beam search", "sampling", "beam sampling", "greedy"],
    )
    @pytest.mark.parametrize(("name", "kind"), [("gpt2", "causal"), ("bart", "seq2seq")])
    def test_gives_the_same_in_place(self, name, kind, arguments, calls):
        model = tiny(name, kind)
        inputs = {"input_ids": token_ids(3, 9) % 7 + 5}
        arguments = {"return_dict_in_generate": True, "output_scores": True, **BAN, **arguments}
        both = run_both(lambda: model.generate(**inputs, **arguments))
        assert torch.equal(both.stock.sequences, both.fast.sequences)
        assert any(score.isinf().any() for score in both.fast.scores)
        for one, other in zip(both.stock.scores, both.fast.scores):
            torch.testing.assert_close(one, other)
        assert calls and set(calls) == {"in place"}

    def test_leaves_scores_alone_that_are_returned(self, calls):
        model, inputs = tiny("gpt2"), token_ids(2, 9) % 7 + 5
        both = run_both(
            lambda: model.generate(
                inputs, **BAN, do_sample=True, return_dict_in_generate=True, output_logits=True, output_scores=True
            )
        )
        assert torch.equal(both.stock.sequences, both.fast.sequences)
        assert not any(logits.isinf().any() for logits in both.fast.logits)
        for one, other in zip(both.stock.logits, both.fast.logits):
            torch.testing.assert_close(one, other)
        assert set(calls) == {"copy"}

    def test_leaves_scores_alone_that_another_processor_has_seen(self, calls):
        """One of the caller's, or one of the library's that comes first."""
        model, inputs = tiny("gpt2"), token_ids(2, 9) % 7 + 5
        both = run_both(lambda: model.generate(inputs, **BAN, repetition_penalty=1.3, num_beams=2))
        assert torch.equal(both.stock, both.fast)
        processors = LogitsProcessorList([Keeps(), NoRepeatNGramLogitsProcessor(2)])
        assert_kept_equal(
            lambda: (processors[0], model.generate(inputs, max_new_tokens=12, logits_processor=processors))
        )
        assert set(calls) == {"copy"}

    def test_writes_in_place_before_a_processor_of_the_caller(self, calls):
        model, inputs = tiny("gpt2"), token_ids(2, 9) % 7 + 5
        processors = LogitsProcessorList([Keeps()])
        assert_kept_equal(
            lambda: (processors[0], model.generate(inputs, **BAN, num_beams=2, logits_processor=processors)),
            banned=True,
        )
        assert set(calls) == {"in place"}


class Keeps(LogitsProcessor):
    """Keeps what it is given, and gives it on."""

    def __init__(self):
        self.kept = []

    def __call__(self, input_ids, scores):
        self.kept.append(scores)
        return scores


def assert_kept_equal(call, banned=False):
    """`call` returns who has kept scores, and the tokens; what was kept must not change afterwards."""
    both = run_both(lambda: [part.kept[:] if isinstance(part, Keeps) else part for part in call()])
    assert torch.equal(both.stock[1], both.fast[1])
    kept = both.fast[0][len(both.stock[0]) :]  # the processor is the same in both calls
    assert len(kept) == len(both.stock[0]) > 0
    for one, other in zip(both.stock[0], kept):
        torch.testing.assert_close(one, other)
    assert any(one.isinf().any() for one in kept) == banned


class TestSomebodyElseHoldsTheScores:
    """Ways in which a program could see a write into scores: it must not."""

    def generate(self, model, keeps, **arguments):
        inputs = token_ids(2, 9) % 7 + 5
        assert_kept_equal(
            lambda: (keeps, model.generate(inputs, no_repeat_ngram_size=1, max_new_tokens=6, **arguments))
        )

    def test_a_processor_that_the_model_itself_adds(self, calls, monkeypatch):
        model, keeps = tiny("gpt2"), Keeps()
        own = model._get_logits_processor
        added = lambda **kwargs: LogitsProcessorList([keeps, *own(**kwargs)])  # noqa: E731
        monkeypatch.setattr(model, "_get_logits_processor", added, raising=False)
        self.generate(model, keeps)
        assert set(calls) == {"copy"}

    def test_a_loop_that_a_program_has_wrapped(self, calls, monkeypatch):
        model, keeps = tiny("gpt2"), Keeps()
        own = type(model)._sample

        @functools.wraps(own)
        def sample(self, input_ids, logits_processor, **kwargs):
            return own(self, input_ids, LogitsProcessorList([keeps, *logits_processor]), **kwargs)

        monkeypatch.setattr(type(model), "_sample", sample)
        self.generate(model, keeps)
        assert set(calls) == {"copy"}

    @pytest.mark.parametrize("owner", [LogitsProcessorList, NoRepeatNGramLogitsProcessor])
    def test_a_call_that_a_program_has_wrapped(self, owner, calls, monkeypatch):
        model, keeps = tiny("gpt2"), Keeps()
        own = owner.__call__

        @functools.wraps(own)
        def call(self, input_ids, scores, **kwargs):
            keeps(input_ids, scores)
            return own(self, input_ids, scores, **kwargs)

        monkeypatch.setattr(owner, "__call__", call)
        self.generate(model, keeps)
        assert set(calls) == {"copy"}

    @pytest.mark.parametrize("num_beams", [1, 2])
    def test_a_function_mode(self, num_beams, calls):
        model, keeps = tiny("gpt2"), Keeps()

        class Keeping(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                result = func(*args, **kwargs or {})
                if func in (torch.Tensor.to, torch.nn.functional.log_softmax) and result.dim() == 2:
                    keeps(None, result)
                return result

        with Keeping():
            self.generate(model, keeps, num_beams=num_beams)
        assert set(calls) == {"copy"}

    def test_a_loop_of_the_caller(self, calls):
        keeps = Keeps()

        def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
            with torch.no_grad():
                scores = model(input_ids).logits[:, -1]
            logits_processor(input_ids, keeps(None, scores))
            return input_ids

        self.generate(tiny("gpt2"), keeps, custom_generate=decode)
        assert set(calls) == {"copy"}

    def test_a_list_that_the_caller_has_and_uses_meanwhile(self, calls):
        """With no processor of the library's, transformers gives the loop the caller's own list."""
        model, mine = tiny("gpt2"), LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])
        scores = torch.zeros(2, VOCABULARY * 20)

        class Uses(StoppingCriteria):
            def __call__(self, input_ids, _, **kwargs):
                assert mine(input_ids, scores).isinf().any() and not scores.isinf().any()
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        inputs = token_ids(2, 9) % 7 + 5
        model.generate(inputs, max_new_tokens=3, logits_processor=mine, stopping_criteria=[Uses()])
        assert calls == ["in place", "copy"] * 3


class TestNewerThanTested:
    """On a version of transformers that nobody has tested, the first call of each class is compared."""

    @pytest.fixture(autouse=True)
    def failed(self):
        with as_untested() as failures, forget_verified():
            yield failures

    def test_the_first_call_is_the_original_s(self, calls):
        processor, input_ids, scores = NoRepeatNGramLogitsProcessor(2), rows(2, 6), torch.randn(2, VOCABULARY)
        expected = stock(lambda: processor(input_ids, scores))
        for _ in range(2):
            assert torch.equal(processor(input_ids, scores), expected)
        assert calls == ["copy", "copy"] and verified() == {NoRepeatNGramLogitsProcessor}

    def test_a_difference_switches_the_patches_off(self, failed):
        processor, input_ids, scores = NoRepeatNGramLogitsProcessor(1), rows(2, 6), torch.randn(2, VOCABULARY)
        with replaced("no-repeat n-gram", lambda ban, input_ids, scores, *args, **kwargs: scores):
            assert torch.equal(processor(input_ids, scores), stock(lambda: processor(input_ids, scores)))
        assert failed == [(patch.GROUP, "NoRepeatNGramLogitsProcessor bans other tokens than fastgen")]
        assert patch.GROUP in {state.group for state in fastgen.status()}
