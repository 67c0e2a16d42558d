"""Constrained generation with a `PrefixTrie` has the outputs and errors of the library with dictionaries."""

import functools
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from hooks import fresh_trust, refused, watched
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import assert_equal_outputs, outcome, run_both
from reports import LEFT, capturing, replays
from tiny_models import inputs_of, padded, tiny, token_ids
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

import fastgen
from fastgen.optimizer.decoding.report import ALLOWED
from fastgen.optimizer.transformers import processors
from fastgen.optimizer.transformers.compat import LAYERS_ARE_KNOWN
from fastgen.optimizer.transformers.processors import ALL_ROWS, ALONE

EOS, VOCABULARY = 2, 300
MODELS = ("llama", "t5")
pytestmark = pytest.mark.usefixtures("one_thread", "share_always")


@functools.cache
def model_of(name: str) -> Any:
    """Returns a model in float64: some of hundreds of beams differ by less than the rounding of float32."""
    return tiny(name, vocab_size=VOCABULARY).double()


class ByDictionaries:
    """The function that a user would write; it counts its calls."""

    def __init__(self, sequences: list[list[int]], ignored: int, at_dead_ends: list[int]) -> None:
        self.root: dict = {}
        self.ignored, self.at_dead_ends, self.calls = ignored, at_dead_ends, 0
        for sequence in sequences:
            node = self.root
            for token in sequence:
                node = node.setdefault(token, {})

    def __call__(self, batch_id: int, input_ids: torch.Tensor) -> list[int]:
        self.calls += 1
        node = self.root
        for token in input_ids.tolist()[self.ignored :]:
            node = node.get(token, {})
        return list(node) or self.at_dead_ends


def compare(model: Any, inputs: dict[str, Any], sequences: list[list[int]], ends: list[int], **arguments: Any) -> Any:
    """Compares all outputs, or the errors; returns fastgen's."""
    ignored = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    functions = ByDictionaries(sequences, ignored, ends), fastgen.PrefixTrie(sequences, ends).after(ignored)
    functions = iter(functions)
    stock, fast, _ = run_both(
        lambda: outcome(lambda: model.generate(**inputs, prefix_allowed_tokens_fn=next(functions), **arguments))
    )
    assert_equal_outputs(stock, fast)
    return fast


NUMBERS = st.sampled_from([*range(3, 9), *range(3, VOCABULARY)])
SEQUENCES = st.lists(st.lists(NUMBERS, min_size=1, max_size=5), min_size=1, max_size=60)


BEAM_SEARCH = st.fixed_dictionaries(
    {
        "num_beams": st.integers(2, 12) | st.just(40),
        "num_return_sequences": st.integers(1, 2),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "length_penalty": st.sampled_from([0.0, 1.0, -1.0, 2.0]),
        "max_new_tokens": st.integers(1, 7),
        "return_dict_in_generate": st.booleans(),
        "do_sample": st.just(False),
    }
)
TOKENS = {"max_new_tokens": st.just(6), "min_new_tokens": st.sampled_from([None, 3])}  # no token is left before the end
GREEDY = st.fixed_dictionaries({"do_sample": st.just(False), **TOKENS})
DRAWN = st.fixed_dictionaries(
    {"do_sample": st.just(True), "num_beams": st.sampled_from([1, 3]), "num_return_sequences": st.just(2), **TOKENS}
)


@settings(max_examples=90, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    sequences=SEQUENCES,
    has_end=st.booleans(),
    ends=st.sampled_from([[], [EOS], [EOS, 7]]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    options=BEAM_SEARCH | BEAM_SEARCH | GREEDY | DRAWN,
)
def test_any_way_of_decoding_is_constrained_as_in_the_library(name, sequences, has_end, ends, lengths, options):
    is_search = not options["do_sample"] and "num_beams" in options
    names = [sequence + [EOS] * (has_end or not is_search) for sequence in sequences]
    scores = {"output_scores": options.get("return_dict_in_generate", False)}
    compare(model_of(name), inputs_of(name, *lengths), names, ends, **options, **scores)


def semantic_ids(count: int, codes: int = 60) -> list[list[int]]:
    """Outputs of three tokens each, one of `codes` at each place."""
    numbers = torch.randint(codes, (count, 3), generator=torch.Generator().manual_seed(3))
    return (numbers + torch.tensor([10, 10 + codes, 10 + 2 * codes])).tolist()


@pytest.mark.parametrize("num_beams", [30, 200, 512])
@pytest.mark.parametrize("name", MODELS)
def test_wide_beams_choose_among_allowed_tokens_alone(name, num_beams):
    arguments = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 3, "eos_token_id": None}
    sequences = compare(model_of(name), {"input_ids": token_ids(2, 5)}, semantic_ids(2000), [], **arguments)
    assert sequences.shape[0] == 2 * num_beams
    assert fastgen.explain().kernels[ALONE] == 3 and not fastgen.explain().kernels[ALL_ROWS]


