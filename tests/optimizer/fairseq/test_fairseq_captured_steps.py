"""fairseq's decoder in captured steps, also if user code changes the model in a call: the library's hypotheses."""

import gc
import weakref
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from fairseq.search import BeamSearch
from fairseq_generation import assert_same_hypotheses, compare, generate, run_both, token_lists
from fairseq_models import CASES, source_sample
from fuzz_changes import CHANGES as ALL_CHANGES
from fuzz_changes import adapter, other_weight_data
from hooks import broken, captured_graphs, holds_graphs
from reports import capturing, replays
from torch import nn

import fastgen
from fastgen.testing import configured


@pytest.fixture(autouse=True)
def captured():
    with capturing():
        yield


@pytest.mark.parametrize("name", ("transformer", "bart", "transformer_align"))
def test_attention_weights_come_without_the_padding(name):
    assert replays(compare(CASES[name](), print_alignment="hard").report) > 3


@pytest.mark.parametrize("share", ("always", "never"))
def test_a_prompt_lies_before_the_generated_keys(share):
    with configured(share=share):
        assert replays(compare(CASES["transformer_lm"](), max_len_b=30).report) > 3


def test_a_graph_serves_sources_of_other_lengths():
    case, options = CASES["transformer"](), {"min_len": 6, "max_len_b": 6}  # all sentences stay to the end
    compare(case, source_sample(case.task, (7, 5, 6)), **options)
    graphs = list(captured_graphs(case.models[0]))
    assert len(graphs) == 1
    report = compare(case, source_sample(case.task, (6, 4, 4), seed=5), **options).report
    assert replays(report) == 7 and list(captured_graphs(case.models[0])) == graphs


class Keeping(BeamSearch):
    """A search that holds the scores of its steps."""

    def __init__(self, dictionary):
        super().__init__(dictionary)
        self.seen = []

    def step(self, step, lprobs, *args, **kwargs):
        self.seen.append(lprobs)
        return super().step(step, lprobs, *args, **kwargs)


class Cooling(BeamSearch):
    """A search that changes the temperature in the middle of a call."""

    def step(self, step, *args, **kwargs):
        self.generator.temperature = 1.0 + step / 5
        return super().step(step, *args, **kwargs)


def generated_with(search, case) -> tuple[list, BeamSearch]:
    generator = case.task.build_generator(case.models, Namespace(beam=3, max_len_b=24, min_len=20))
    generator.search = search(case.task.target_dictionary)
    generator.search.generator = generator
    return case.task.inference_step(generator, case.models, case.sample), generator.search


@pytest.mark.parametrize("search", (Keeping, Cooling))
def test_searches_of_user_code_see_the_same_scores(search):
    case = CASES["transformer"]()
    both = run_both(lambda: generated_with(search, case))
    assert_same_hypotheses(both.stock[0], both.fast[0])
    assert replays(both.report) > (3 if search is Keeping else 0)
    if search is Keeping:
        torch.testing.assert_close(both.fast[1].seen, both.stock[1].seen, atol=1e-4, rtol=1e-4)


class Changing(BeamSearch):
    """A search that changes the model in one of its steps."""

    def __init__(self, dictionary: Any, change: Any, model: Any) -> None:
        super().__init__(dictionary)
        self.change, self.changed = change, model

    def step(self, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 8:
            self.change(Random(1), self.changed)
        return super().step(step, *args, **kwargs)


def nothing(random: Random, model: Any) -> None:
    pass


def look_at_the_attention(random: Random, model: Any) -> None:
    def weigh(module: nn.Module, args: Any, output: Any) -> Any:
        attended, weights = output
        return attended * (2 if weights is None else 1 + weights.amax()), weights

    model.decoder.layers[0].encoder_attn.register_forward_hook(weigh)


def generated(*changes: Any) -> list[Any]:
    """Returns the hypotheses of calls on one model, each of which changes it."""
    case, outputs = CASES["transformer"](), []
    for change in changes:
        outputs.append(generated_with(partial(Changing, change=change, model=case.models[0]), case)[0])
        case.models[0].eval()
    return outputs


CHANGES = [change for change in ALL_CHANGES if change is not adapter]


@pytest.mark.parametrize("change", [*CHANGES, look_at_the_attention])
def test_a_search_may_change_the_model_within_a_call(change):
    both = run_both(lambda: generated(nothing, change, nothing))
    for stock, fast in zip(both.stock, both.fast, strict=True):
        assert_same_hypotheses(stock, fast)


def test_steps_are_captured_until_a_search_changes_the_model():
    generated(nothing)
    assert replays(fastgen.explain()) > 10
    generated(nothing, other_weight_data)
    report = fastgen.explain()
    assert "MODEL_CHANGED" in report.codes() and 0 < replays(report) < 20


@pytest.mark.parametrize("kind", (LearnedPositionalEmbedding, SinusoidalPositionalEmbedding))
def test_positional_embeddings_take_all_their_arguments(kind):
    embedding, tokens = kind(10, 4, 1) if kind is LearnedPositionalEmbedding else kind(4, 1, 12), torch.tensor([[2, 3]])
    with fastgen.disabled():
        expected = embedding(tokens, positions=None)
    assert torch.equal(embedding(tokens, positions=None), expected)


def test_two_threads_replay_steps_of_one_model():
    case = CASES["transformer"]()
    expected = token_lists(generate(case, max_len_b=30))
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: token_lists(generate(case, max_len_b=30)), range(6)))
    assert results == [expected] * 6
    assert not holds_graphs(case.models[0])


def test_positions_beyond_the_table_are_not_captured():
    case = CASES["transformer"]()
    positions = case.models[0].decoder.embed_positions
    positions.weights, positions.auto_expand = positions.weights[:10].clone(), False
    report = compare(case, max_len_b=24).report
    assert not replays(report) and "POSITIONS" in report.codes()


def test_after_an_error_fairseq_works_and_graphs_are_gone():
    case = CASES["transformer"]()
    compare(case)
    with fastgen.disabled():
        expected = generate(case)
    outcome = pytest.raises(RuntimeError) if fastgen.config.CONFIG.strict else pytest.warns(RuntimeWarning)
    with broken("reorder, fairseq", RuntimeError("no")), outcome:
        assert len(generate(case)) == len(expected)
    assert not captured_graphs(case.models[0]) and not holds_graphs(case.models[0])


def test_graphs_are_freed_with_a_model_of_fairseq():
    case = CASES["transformer"]()
    generate(case)
    buffers = weakref.ref(next(iter(captured_graphs(case.models[0]).values())).cache)
    alive = weakref.ref(case.models[0])
    del case
    gc.collect()
    assert alive() is None and buffers() is None
