"""ProphetNet in fairseq uses fastgen's loop and caches, with the hypotheses of unpatched fairseq."""

from typing import Any

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq_generation import compare, lengths
from fairseq_models import Case
from models.prophetnet.tiny import dictionary, prophetnet, tokens
from reports import capturing, replays

from fastgen.models.prophetnet import NgramTransformerDecoder, NgramTransformerProphetModel

SHARED = [
    "beams: the device is read once in a step, and where hypotheses end",
    "self-attention: written in place, moved once for all layers, 2 layers",
    "cross-attention keys and values: once per input, 2 layers",
    "encoder output: never repeated",
]
OPTIONS: dict[str, dict[str, Any]] = {
    "beams": {},
    "one beam": {"beam": 1},
    "long": {"max_len_b": 38, "min_len": 30},
    "sentences that leave": {"max_len_b": 38},
    "sampling": {"sampling": True, "sampling_topk": 4},
    "diverse beams": {"beam": 4, "diverse_beam_groups": 2},
    "prefixes": {"inference": {"prefix_tokens": tokens(3, 3, 3, seed=2)}},
}


def case_of(words: Any, *models: NgramTransformerProphetModel) -> Case:
    source, sizes = tokens(7, 5, 6), torch.tensor([7, 5, 6])
    sample = {"id": torch.arange(3), "net_input": {"src_tokens": source, "src_lengths": sizes}}
    return Case(list(models), TranslationTask(TranslationConfig(), words, words), sample)


@pytest.fixture
def words(tmp_path):
    return dictionary(tmp_path)


@pytest.mark.parametrize("captured", (False, True))
@pytest.mark.parametrize("option", OPTIONS)
def test_keys_are_shared_and_hypotheses_are_the_same(words, option, captured):
    with capturing("on" if captured else "off"):
        both = compare(case_of(words, prophetnet(words)), **OPTIONS[option])
    assert both.report.shared == SHARED
    assert (replays(both.report) > 2) == captured, both.report
    assert option != "sentences that leave" or len(set(map(max, lengths(both.stock)))) > 1


def test_hypotheses_may_fill_the_table_of_positions(words):
    model = prophetnet(words, max_target_positions=12)
    both = compare(case_of(words, model), max_len_b=100, min_len=10)
    assert max(map(max, lengths(both.stock))) == 12


def test_ensembles_of_prophetnet_share_keys(words):
    report = compare(case_of(words, prophetnet(words), prophetnet(words, seed=3, ngram=3))).report
    assert "self-attention: written in place, moved once for all layers, 4 layers" in report.shared


def test_decoders_and_layers_that_inherit_are_left_to_fairseq(words):
    class Decoder(NgramTransformerDecoder):
        pass

    class Layer(type(prophetnet(words).decoder.layers[0])):
        pass

    for part, kind in (("decoder", Decoder), ("decoder.layers.1", Layer)):
        model = prophetnet(words)
        model.get_submodule(part).__class__ = kind
        report = compare(case_of(words, model), accelerated=False).report
        assert any(kind.__name__ in reason for reason in report.fallbacks), report


def test_an_attention_with_its_own_forward_keeps_its_keys(words):
    model, calls = prophetnet(words), []
    attention = model.decoder.layers[0].ngram_self_attn

    def forward(*args: Any) -> torch.Tensor:
        calls.append(args)
        return type(attention).forward(attention, *args)

    attention.forward = forward
    report = compare(case_of(words, model)).report
    assert "self-attention: written in place, moved once for all layers, 1 layers" in report.shared and calls
