"""Every option of fairseq's generators has under fastgen the hypotheses of unpatched fairseq."""

import copy
import functools
from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq import search
from fairseq.sequence_generator import SequenceGenerator
from fairseq.token_generation_constraints import pack_constraints
from fairseq_generation import (
    BEAMS,
    Hypotheses,
    assert_accelerated,
    assert_same_hypotheses,
    compare,
    corrected_blocking,
    generate,
    lengths,
    run_both,
    token_lists,
)
from fairseq_models import CASES, Case, language_model, source_sample
from reports import capturing, replays

import fastgen

NAMES = ("transformer", "bart", "ensemble", "transformer_lm", "lstm")
OPTIONS: dict[str, dict[str, Any]] = {
    "beam 5, lenpen 2": {"beam": 5, "lenpen": 2.0},
    "lenpen below 1": {"lenpen": 0.3},
    "unnormalized": {"unnormalized": True},
    "min_len": {"min_len": 6},
    "min_len equals the maximum": {"min_len": 9, "max_len_b": 9},
    "max_len_a": {"max_len_a": 0.7, "max_len_b": 2},
    "short": {"max_len_b": 1},
    "long": {"max_len_b": 40, "min_len": 30},
    "one beam": {"beam": 1},
    "unkpen": {"unkpen": 4.0},
    "unknown words preferred": {"unkpen": -4.0},
    "temperature": {"temperature": 1.9},
    "low temperature": {"temperature": 0.4},
    "nearly all words": {"beam": 60, "max_len_b": 5},
    "sampling": {"sampling": True},
    "sampling, one beam": {"sampling": True, "beam": 1},
    "sampling_topk": {"sampling": True, "sampling_topk": 4, "temperature": 0.7},
    "sampling_topp": {"sampling": True, "sampling_topp": 0.7},
    "sampling_topp above all": {"sampling": True, "sampling_topp": 1.5},
    "sampling with min_len": {"sampling": True, "sampling_topk": 3, "min_len": 5, "lenpen": 0.5},
    "diverse_beam_groups": {"beam": 4, "diverse_beam_groups": 2},
    "diverse_beam_groups, strong": {"beam": 6, "diverse_beam_groups": 6, "diverse_beam_strength": 2.0},
    "diversity_rate": {"diversity_rate": 0.6},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_gives_the_same_hypotheses(name, option):
    """Compares eager steps and, if outputs are long enough, replayed ones."""
    compare(CASES[name](), **OPTIONS[option])
    if name in ("transformer", "bart", "transformer_lm"):
        is_short = option in ("max_len_a", "short", "nearly all words")
        with capturing():
            report = compare(CASES[name](), **({} if is_short else {"min_len": 6}) | OPTIONS[option]).report
        assert replays(report) > 2 or is_short


@functools.cache
def tokens_of(name: str, option: str = "") -> list[list[list[int]]]:
    """Returns what unpatched fairseq generates."""
    torch.manual_seed(7)
    with fastgen.disabled():
        return token_lists(generate(CASES[name](), **OPTIONS.get(option, {})))


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "unkpen"])
def test_an_option_has_an_effect_on_a_case(option):
    """Ignoring an option would change outputs; `unkpen` penalises a word that no output has."""
    assert any(tokens_of(name, option) != tokens_of(name) for name in NAMES)


@pytest.mark.parametrize("name", ("transformer", "bart", "ensemble"))
def test_outputs_may_match_the_source_length(name):
    """Each output is as long as its source; upstream scores those that are not with minus infinity."""
    both = compare(CASES[name](), match_source_len=True)
    assert len({length for row in lengths(both.fast) for length in row}) > 2


@pytest.mark.parametrize("name", ("transformer", "bart", "transformer_align", "ensemble"))
@pytest.mark.parametrize("kind", ("hard", "soft"))
def test_alignments_are_those_of_fairseq(name, kind):
    both = compare(CASES[name](), print_alignment=kind)
    if name != "bart":
        assert all(len(hypothesis["alignment"]) for row in both.fast for hypothesis in row)


