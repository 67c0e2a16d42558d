"""Weight norm, folded for inference: what it was made of is noticed, and the module stays as it is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from vocoders import FOLDED, assert_same, of_class, onednn, waveforms

import fastgen
from fastgen.config import CONFIG
from fastgen.optimizer.vocoder import weights as kept

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]

NORMS = pytest.mark.parametrize(
    "norm", [nn.utils.weight_norm, parametrizations.weight_norm], ids=["hook", "parametrized"]
)


@pytest.fixture(autouse=True, params=["torch", "oneDNN"])
def way(request):
    """Folded weights are read by the forward with both kinds of convolutions."""
    with onednn(request.param == "oneDNN"):
        yield


@pytest.fixture
def folds(monkeypatch):
    """The shapes of weights that were folded, in their order."""
    shapes, fold = [], kept._fold

    def noting(norm):
        shapes.append(norm.direction.shape)
        return fold(norm)

    monkeypatch.setattr(kept, "_fold", noting)
    return shapes


def normed(norm, name="SeamlessM4THifiGan"):
    pytest.importorskip("fairseq" if "fairseq" in name else "transformers")
    return of_class(name).put_weight_norm(norm)


@NORMS
@pytest.mark.parametrize("name", ["SeamlessM4THifiGan", "SpeechT5HifiGan", "VitsHifiGan", "fairseq Generator"])
def test_weights_are_folded_once(norm, name, folds):
    vocoder = normed(norm, name)
    inputs = vocoder.inputs(2, 5)
    for _ in range(3):
        found, expected, report = waveforms(vocoder, *inputs)
        assert report.kernels[FOLDED] == 1
        assert_same(found, expected)
    assert len(folds) == len(vocoder.convolutions())


def originals(layer):
    """Its length and its direction."""
    if "weight_g" in layer._parameters:
        return layer.weight_g, layer.weight_v
    return layer.parametrizations.weight.original0, layer.parametrizations.weight.original1


@NORMS
@pytest.mark.parametrize("part", [0, 1], ids=["length", "direction"])
def test_changes_are_noticed(norm, part, folds):
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
        folds.clear()
        with torch.no_grad():
            change()
        found, expected, report = waveforms(vocoder, *inputs)
        assert report.kernels[FOLDED] == 1
        assert_same(found, expected)
        assert (found - last).abs().max() > 1e-4, change
        assert folds
        last = found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_checksum_tells_of_a_change_beside_a_huge_number(dtype):
    direction = torch.randn(3, 4, 5).to(dtype)
    direction[0, 0, 0] = torch.finfo(dtype).max
    norm = kept.Norm(direction, torch.ones(3, 1, 1, dtype=dtype), 0)
    before = kept._checksum(norm)
    direction.data[0, 1, 1] += 1
    assert not torch.equal(before, kept._checksum(norm))


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
    found, expected, report = waveforms(vocoder, *inputs)
    assert FOLDED not in report.kernels
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


@NORMS
def test_no_copies_are_kept_where_none_are_wanted(norm, monkeypatch, folds):
    monkeypatch.setattr(CONFIG, "pack", False)
    vocoder = normed(norm)
    for _ in range(2):
        assert_same(*waveforms(vocoder, *vocoder.inputs(1, 5))[:2])
    assert len(folds) == 2 * len(vocoder.convolutions())


def test_another_parametrization_is_left_alone():
    vocoder = of_class("SeamlessM4THifiGan")
    parametrizations.spectral_norm(vocoder.generator.conv_pre)
    found, expected, report = waveforms(vocoder, *vocoder.inputs(1, 5))
    assert torch.equal(found, expected)
    assert any("another parametrization" in reason for reason in report.fallbacks)


def test_two_parametrizations_of_one_weight_are_left_alone():
    vocoder = normed(parametrizations.weight_norm)
    parametrize.register_parametrization(vocoder.generator.conv_pre, "weight", nn.Hardtanh(-0.1, 0.1))
    found, expected, report = waveforms(vocoder, *vocoder.inputs(1, 5))
    assert torch.equal(found, expected)
    assert not report.kernels