def test_no_mask_is_built_and_no_row_is_asked_alone():
    """Neither the processor, which masks, nor the trie is called."""
    trie = fastgen.PrefixTrie(semantic_ids(500)).after(5)
    arguments = {"num_beams": 20, "max_new_tokens": 3, "eos_token_id": None, "prefix_allowed_tokens_fn": trie}
    with (
        mock.patch.object(fastgen.PrefixTrie, "__call__", side_effect=AssertionError),
        mock.patch.object(processors, "_constrained", side_effect=AssertionError),
    ):
        assert model_of("llama").generate(token_ids(1, 5), **arguments).shape == (1, 8)
        with pytest.raises(AssertionError), fastgen.disabled():
            model_of("llama").generate(token_ids(1, 5), **arguments)


def test_the_first_step_asks_for_one_row_of_each_input():
    names, rows, asked = [[*name, EOS] for name in semantic_ids(500)], [], fastgen.PrefixTrie.allowed_sync

    def counted(trie: fastgen.PrefixTrie, input_ids: torch.Tensor) -> Any:
        rows.append(len(input_ids))
        return asked(trie, input_ids)

    trie = fastgen.PrefixTrie(names, [EOS]).after(5)
    with mock.patch.object(fastgen.PrefixTrie, "allowed_sync", counted):
        model_of("llama").generate(token_ids(2, 5), num_beams=8, max_new_tokens=3, prefix_allowed_tokens_fn=trie)
    assert rows == [2, 16, 16]


def test_with_other_processors_all_rows_are_asked_together():
    names = [[*sequence, EOS] for sequence in semantic_ids(500)]
    with mock.patch.object(fastgen.PrefixTrie, "__call__", side_effect=AssertionError):
        compare(model_of("llama"), padded(6, 3), names, [EOS], num_beams=5, max_new_tokens=6, repetition_penalty=1.5)
    kernels = fastgen.explain().kernels
    assert kernels[ALL_ROWS] and not kernels[ALONE]


def test_finished_inputs_leave_if_something_is_always_allowed():
    names = [[*name[:length], EOS] for name, length in zip(semantic_ids(90), (1, 2, 3) * 30)]
    arguments = {"num_beams": 2, "max_new_tokens": 12, "early_stopping": True}
    left = 0
    for ends, stays in (([EOS], False), ([], True)):
        compare(model_of("llama"), padded(6, 3, 5, 4, 7, 2), names, ends, **arguments)
        report = fastgen.explain()
        left += LEFT in report.shared
        assert (LEFT in report.shared) <= (not stays)
    assert left


@pytest.mark.parametrize("name", MODELS)
def test_an_error_names_the_input_as_the_library_does(name):
    messages = set()
    for seed, num_beams in [(1, 3), *((seed, 1) for seed in range(8))]:
        result = compare(
            model_of(name), padded(4, 4, seed=seed), [[5], [6, 7, 8]], [], num_beams=num_beams, max_new_tokens=3
        )
        messages |= {result[1].partition(".")[0]} if isinstance(result, tuple) else set()
    message = "`prefix_allowed_tokens_fn` returned an empty list for batch ID {}"
    assert messages == {message.format(0), message.format(1)}