def test_alignments_with_full_context_are_the_same():
    """transformer_align may run the decoder once more over the whole output."""
    case = CASES["transformer_align"]()
    case.models[0].full_context_alignment = True
    compare(case, print_alignment="hard")


# With a prefix and more beams upstream's search holds sentences that cannot end, and stops with an AssertionError.
CONSTRAINED = {"transformer": 10, "ensemble": 10, "bart": 4}


@pytest.mark.parametrize("order", ("ordered", "unordered"))
@pytest.mark.parametrize("name, beam", [(name, beam) for name, wide in CONSTRAINED.items() for beam in (3, wide)])
def test_lexical_constraints_are_in_the_outputs(name, order, beam):
    """The first sentence has two constraints of one and of two words, the second none, the last one of three words."""
    case = CASES[name]()
    wanted = [[[7], [9, 12]], [], [[20]], [[11]], [[30, 31, 32]]]
    packed = pack_constraints([[torch.tensor(words) for words in sentence] for sentence in wanted])
    both = compare(case, constraints=order, beam=beam, max_len_b=30, inference={"constraints": packed})
    for sentence, phrases in zip(both.fast, wanted, strict=True):
        tokens = sentence[0]["tokens"].tolist()
        for words in phrases:
            assert any(tokens[start : start + len(words)] == words for start in range(len(tokens)))


PREFIXES = {
    "one word": [[7], [8], [9], [10], [11]],
    "some without": [[7, 8, 9], [1, 1, 1], [12, 1, 1], [5, 6, 1], [1, 1, 1]],
    "one that ends the sentence": [[7, 8, 2], [9, 2, 1], [12, 13, 14], [5, 1, 1], [1, 1, 1]],
}


@pytest.mark.parametrize("name", ("transformer", "bart", "ensemble", "transformer_lm", "lstm"))
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("mode", ({}, {"sampling": True}, {"min_len": 7}), ids=("beams", "samples", "min_len"))
def test_outputs_begin_with_their_prefix_tokens(name, prefix, mode):
    """1 pads, 2 ends a sentence."""
    tokens = torch.tensor(PREFIXES[prefix])
    both = compare(CASES[name](), inference={"prefix_tokens": tokens}, **mode)
    for sentence, words in zip(both.fast, PREFIXES[prefix], strict=True):
        wanted = [word for word in words if word != 1]
        assert all(hypothesis["tokens"].tolist()[: len(wanted)] == wanted for hypothesis in sentence)


@pytest.mark.parametrize("longest", (2, 4, 5))
def test_a_prefix_may_be_as_long_as_the_output(longest):
    tokens = torch.arange(5, 25).view(5, 4)
    compare(CASES["transformer"](), max_len_b=longest, inference={"prefix_tokens": tokens})


@pytest.mark.parametrize("name", ("transformer", "bart", "ensemble"))
@pytest.mark.parametrize("weight", (0.3, 1.0))
def test_fusion_with_a_language_model_is_the_same(name, weight):
    case, extra = CASES[name](), {"lm_model": language_model(18, 1.5).models[0], "lm_weight": weight}

    def call() -> list:
        generator = case.task.build_generator(case.models, Namespace(**BEAMS), extra_gen_cls_kwargs=dict(extra))
        return case.task.inference_step(generator, case.models, case.sample, **case.inference)

    both = run_both(call, accelerated=True)
    assert_same_hypotheses(both.stock, both.fast)
    with fastgen.disabled():
        assert token_lists(generate(CASES[name]())) != token_lists(both.fast)


@pytest.mark.parametrize("name", ("transformer", "bart", "ensemble"))
def test_the_function_of_allowed_tokens_is_called_alike(name):
    """It sees the same sentences and words in the same order."""
    calls: list[tuple[int, list[int]]] = []

    def allowed(batch: int, words: torch.Tensor) -> list[int]:
        calls.append((batch, words.tolist()))
        return [2, 10 + int(batch), *range(20, 30)] if len(words) < 6 else [2]

    def call() -> list:
        calls.append((-1, []))
        return generate(CASES[name](), prefix_allowed_tokens_fn=allowed, inference={"prefix_tokens": None})

    both = run_both(call, accelerated=True)
    assert_same_hypotheses(both.stock, both.fast)
    second = calls.index((-1, []), 1)
    assert calls[1:second] == calls[second + 1 :]


