"""n-gram blocking in transformers: the same scores as the library's, and nobody's tensor is written but our own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from parity import run_both, tiny, token_ids
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)

import fastgen
from fastgen.ops import no_repeat_ngram as op
from fastgen.optimizer import PATCH_SET, report
from fastgen.optimizer.transformers import no_repeat_ngram as patch

VOCABULARY = 12
BAN = {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "max_new_tokens": 14}


@pytest.fixture
def calls(monkeypatch):
    """The names of the forms that ran, one for each call of the op."""
    calls = []

    def counted(name, form):
        return lambda *args, **kwargs: calls.append(name) or form(*args, **kwargs)

    monkeypatch.setattr(patch, "ban", counted("copy", op.no_repeat_ngram))
    monkeypatch.setattr(patch, "ban_in_place", counted("in place", op.no_repeat_ngram_))
    return calls


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
        finally:
            fastgen.enable()

    def test_are_those_of_the_tokens_at_the_time(self):
        encoder_input_ids = torch.tensor([[1, 2, 3]])
        processor = EncoderNoRepeatNGramLogitsProcessor(2, encoder_input_ids)
        encoder_input_ids.fill_(4)
        assert processor(torch.tensor([[1]]), torch.zeros(1, 5)).isinf().nonzero().tolist() == [[0, 2]]
        assert processor.generated_ngrams[0] == {(1,): [2], (2,): [3]}


class TestLeftToTheLibrary:
    def test_double_precision(self, calls):
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
        with report.recording("model") as record:
            found = processor(torch.tensor([[1]]), torch.zeros(1, 5))
        assert found.isinf().nonzero().tolist() == [[0, 2]] and not calls
        assert record.fallbacks == [
            "n-gram blocking: encoder_input_ids has dtype torch.int32 (supported: torch.int64, as input_ids)"
        ]

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

    def test_leaves_scores_alone_that_a_processor_of_the_caller_has_seen(self, calls):
        model, inputs = tiny("gpt2"), token_ids(2, 9) % 7 + 5

        class Keeps(LogitsProcessor):
            def __init__(self):
                self.kept = []

            def __call__(self, input_ids, scores):
                self.kept.append(scores)
                return scores

        def generate():
            keeps = Keeps()
            processors = LogitsProcessorList([keeps, NoRepeatNGramLogitsProcessor(2)])
            return keeps, model.generate(inputs, max_new_tokens=12, logits_processor=processors)

        both = run_both(generate)
        assert torch.equal(both.stock[1], both.fast[1])
        assert set(calls) == {"copy"}
        for one, other in zip(both.stock[0].kept, both.fast[0].kept):
            torch.testing.assert_close(one, other)
            assert not other.isinf().any()

    def test_does_not_own_what_a_loop_of_the_caller_does(self, calls):
        model, kept = tiny("gpt2"), []

        def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
            with torch.no_grad():
                scores = model(input_ids).logits[:, -1]
            kept.append(scores)
            logits_processor(input_ids, scores)
            return input_ids

        model.generate(torch.tensor([[7, 8, 7]]), no_repeat_ngram_size=2, custom_generate=loop, max_new_tokens=3)
        assert calls == ["copy"] and not kept[0].isinf().any()

    def test_a_processor_of_the_caller_is_not_owned_after_generate(self, calls):
        model, processor = tiny("gpt2"), NoRepeatNGramLogitsProcessor(2)
        model.generate(token_ids(1, 9) % 3 + 5, max_new_tokens=5, logits_processor=LogitsProcessorList([processor]))
        scores = torch.zeros(1, VOCABULARY)
        assert processor(torch.tensor([[7, 8, 7]]), scores).isinf().any()
        assert not scores.isinf().any() and set(calls) == {"copy"}

    def test_processors_of_the_library_before_it_do_not_take_ownership(self, calls):
        model = tiny("gpt2")
        both = run_both(
            lambda: model.generate(
                token_ids(2, 9) % 7 + 5, **BAN, repetition_penalty=1.3, min_new_tokens=3, num_beams=2
            )
        )
        assert torch.equal(both.stock, both.fast) and set(calls) == {"in place"}


def test_a_loop_that_the_model_class_brings_is_not_trusted():
    class Own(type(tiny("gpt2"))):
        def _sample(self, *args, **kwargs):
            return super()._sample(*args, **kwargs)

    assert not patch._loop_forgets_scores(Own(tiny("gpt2").config), tiny("gpt2").generation_config)


def test_only_processors_before_those_of_the_caller_may_write_in_place():
    first, own, last = NoRepeatNGramLogitsProcessor(2), MinLengthLogitsProcessor(3, 0), NoRepeatNGramLogitsProcessor(3)
    assert patch._before_any_of_the_caller([first, own, last], [own]) == [first]
    assert patch._before_any_of_the_caller([first, own, last], ()) == [first, own, last]


class TestNewerThanTested:
    """On a version of transformers that nobody has tested, the first call of each class is compared."""

    @pytest.fixture(autouse=True)
    def newer(self, monkeypatch):
        monkeypatch.setattr(PATCH_SET, "newer_than_tested", lambda host: True)
        monkeypatch.setattr(patch, "_verified", set())

    def test_the_first_call_is_the_original_s(self, calls):
        processor, input_ids, scores = NoRepeatNGramLogitsProcessor(2), rows(2, 6), torch.randn(2, VOCABULARY)
        expected = stock(lambda: processor(input_ids, scores))
        for _ in range(2):
            assert torch.equal(processor(input_ids, scores), expected)
        assert calls == ["copy", "copy"] and patch._verified == {NoRepeatNGramLogitsProcessor}

    def test_a_difference_switches_the_patches_off(self, monkeypatch):
        failed = []
        monkeypatch.setattr(PATCH_SET, "fail", lambda group, reason: failed.append((group, reason)))
        monkeypatch.setattr(patch, "ban", lambda input_ids, scores, *args, **kwargs: scores)
        processor, input_ids, scores = NoRepeatNGramLogitsProcessor(1), rows(2, 6), torch.randn(2, VOCABULARY)
        assert torch.equal(processor(input_ids, scores), stock(lambda: processor(input_ids, scores)))
        assert failed == [(patch.GROUP, "NoRepeatNGramLogitsProcessor bans other tokens than fastgen")]
        assert patch.GROUP in {state.group for state in fastgen.status()}
