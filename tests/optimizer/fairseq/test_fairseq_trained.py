"""Trained fairseq models load through the hub and translate, score and go on as with the unpatched fairseq."""

from __future__ import annotations

import types
from argparse import Namespace
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.data import Dictionary
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models.bart import BARTHubInterface
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq_generation import Hypotheses, assert_same_hypotheses, run_both
from fairseq_models import SIZE, build
from fairseq_trained import BPE_WORDS, REFUSED, Trained, fairseq

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def safe_loading_of_checkpoints():
    """The unpatched library cannot read its own checkpoints otherwise."""
    if not hasattr(torch.serialization, "safe_globals"):
        yield
        return
    with torch.serialization.safe_globals([Namespace]):
        yield


@pytest.fixture
def numpy_compat(monkeypatch):
    """What upstream's `TokenBlockDataset` reads with `break_mode="eos"`, and numpy 2 does not have."""
    if not hasattr(numpy, "compat"):
        monkeypatch.setattr(numpy, "compat", types.SimpleNamespace(long=numpy.int64), raising=False)


def translator(trained: Trained, checkpoint: str = "checkpoint_best.pt") -> GeneratorHubInterface:
    return TransformerModel.from_pretrained(
        str(trained.checkpoints), checkpoint, str(trained.data), tokenizer="moses", **trained.bpe
    )


def language_model(trained: Trained) -> GeneratorHubInterface:
    return TransformerLanguageModel.from_pretrained(
        str(trained.language_model_checkpoints),
        "checkpoint_best.pt",
        str(trained.language_model_data),
        tokenizer="moses",
        **trained.bpe,
    )


def hypotheses_of_both(call: Any) -> Hypotheses:
    both = run_both(call)
    assert_same_hypotheses(both.stock, both.fast)
    return both.fast


@pytest.mark.skipif(
    not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"), reason="torch before 2.5 refuses nothing"
)
def test_checkpoints_hold_at_most_one_name_that_the_safe_loader_refuses(trained):
    """A claim about upstream: what has to be allowed, and no more."""
    with torch.serialization.safe_globals([]):
        torch.serialization.clear_safe_globals()
        for checkpoint in ("checkpoint_best.pt", "checkpoint_last.pt"):
            path = trained.checkpoints / checkpoint
            assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == REFUSED
        path = trained.language_model_checkpoints / "checkpoint_best.pt"
        assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []  # its model has a dataclass


@pytest.mark.parametrize("beam", (1, 5))
def test_translator_translates_the_test_set(trained, beam):
    """All but a few sentences are right, so that these are outputs of a model that ends by itself."""
    hub, lines = translator(trained), trained.lines("test.en")
    both = run_both(lambda: hub.translate(lines, beam=beam, max_len_b=80))
    assert both.stock == both.fast
    right = [found == wanted for found, wanted in zip(both.fast, trained.lines("test.de"), strict=True)]
    assert sum(right) >= 0.8 * len(right), both.fast
    assert len({len(line.split()) for line in both.fast}) > 5


