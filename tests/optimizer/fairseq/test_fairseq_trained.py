"""Trained fairseq models load through the hub, translate, score and continue texts as in unpatched fairseq."""

import types
from argparse import Namespace
from typing import Any

import numpy
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.bart import BARTHubInterface
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq_command_data import encoded_data, language_model_data
from fairseq_generation import assert_same_hypotheses, run_both
from fairseq_models import build

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def safe_loading_of_checkpoints():
    """Allows the class without which the unpatched library cannot read its own checkpoints."""
    if not hasattr(torch.serialization, "safe_globals"):
        yield
        return
    with torch.serialization.safe_globals([Namespace]):
        yield


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    return encoded_data(tmp_path_factory.getbasetemp(), "gpt2")


@pytest.fixture
def hub(translation):
    folder = translation.folder
    files = {"gpt2_encoder_json": str(folder / "encoder.json"), "gpt2_vocab_bpe": str(folder / "vocab.bpe")}
    paths = str(folder / "model"), "checkpoint_best.pt:checkpoint_last.pt", str(folder / "bin")
    hub = TransformerModel.from_pretrained(*paths, bpe="gpt2", **files)
    hub.lines = [hub.bpe.decode(line) for line in (folder / "test.de").read_text(encoding="utf-8").splitlines()]
    return hub


@pytest.fixture
def language_model(tmp_path_factory, monkeypatch):
    if not hasattr(numpy, "compat"):  # upstream's `TokenBlockDataset` reads it, and numpy 2 does not have it
        monkeypatch.setattr(numpy, "compat", types.SimpleNamespace(long=numpy.int64), raising=False)
    folder = language_model_data(tmp_path_factory.getbasetemp())
    hub = TransformerLanguageModel.from_pretrained(str(folder / "model"), "checkpoint_last.pt", str(folder / "bin"))
    hub.lines = (folder / "test.en").read_text(encoding="utf-8").splitlines()
    return hub


@pytest.fixture
def bart(hub):
    """A tiny random BART over the BPE of the trained models."""
    words = Dictionary()
    for word in [*map(str, range(len(hub.bpe.bpe.encoder))), "<mask>"]:  # `encode` adds words that are not there
        words.add_symbol(word)
    hub.task.src_dict = hub.task.tgt_dict = words
    sizes = {"max_source_positions": 256, "max_target_positions": 256}
    bart = BARTHubInterface(hub.cfg, hub.task, build("bart_base", hub.task, 117, 2.5, **sizes))
    bart.lines = hub.lines
    return bart


def assert_same_from_tokens(hub: Any, lines: int, **options: Any) -> None:
    tokens = [hub.encode(line) for line in hub.lines[:lines]]
    both = run_both(lambda: hub.generate(tokens, **options))
    assert_same_hypotheses(both.stock, both.fast)


@pytest.mark.parametrize("beam", (1, 5))
@pytest.mark.parametrize("batch_size", (7, 1), ids=("batches", "one by one"))
def test_translations_come_back_in_the_order_of_the_inputs(hub, beam, batch_size):
    hub.cfg.dataset.batch_size = batch_size
    both = run_both(lambda: hub.translate(hub.lines[:20], beam=beam, max_len_b=30))
    assert both.stock == both.fast and (beam == 1 or len(set(both.fast)) > 1)
    assert hub.translate(hub.lines[3], beam=beam, max_len_b=30) == both.stock[3]  # a line instead of a list


def test_diverse_groups_work_through_the_hub(hub):
    hub.cfg.dataset.max_tokens = 4000  # one batch: upstream stops with IndexError in the second
    assert_same_from_tokens(hub, 24, beam=4, diverse_beam_groups=2)


def test_references_are_scored_alike(language_model):
    both = run_both(lambda: language_model.score(language_model.lines[:12]))
    assert_same_hypotheses([[item] for item in both.stock], [[item] for item in both.fast])


@pytest.mark.parametrize("options", ({"beam": 4}, {"beam": 3, "sampling": True, "sampling_topk": 8}, {"beam": 1}))
def test_a_language_model_continues_texts_alike(language_model, options):
    starts = [" ".join(line.split()[:length]) for length, line in enumerate(language_model.lines[:5], start=1)]
    both = run_both(lambda: language_model.sample(starts, max_len_b=40, **options))
    assert both.stock == both.fast
    assert all(line.startswith(start) for line, start in zip(both.fast, starts, strict=True))


def test_bart_of_the_hub_samples_lines(bart):
    options = {"beam": 4, "lenpen": 2.0, "max_len_b": 20, "min_len": 5}
    both = run_both(lambda: bart.sample(bart.lines[:6], **options))
    assert both.stock == both.fast
    assert_same_from_tokens(bart, 6, **options)
    assert_same_from_tokens(bart, 6, **options | {"max_len_b": 30, "min_len": 15, "no_repeat_ngram_size": 3})


@pytest.mark.parametrize("options", ({}, {"topk": 2, "match_source_len": False}), ids=("as long", "any length"))
def test_bart_of_the_hub_fills_masks(bart, options):
    masked = [f"{bart.lines[0]} <mask>", f"<mask> {bart.lines[1]} <mask>"]
    both = run_both(lambda: bart.fill_mask(masked, beam=4, **options))
    for stock, fast in zip(both.stock, both.fast, strict=True):
        assert [text for text, _ in stock] == [text for text, _ in fast]
        torch.testing.assert_close([score for _, score in fast], [score for _, score in stock], atol=1e-4, rtol=1e-4)