@pytest.mark.parametrize("name", ("transformer", "bart", "ensemble", "transformer_lm", "lstm", "fconv"))
@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("mode", ({}, {"sampling": True, "temperature": 3.0}), ids=("beams", "samples"))
def test_no_ngram_is_repeated_in_an_output(name, size, mode):
    options = {"no_repeat_ngram_size": size, "min_len": 12, "beam": 4} | mode
    both = compare(CASES[name](), **options)
    for row in both.fast:
        for hypothesis in row:
            words = hypothesis["tokens"].tolist()[:-1]
            grams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
            assert len(grams) == len(set(grams))


def test_a_finished_row_without_tokens_does_not_stop_sampling():
    """After the end of a sentence these models are sure of another one, which is a repeated 2-gram."""
    options = {"sampling": True, "no_repeat_ngram_size": 2, "min_len": 12, "beam": 4}
    case = CASES["bart"]()
    torch.manual_seed(7)
    with fastgen.disabled(), corrected_blocking(), pytest.raises(RuntimeError, match="invalid multinomial"):
        generate(case, **options)
    torch.manual_seed(7)
    hypotheses = generate(case, **options)
    assert_accelerated(fastgen.explain(), True)
    assert all(torch.isfinite(item["score"]) for sentence in hypotheses for item in sentence)


def hypotheses_of(case: Case, bos_token: int | None = None, **arguments: Any) -> Hypotheses:
    """Compares a `SequenceGenerator` of user code with and without fastgen; returns the hypotheses."""

    def call() -> list:
        generator = SequenceGenerator(case.models, case.task.target_dictionary, 3, **{"max_len_b": 12} | arguments)
        return generator.generate(case.models, case.sample, bos_token=bos_token)

    both = run_both(call, accelerated=True)
    assert_same_hypotheses(both.stock, both.fast)
    return both.fast


@pytest.mark.parametrize("name", ("transformer", "bart", "transformer_lm"))
def test_the_user_may_choose_the_first_and_last_token(name):
    """Another word ends sentences, and another one begins them."""
    hypotheses = hypotheses_of(CASES[name](), bos_token=14, eos=9)
    assert all(hypothesis["tokens"][-1] == 9 for row in hypotheses for hypothesis in row)


def test_suppressed_tokens_are_in_no_output():
    case = CASES["transformer"]()
    with fastgen.disabled():
        usual = {word for row in token_lists(generate(case)) for words in row for word in words} - {2}
    banned = sorted(usual)[:4]
    names = [case.task.target_dictionary[index] for index in banned]
    hypotheses = hypotheses_of(case, tokens_to_suppress=names)
    assert not {word for row in token_lists(hypotheses) for words in row for word in words} & set(banned)


def test_max_len_of_the_generator_limits_all_others():
    hypotheses = hypotheses_of(CASES["transformer"](), max_len_b=30, max_len=6)
    assert max(length for row in lengths(hypotheses) for length in row) == 6


def test_a_length_constrained_search_is_the_same():
    case = CASES["transformer"]()
    bounds = {"min_len_a": 0.5, "min_len_b": 1, "max_len_a": 1, "max_len_b": 2}
    strategy = search.LengthConstrainedBeamSearch(case.task.target_dictionary, **bounds)
    hypotheses_of(case, search_strategy=strategy)


def test_diverse_groups_fail_as_upstream_does_on_large_ids():
    """Upstream takes a sentence's number in the data set for its row: IndexError in all but the first batches."""
    case = CASES["transformer"]()
    sample = source_sample(case.task)
    sample["id"] = sample["id"] + 7
    with fastgen.disabled(), pytest.raises(IndexError):
        generate(case, copy.deepcopy(sample), diverse_beam_groups=3)
    try:
        hypotheses = generate(case, copy.deepcopy(sample), diverse_beam_groups=3)
    except IndexError:
        return
    sample["id"] = torch.arange(len(sample["id"]))
    with fastgen.disabled():
        assert_same_hypotheses(generate(case, sample, diverse_beam_groups=3), hypotheses)
