"""Hooks, searches, generators and attentions that users have put into fairseq do under fastgen what they did."""

from __future__ import annotations

import contextlib
import functools
from argparse import Namespace
from unittest import mock

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import search
from fairseq.models.transformer.transformer_decoder import TransformerDecoderBase
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from fairseq_generation import BEAMS, assert_same_hypotheses, compare, generate, run_both
from fairseq_models import CASES, Case, prompts

import fastgen


@pytest.fixture(scope="module")
def case() -> Case:
    return CASES["transformer"]()


@pytest.mark.parametrize("name", ("transformer", "bart"))
def test_hooks_of_the_user_see_what_they_saw(name):
    case, seen = CASES[name](), []
    layer = case.models[0].decoder.layers[1]
    layer.register_forward_hook(lambda module, args, output: seen.append((args[0].shape, output[0].detach().clone())))

    def call() -> list:
        seen.append([])
        return generate(case)

    both = run_both(call)
    assert_same_hypotheses(both.stock, both.fast)
    second = next(index for index in range(1, len(seen)) if seen[index] == [])
    stock, fast = seen[1:second], seen[second + 1 :]
    assert [shape for shape, _ in stock] == [shape for shape, _ in fast] and len(stock) > 5
    for (_, one), (_, other) in zip(stock, fast, strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


class OnlyEven(search.BeamSearch):
    """A search of the user's own: words with even numbers only."""

    calls = 0

    def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None, candidate_multiple=2):
        OnlyEven.calls += 1
        lprobs[:, :, torch.arange(lprobs.size(2)) % 2 == 1] = -torch.inf
        return super().step(step, lprobs, scores, prev_output_tokens, original_batch_idxs, candidate_multiple)


def test_search_of_the_user_is_called(case):
    calls = []

    def call() -> list:
        OnlyEven.calls = 0
        words = case.task.target_dictionary
        generator = SequenceGenerator(case.models, words, 3, max_len_b=9, search_strategy=OnlyEven(words))
        hypotheses = generator.generate(case.models, case.sample)
        calls.append(OnlyEven.calls)
        return hypotheses

    both = run_both(call)
    assert_same_hypotheses(both.stock, both.fast)
    assert calls[0] == calls[1] == 10
    assert all(hypothesis["tokens"][:-1].remainder(2).eq(0).all() for row in both.fast for hypothesis in row)


class EndsAfterThree(SequenceGenerator):
    """A generator of the user's own: from the fourth word on, the first hypothesis that ends ends the sentence."""

    def is_finished(self, step, unfin_idx, max_len, finalized_sent_len, beam_size):
        return step >= 3 or super().is_finished(step, unfin_idx, max_len, finalized_sent_len, beam_size)


def test_generator_of_the_user_keeps_its_methods(case):

    def call() -> list:
        generator = case.task.build_generator(case.models, Namespace(**BEAMS, min_len=2), seq_gen_cls=EndsAfterThree)
        return case.task.inference_step(generator, case.models, case.sample)

    both = run_both(call)
    assert_same_hypotheses(both.stock, both.fast)
    assert min(len(hypotheses) for hypotheses in both.fast) < BEAMS["beam"]


class ScaledAttention(MultiheadAttention):
    """An attention of the user's own, in the place of upstream's."""

    def forward(self, query, key, value, *args, **kwargs):
        return super().forward(query * 2.0, key, value, *args, **kwargs)


@pytest.mark.parametrize("name", ("transformer", "bart"))
def test_attention_of_the_user_keeps_its_forward(name):
    case = CASES[name]()
    with fastgen.disabled():
        plain = generate(case)
    for layer in case.models[0].decoder.layers:
        layer.encoder_attn.__class__ = ScaledAttention
    both = compare(case)
    with pytest.raises(AssertionError):
        assert_same_hypotheses(plain, both.fast)


def test_what_the_user_put_around_the_decoder_sees_all_rows(case, monkeypatch):
    original, rows = TransformerDecoderBase.extract_features, []

    @functools.wraps(original)
    def extract_features(self, tokens, encoder_out=None, *args, **kwargs):
        rows.append((len(tokens), encoder_out["encoder_out"][0].shape[1]))
        return original(self, tokens, encoder_out, *args, **kwargs)

    monkeypatch.setattr(TransformerDecoderBase, "extract_features", extract_features)
    compare(case, accelerated=False)
    assert rows and all(tokens == encoded for tokens, encoded in rows)


@pytest.mark.parametrize("on_class", (False, True))
def test_step_of_the_search_that_is_replaced_sees_the_prompt(on_class):
    case = CASES["transformer_lm"]()
    sample, steps = prompts(case.task.dictionary, (6, 6, 6)), []
    original = search.BeamSearch.step

    def step(self, step, lprobs, *args, **kwargs):
        steps.append(step)
        return original(self, step, lprobs, *args, **kwargs)

    def call() -> list:
        generator = case.task.build_generator(case.models, Namespace(beam=2, max_len_b=12))
        if not on_class:
            generator.search.step = functools.partial(step, generator.search)
        return case.task.inference_step(generator, case.models, sample)

    with mock.patch.object(search.BeamSearch, "step", step) if on_class else contextlib.nullcontext():
        both = run_both(call)
    assert_same_hypotheses(both.stock, both.fast)
    assert len(steps) > 6 and steps[: len(steps) // 2] == steps[len(steps) // 2 :]


def test_function_of_torch_that_is_replaced_is_called(case):
    original, calls = torch.topk, []

    def topk(*args, **kwargs):
        calls.append([list(value.shape) for value in args if isinstance(value, torch.Tensor)])
        return original(*args, **kwargs)

    with mock.patch.object(torch, "topk", topk):
        compare(case, accelerated=False)
    assert calls and calls[: len(calls) // 2] == calls[len(calls) // 2 :]
    assert "FUNCTION_REPLACED" in fastgen.explain().codes()


def test_error_of_the_search_comes_through_and_the_next_call_works(case):
    error = LookupError("from the search")
    with mock.patch.object(search.BeamSearch, "step", side_effect=error), pytest.raises(LookupError) as caught:
        generate(case)
    assert caught.value is error
    compare(case)