OPTIONS = {
    "defaults": {},
    "nbest": {"beam": 8, "nbest": 8, "lenpen": 0.6},
    "sampling_topk": {"beam": 4, "sampling": True, "sampling_topk": 5},
    "sampling_topp": {"beam": 4, "sampling": True, "sampling_topp": 0.9, "temperature": 1.4},
    "diverse_beam_groups": {"beam": 4, "diverse_beam_groups": 2},
    "diversity_rate": {"beam": 4, "diversity_rate": 0.3},
    "min_len": {"beam": 3, "min_len": 25, "max_len_b": 60},
    "max_len_a": {"beam": 3, "max_len_a": 0.6, "max_len_b": 1},
    "print_alignment": {"beam": 3, "print_alignment": "hard"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_translator_gives_the_same_hypotheses(trained, option):
    hub = translator(trained)
    hub.cfg.dataset.max_tokens = 4000  # one batch: with groups upstream stops with IndexError in the second
    tokens = [hub.encode(line) for line in trained.lines("test.en")[:24]]
    hypotheses_of_both(lambda: hub.generate(tokens, **OPTIONS[option]))


def test_translator_repeats_no_ngram(trained):
    hub = translator(trained)
    tokens = [hub.encode(line) for line in trained.lines("test.en")[:24]]
    hypotheses_of_both(lambda: hub.generate(tokens, beam=4, no_repeat_ngram_size=3, min_len=30, max_len_b=60))


def test_ensemble_of_checkpoints(trained):
    first, last = trained.epochs[-2], "checkpoint_last.pt"
    hub = translator(trained, f"{first}:{last}")
    assert len(hub.models) == 2
    tokens = [hub.encode(line) for line in trained.lines("test.en")[:16]]
    hypotheses_of_both(lambda: hub.generate(tokens, beam=4))


def test_batches_come_back_in_the_order_of_the_inputs(trained):
    hub = translator(trained)
    hub.cfg.dataset.batch_size = 7
    lines = trained.lines("test.en")
    both = run_both(lambda: hub.translate(lines, beam=4))
    assert both.stock == both.fast
    hub.cfg.dataset.batch_size = 1
    assert hub.translate(lines[:10], beam=4) == both.stock[:10]


def test_one_line_instead_of_a_list(trained):
    hub = translator(trained)
    both = run_both(lambda: hub.translate("two red boats and three cars."))
    assert both.stock == both.fast == "zwei rote Boote und drei Autos."


def test_reference_is_scored_alike(trained, numpy_compat):
    hub = language_model(trained)
    both = run_both(lambda: hub.score(trained.lines("test.en")[:12]))
    assert_same_hypotheses([[item] for item in both.stock], [[item] for item in both.fast])


@pytest.mark.parametrize("options", ({"beam": 4}, {"beam": 3, "sampling": True, "sampling_topk": 8}, {"beam": 1}))
def test_language_model_goes_on(trained, numpy_compat, options):
    hub = language_model(trained)
    starts = ["two", "three red boats,", "Anna's nine", "four old houses and six", "seven gardens, eight new"]
    both = run_both(lambda: hub.sample(starts, max_len_b=40, **options))
    assert both.stock == both.fast
    assert len({len(line.split()) for line in both.fast}) > 1
    assert all(line.startswith(start.rstrip(",")) for line, start in zip(both.fast, starts, strict=True))


def test_language_model_helps_the_translator(trained):
    """Any language model over the same words will do."""
    hub = translator(trained)
    words = hub.task.target_dictionary
    settings = {
        "tokens_per_sample": 200,
        "max_target_positions": 200,
        "decoder_input_dim": 16,
        "decoder_output_dim": 16,
    }
    extra = random_language_model(words, settings)
    tokens = [hub.encode(line) for line in trained.lines("test.en")[:12]]

    def call() -> Hypotheses:
        arguments = {"lm_model": extra, "lm_weight": 0.4}
        generator = hub.task.build_generator(
            hub.models, Namespace(beam=4, max_len_b=60), extra_gen_cls_kwargs=arguments
        )
        dataset = hub.task.build_dataset_for_inference(tokens, [len(row) for row in tokens])
        sample = dataset.collater([dataset[index] for index in range(len(tokens))])
        return hub.task.inference_step(generator, hub.models, sample)

    hypotheses_of_both(call)


def random_language_model(words: Any, settings: dict[str, Any]) -> torch.nn.Module:
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig
    from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

    task = LanguageModelingTask(LanguageModelingConfig(), words)
    return build("transformer_lm", task, 3, 1.5, **vars(TransformerLanguageModelConfig()) | SIZE | settings)


def test_bart_of_the_hub_samples_lines(trained):
    """`BARTHubInterface` over a random model and the BPE of the trained one: `sample` as in upstream's README."""
    hub = bart_hub(trained)
    lines = trained.lines("test.en")[:6]
    options = {"beam": 4, "lenpen": 2.0, "max_len_b": 20, "min_len": 5}
    both = run_both(lambda: hub.sample(lines, **options))
    assert both.stock == both.fast
    tokens = [hub.encode(line) for line in lines]
    hypotheses_of_both(lambda: hub.generate(tokens, **options))


def test_bart_of_the_hub_repeats_no_ngram(trained):
    hub = bart_hub(trained)
    tokens = [hub.encode(line) for line in trained.lines("test.en")[:6]]
    options = {"beam": 4, "lenpen": 2.0, "max_len_b": 30, "min_len": 15, "no_repeat_ngram_size": 3}
    hypotheses_of_both(lambda: hub.generate(tokens, **options))


@pytest.mark.parametrize("options", ({}, {"topk": 2, "match_source_len": False}), ids=("as long", "any length"))
def test_bart_of_the_hub_fills_masks(trained, options):
    hub = bart_hub(trained)
    both = run_both(
        lambda: hub.fill_mask(["two <mask> boats.", "<mask> cars and three old <mask>."], beam=4, **options)
    )
    for stock, fast in zip(both.stock, both.fast, strict=True):
        assert [text for text, _ in stock] == [text for text, _ in fast]
        torch.testing.assert_close([score for _, score in fast], [score for _, score in stock], atol=1e-4, rtol=1e-4)


def bart_hub(trained: Trained) -> BARTHubInterface:
    """A tiny random BART over the BPE of the trained models."""
    base = translator(trained)
    words = Dictionary()
    for word in [*map(str, range(BPE_WORDS)), "<mask>"]:  # all: `encode` adds words that are not there, and stops
        words.add_symbol(word)
    base.task.src_dict = base.task.tgt_dict = words
    sizes = {"max_source_positions": 256, "max_target_positions": 256}
    return BARTHubInterface(base.cfg, base.task, build("bart_base", base.task, 117, 2.5, **sizes))


def test_command_of_upstream_reads_the_checkpoint(trained):
    """The reference of all tests of commands: `fairseq-generate`, unpatched, in a process of its own."""
    flags = ["--path", "checkpoints/checkpoint_best.pt", "--gen-subset", "test", "--beam", "4", "--cpu"]
    printed = fairseq("generate", "data", *flags, *trained.flags, cwd=trained.folder).stdout.splitlines()
    found = dict(line.removeprefix("D-").split("\t")[::2] for line in printed if line.startswith("D-"))
    expected = translator(trained).translate(trained.lines("test.en"), beam=4)
    assert [found[str(index)] for index in range(len(expected))] == expected