@pytest.mark.parametrize("arguments", [{"num_beams": 3}, {"num_beams": 3, "repetition_penalty": 1.5}, {}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_trie_that_allows_nothing_at_first_is_an_error(name, arguments):
    """Without `.after` no row is on a path of the trie."""
    trie, model = fastgen.PrefixTrie([[8, 9, EOS]], at_dead_ends=[EOS]), model_of(name)
    options = {"prefix_allowed_tokens_fn": trie, "max_new_tokens": 4, **arguments}
    stock, fast, _ = run_both(lambda: outcome(lambda: model.generate(**padded(4, 4), **options)))
    assert stock == fast and fast[0] == "ValueError" and "no output begins with token" in fast[1]


def test_a_token_beyond_the_vocabulary_is_the_librarys_error():
    error = compare(model_of("llama"), padded(4), [[5, 6], [VOCABULARY]], [], num_beams=3, max_new_tokens=4)
    assert error[0] == "IndexError"
    assert fastgen.explain().codes(ALLOWED) == {"TRIE_OUTSIDE_VOCABULARY"}


def test_other_functions_are_called_for_each_row():
    sequences, calls = [[*name, EOS] for name in semantic_ids(300)], []

    def counted(batch_id: int, input_ids: torch.Tensor) -> list[int]:
        calls.append((batch_id, *input_ids.tolist()))
        return by_dictionaries(batch_id, input_ids)

    by_dictionaries = ByDictionaries(sequences, 5, [EOS])
    arguments = {"num_beams": 8, "max_new_tokens": 4, "prefix_allowed_tokens_fn": counted}
    with fastgen.disabled():
        stock = model_of("llama").generate(token_ids(1, 5).repeat(2, 1), **arguments)
    expected = calls.copy()
    assert len(expected) == 2 * 8 * 4
    calls.clear()
    assert torch.equal(stock, model_of("llama").generate(token_ids(1, 5).repeat(2, 1), **arguments))
    assert calls == expected


@pytest.mark.parametrize("answer", [torch.tensor([5, 9]), range(5, 90, 3), [-1, 7], (8,), []], ids=str)
def test_other_functions_may_return_any_index(answer):
    model, options = model_of("t5"), {"num_beams": 3, "max_new_tokens": 4}
    options["prefix_allowed_tokens_fn"] = lambda *_: answer
    stock, fast, _ = run_both(lambda: outcome(lambda: model.generate(**padded(4, 2), **options)))
    assert_equal_outputs(stock, fast)


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("trie", [True, False])
def test_constrained_scores_may_be_infinite_or_nan(trie, value):
    scores = torch.randn(6, 40)
    scores[:3, [5, 6]], scores[4, 20] = value, value
    function = fastgen.PrefixTrie([[5, 8], [6]]).after(2) if trie else lambda batch_id, input_ids: [5, 6 + batch_id]
    processor = PrefixConstrainedLogitsProcessor(function, 3)
    with fastgen.disabled():
        stock = processor(token_ids(6, 2), scores)
    assert torch.equal(stock.nan_to_num(7.0), processor(token_ids(6, 2), scores).nan_to_num(7.0))


@pytest.mark.skipif(not LAYERS_ARE_KNOWN, reason="nothing is captured with the static caches of this transformers")
@pytest.mark.parametrize("arguments", [{"num_beams": 6}, {}], ids=["beams", "greedy"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_are_constrained(name, arguments):
    model = tiny(name, vocab_size=VOCABULARY)
    names = [[*chain.from_iterable(parts), EOS] for parts in zip(*[iter(semantic_ids(120))] * 4)]
    with capturing():
        compare(model, padded(5, 5), names, [EOS], max_new_tokens=13, do_sample=False, **arguments)
    assert replays(fastgen.explain()) > 3


@pytest.mark.filterwarnings("ignore:fastgen leaves")
def test_a_class_of_unknown_source_that_disagrees_is_left_alone():
    processor = PrefixConstrainedLogitsProcessor(fastgen.PrefixTrie([[5, 6]], [EOS]).after(2), 2)
    other = mock.patch.object(fastgen.PrefixTrie, "__call__", lambda *arguments: [7])
    with other, fresh_trust(unknown=("transformers.generation.logits_process",)):
        for _ in range(2):
            scores = processor(token_ids(4, 2), torch.randn(4, VOCABULARY))
            assert scores.isfinite().nonzero()[:, 1].tolist() == [7] * 4
        assert refused() == {"it bans other tokens than fastgen"}


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 2}], ids=["alone", "with a processor"])
def test_many_scores_go_through_two_stages(options):
    """No tensor has the scores of all beams, and outputs without constraints are those of the library."""
    model = tiny("gpt2", vocab_size=30_000)

    def call() -> torch.Tensor:
        return model.generate(token_ids(2, 5), num_beams=8, max_new_tokens=5, do_sample=False, **options)

    call()  # the first call of a process compares the kernel with that function
    with watched("top k in one stage") as in_one_stage:
        stock, fast, _ = run_both(call)
    assert not in_one_stage and torch.equal(stock, fast)
