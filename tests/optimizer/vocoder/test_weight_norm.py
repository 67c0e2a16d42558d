"""Vocoders with weight norm: what a weight is made of may change, and the module stays as it is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from vocoders import ONEDNN, assert_same, of_class, onednn, waveforms

import fastgen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]

NORMS = pytest.mark.parametrize(
    "norm", [nn.utils.weight_norm, parametrizations.weight_norm], ids=["hook", "parametrized"]
)


@pytest.fixture(autouse=True)
def for_all_layers():
    with onednn():
        yield


def normed(norm, name="SeamlessM4THifiGan"):
    pytest.importorskip("fairseq" if "fairseq" in name else "transformers")
    return of_class(name).put_weight_norm(norm)


@NORMS
@pytest.mark.parametrize("name", ["SeamlessM4THifiGan", "fairseq Generator"])
def test_waveforms_of_weights_with_norm_are_those_of_the_library(norm, name):
    vocoder = normed(norm, name)
    inputs = vocoder.inputs(2, 5)
    for _ in range(3):
        found, expected, report = waveforms(vocoder, *inputs)
        assert report.kernels[ONEDNN] == 1
        assert_same(found, expected)


def originals(layer):
    """Its length and its direction."""
    if "weight_g" in layer._parameters:
        return layer.weight_g, layer.weight_v
    return layer.parametrizations.weight.original0, layer.parametrizations.weight.original1


@NORMS
@pytest.mark.parametrize("part", [0, 1], ids=["length", "direction"])
def test_changes_are_noticed(norm, part):
    vocoder = normed(norm)
    inputs = vocoder.inputs(1, 5)
    layer = vocoder.generator.conv_pre
    last = waveforms(vocoder, *inputs)[0]

    def in_place():
        originals(layer)[part].mul_(torch.rand_like(originals(layer)[part]) + 0.5)

    def through_data():
        originals(layer)[part].data.mul_(torch.rand_like(originals(layer)[part]) + 0.5)

    def other_data():
        originals(layer)[part].data = torch.rand_like(originals(layer)[part]) + 0.5

    def loaded():
        weights = vocoder.generator.state_dict()
        weights = {name: weight * (torch.rand_like(weight) + 0.5) for name, weight in weights.items()}
        vocoder.generator.load_state_dict(weights)

    def stepped():
        optimizer = torch.optim.SGD(vocoder.generator.parameters(), lr=0.01)
        with torch.enable_grad():
            vocoder.generator.train()(*inputs).sum().backward()
        optimizer.step()
        vocoder.generator.eval()

    for change in (in_place, through_data, other_data, loaded, stepped):
        with torch.no_grad():
            change()
        found, expected, report = waveforms(vocoder, *inputs)
        assert report.kernels[ONEDNN] == 1
        assert_same(found, expected)
        assert (found - last).abs().max() > 1e-4, change
        last = found


@NORMS
def test_the_module_stays_what_it_is(norm):
    vocoder, other = normed(norm), normed(norm)
    inputs = vocoder.inputs(1, 5)
    before = {name: weight.clone() for name, weight in vocoder.generator.state_dict().items()}
    with torch.no_grad():
        vocoder.generator(*inputs)
        with fastgen.disabled():
            other.generator(*inputs)
    after = vocoder.generator.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for mine, theirs in zip(vocoder.generator.modules(), other.generator.modules()):
        assert list(vars(mine)) == list(vars(theirs))
        assert list(map(type, mine._forward_pre_hooks.values())) == list(map(type, theirs._forward_pre_hooks.values()))
        if "weight" in vars(theirs):
            assert torch.equal(mine.weight, theirs.weight)


@NORMS
def test_training_goes_on_as_without(norm):
    trained = []
    for switch in (fastgen.enabled(), fastgen.disabled()):
        vocoder = normed(norm)
        torch.manual_seed(1)
        inputs = vocoder.inputs(1, 5)
        optimizer = torch.optim.SGD(vocoder.generator.parameters(), lr=0.01)
        with switch:
            for _ in range(3):
                with torch.no_grad():
                    vocoder.generator.eval()(*inputs)
                optimizer.zero_grad()
                vocoder.generator.train()(*inputs).pow(2).sum().backward()
                optimizer.step()
        trained.append(vocoder.generator.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[1])


@NORMS
def test_weight_norm_may_be_removed_after_a_call(norm):
    vocoder = normed(norm)
    inputs = vocoder.inputs(1, 5)
    with_norm = waveforms(vocoder, *inputs)[1]
    for layer in vocoder.convolutions():
        if norm is nn.utils.weight_norm:
            nn.utils.remove_weight_norm(layer)
        else:
            parametrize.remove_parametrizations(layer, "weight")
    found, expected, _ = waveforms(vocoder, *inputs)
    assert_same(found, expected)
    assert_same(found, with_norm)
    with torch.no_grad():
        vocoder.generator.conv_pre.weight.mul_(1.5)
    assert_same(*waveforms(vocoder, *inputs)[:2])


@NORMS
def test_copies_have_weights_of_their_own(norm):
    vocoder = normed(norm)
    inputs = vocoder.inputs(1, 5)
    waveforms(vocoder, *inputs)
    copied = vocoder._replace(generator=copy.deepcopy(vocoder.generator))
    assert_same(waveforms(copied, *inputs)[0], waveforms(vocoder, *inputs)[1])
    with torch.no_grad():
        originals(copied.generator.conv_pre)[0].mul_(1.5)
    for one in (copied, vocoder):
        assert_same(*waveforms(one, *inputs)[:2])


def test_a_vocoder_with_hooks_is_pickled_after_a_call():
    vocoder = normed(nn.utils.weight_norm)
    inputs = vocoder.inputs(1, 5)
    vocoder.generator(*inputs)  # leaves a weight with gradients, which nobody can copy
    expected = waveforms(vocoder, *inputs)[1]
    loaded = pickle.loads(pickle.dumps(vocoder.generator))
    assert_same(waveforms(vocoder._replace(generator=loaded), *inputs)[0], expected)


@NORMS
def test_types_may_change(norm):
    vocoder = normed(norm)
    (states,) = vocoder.inputs(1, 5)
    waveforms(vocoder, states)
    vocoder.generator.double()
    assert_same(*waveforms(vocoder, states.double())[:2])
    vocoder.generator.float()
    assert_same(*waveforms(vocoder, states)[:2])


def test_a_weight_that_somebody_has_written_in_is_folded_again():
    vocoder = normed(nn.utils.weight_norm)
    inputs = vocoder.inputs(1, 5)
    waveforms(vocoder, *inputs)
    with torch.no_grad():
        vocoder.generator(*inputs)
        vocoder.generator.conv_pre.weight.mul_(3)
    assert_same(*waveforms(vocoder, *inputs)[:2])


def test_another_parametrization_is_read_as_the_library_reads_it():
    vocoder = of_class("SeamlessM4THifiGan")
    parametrizations.spectral_norm(vocoder.generator.conv_post)
    found, expected, report = waveforms(vocoder, *vocoder.inputs(1, 5))
    assert report.kernels[ONEDNN] == 1
    assert_same(found, expected)


def test_two_parametrizations_of_one_weight_are_read_as_the_library_reads_them():
    vocoder = normed(parametrizations.weight_norm)
    parametrize.register_parametrization(vocoder.generator.conv_post, "weight", nn.Hardtanh(-0.1, 0.1))
    found, expected, report = waveforms(vocoder, *vocoder.inputs(1, 5))
    assert report.kernels[ONEDNN] == 1
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_layers_with_other_hooks_on_their_weights_are_called(name):
    vocoder = of_class("SeamlessM4THifiGan")
    layer = vocoder.generator.conv_post
    prune.random_unstructured(layer, "weight", amount=0.5)
    if name == "bias":
        nn.utils.weight_norm(layer, "bias", None)
    before = waveforms(vocoder, *vocoder.inputs(1, 5))[0]
    layer.weight_orig.data.mul_(2)
    found, expected, _ = waveforms(vocoder, *vocoder.inputs(1, 5))
    assert_same(found, expected)
    assert (found - before).abs().max() > 1e-4
