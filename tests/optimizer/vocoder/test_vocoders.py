"""The forward of every HiFi-GAN, with oneDNN, against the library's."""

from __future__ import annotations

import copy
import io
import threading
from unittest import mock

import pytest
import torch
from torch import nn
from vocoders import (
    CLASSES,
    ONEDNN,
    SHAPE,
    assert_same,
    make_loud,
    of_class,
    onednn,
    waveforms,
)

import fastgen
from fastgen.optimizer import vocoder as op
from fastgen.optimizer.decoding.report import VOCODER

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")


def vocoder_of(name):
    pytest.importorskip("fairseq" if "fairseq" in name else "transformers")
    return of_class(name)


@needs_onednn
@pytest.mark.parametrize("name", CLASSES)
def test_waveforms_of_onednn_are_those_of_the_library(name):
    vocoder = vocoder_of(name)
    for batch, frames in ((1, 1), (1, 2), (1, 7), (1, 40), (2, 1), (3, 9)):
        with onednn():
            found, expected, report = waveforms(vocoder, *vocoder.inputs(batch, frames))
        assert report.kernels[ONEDNN] == 1
        assert_same(found, expected)


@pytest.mark.parametrize("version", ["", "v2"])
def test_units_of_seamless_become_waveforms_and_lengths_of_the_library(version):
    import transformers
    from transformers.models import seamless_m4t, seamless_m4t_v2

    config = getattr(transformers, f"SeamlessM4T{version}Config")
    models = seamless_m4t_v2.modeling_seamless_m4t_v2 if version else seamless_m4t.modeling_seamless_m4t
    sizes = {"unit_embed_dim": 4, "lang_embed_dim": 2, "spkr_embed_dim": 2, "unit_hifi_gan_vocab_size": 30}
    torch.manual_seed(0)
    vocoder = make_loud(getattr(models, f"SeamlessM4T{version}CodeHifiGan")(config(**SHAPE, **sizes))).eval()
    voice, language = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.long)
    for batch, units in ((1, 9), (3, 7)):
        units = torch.randint(2, 30, (batch, units))
        given = units, voice.expand(batch, 1), language.expand(batch, 1)
        with torch.no_grad(), onednn():
            found, lengths = vocoder(*given)
            assert fastgen.explain().kernels[ONEDNN] == 1
            with fastgen.disabled():
                expected, expected_lengths = vocoder(*given)
        assert_same(found, expected)
        assert torch.equal(lengths, expected_lengths)


@needs_onednn
def test_weights_that_were_written_in_place_or_replaced_are_noticed():
    vocoder = vocoder_of("SeamlessM4THifiGan")
    inputs = vocoder.inputs(1, 6)
    with onednn():
        before = waveforms(vocoder, *inputs)[0]
        vocoder.generator.conv_pre.weight.data.mul_(1.5)
        found, expected, _ = waveforms(vocoder, *inputs)
        assert_same(found, expected)
        assert (found - before).abs().max() > 1e-3
        for change in ("parameter", "data", "slope"):
            if change == "parameter":
                vocoder.generator.conv_post.weight = nn.Parameter(torch.randn(1, 4, 7) / 5)
            elif change == "data":
                vocoder.generator.conv_post.weight.data = torch.randn(1, 4, 7) / 5
            else:
                vocoder.generator.leaky_relu_slope = 0.3
            found, expected, report = waveforms(vocoder, *inputs)
            assert report.kernels[ONEDNN] == 1
            assert_same(found, expected)


def test_a_waveform_is_not_written_by_later_calls():
    vocoder = vocoder_of("SeamlessM4THifiGan")
    with onednn(), torch.no_grad():
        first = vocoder.generator(*vocoder.inputs(1, 6))
        kept = first.clone()
        vocoder.generator(*vocoder.inputs(1, 6))
        vocoder.generator(*vocoder.inputs(1, 4))
    assert torch.equal(first, kept)


def test_threads_may_call_one_vocoder():
    vocoder = vocoder_of("SeamlessM4THifiGan").put_weight_norm()
    given = [vocoder.inputs(1, frames) for frames in (3, 5, 8, 9)]
    with fastgen.disabled(), torch.no_grad():
        expected = [vocoder.generator(*inputs) for inputs in given]
    wrong, calls = [], []

    def call(place):
        for _ in range(10):
            with torch.no_grad():
                found = vocoder.generator(*given[place])
            calls.append(fastgen.explain().kernels[ONEDNN])
            if not torch.allclose(found, expected[place], rtol=0, atol=1e-5):
                wrong.append(place)

    with onednn():
        threads = [threading.Thread(target=call, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(calls) == 40
    assert all(calls)


def left_alone(vocoder, *inputs):
    """The reasons, after a comparison."""
    found, expected, report = waveforms(vocoder, *inputs)
    assert torch.equal(found, expected)
    assert not report.kernels
    return " ".join(report.fallbacks + report.decisions)


def test_what_is_left_to_the_library_has_a_reason():
    vocoder = vocoder_of("SeamlessM4THifiGan")
    inputs = vocoder.inputs(1, 5)
    with onednn():
        assert waveforms(vocoder, *inputs)[2].kernels[ONEDNN] == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "autocast" in left_alone(vocoder, *inputs)
        with mock.patch.object(nn.functional, "conv1d", lambda *args: torch.conv1d(*args)):
            assert "no layer is known" in left_alone(vocoder, *inputs)
        assert waveforms(vocoder, *inputs)[2].kernels[ONEDNN] == 1
    with onednn(False):
        assert "too few to gain" in left_alone(vocoder, *inputs)


def test_a_vocoder_in_training_mode_gives_the_same_waveform():
    vocoder = vocoder_of("SeamlessM4THifiGan")
    vocoder.generator.train()
    with onednn():
        assert_same(*waveforms(vocoder, *vocoder.inputs(1, 5))[:2])


@needs_onednn
def test_hooks_are_called_and_see_the_states_of_the_library():
    vocoder = vocoder_of("SeamlessM4THifiGan")
    inputs = vocoder.inputs(1, 5)
    block = vocoder.generator.resblocks[0]
    for module in (vocoder.generator.conv_pre, block.convs1[0], block, vocoder.generator.upsampler[1]):
        seen = []
        handle = module.register_forward_hook(lambda module, args, output, seen=seen: seen.append((*args, output)))
        with onednn():
            found, expected, report = waveforms(vocoder, *inputs)
        handle.remove()
        assert report.kernels[ONEDNN] == 1
        assert_same(found, expected)
        for ours, theirs in zip(*seen, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@needs_onednn
def test_hooks_of_all_modules_are_called_as_often_as_in_the_library():
    vocoder, seen = vocoder_of("SeamlessM4THifiGan"), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(module))
    with onednn():
        found, expected, report = waveforms(vocoder, *vocoder.inputs(1, 5))
    handle.remove()
    assert report.kernels[ONEDNN] == 1
    assert_same(found, expected)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@needs_onednn
@pytest.mark.parametrize("place", ["layer", "block", "class", "method of a layer", "method of all layers"])
def test_forwards_of_the_program_are_called(place, monkeypatch):
    vocoder = vocoder_of("SeamlessM4THifiGan")
    inputs = vocoder.inputs(1, 5)
    block = vocoder.generator.resblocks[0]
    owner = {
        "layer": block.convs1[0],
        "block": block,
        "class": type(block),
        "method of a layer": block.convs1[0],
        "method of all layers": nn.Conv1d,
    }[place]
    name = "_conv_forward" if place.startswith("method") else "forward"
    forward = getattr(owner, name)
    with onednn():
        before = waveforms(vocoder, *inputs)[0]
        monkeypatch.setattr(owner, name, lambda *args: forward(*args) * 1.5)
        found, expected, _ = waveforms(vocoder, *inputs)
    assert_same(found, expected)
    assert (found - before).abs().max() > 1e-3


def test_layers_with_code_of_their_own_are_called():
    class Louder(nn.Conv1d):
        def forward(self, input):
            return super().forward(input) * 2

    vocoder = vocoder_of("SeamlessM4THifiGan")
    inputs = vocoder.inputs(1, 5)
    for name in ("conv_pre", "conv_post"):
        old = getattr(vocoder.generator, name)
        setattr(vocoder.generator, name, Louder(old.in_channels, old.out_channels, 7, padding=3))
        with onednn():
            assert_same(*waveforms(vocoder, *inputs)[:2])


@needs_onednn
def test_a_layer_that_changes_the_length_fails_as_in_the_library():
    vocoder = vocoder_of("SeamlessM4THifiGan")
    block = vocoder.generator.resblocks[0]
    block.convs2[0] = nn.Conv1d(8, 8, 4, padding=1)
    for switch in (onednn(), fastgen.disabled()):
        with switch, torch.no_grad(), pytest.raises(RuntimeError, match="must match the size"):
            vocoder.generator(*vocoder.inputs(1, 5))
    block.convs2[0] = nn.Conv1d(8, 8, 4, stride=100, padding=1)  # one step, which is added to each
    with onednn():
        assert_same(*waveforms(vocoder, *vocoder.inputs(1, 5))[:2])


def test_a_subclass_may_call_the_forward_of_the_library():
    from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4THifiGan

    class Louder(SeamlessM4THifiGan):
        def forward(self, inputs_embeds):
            return super().forward(inputs_embeds) * 2

    vocoder = vocoder_of("SeamlessM4THifiGan")
    vocoder.generator.__class__ = Louder
    with onednn():
        found, expected, report = waveforms(vocoder, *vocoder.inputs(1, 5))
    assert report.kernels[ONEDNN] == 1
    assert_same(found, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_are_those_of_the_library(name):
    vocoder = vocoder_of(name)
    inputs = vocoder.inputs(1, 5)
    gradients = []
    for switch in (onednn(), fastgen.disabled()):
        with switch:
            vocoder.generator.zero_grad()
            vocoder.generator(*inputs).sum().backward()
        gradients.append([weight.grad.clone() for weight in vocoder.generator.parameters() if weight.grad is not None])
    assert gradients[0]
    assert all(map(torch.equal, *gradients))


def test_double_precision_and_inference_mode():
    vocoder = vocoder_of("SeamlessM4THifiGan").put_weight_norm()
    (states,) = vocoder.inputs(1, 5)
    with torch.inference_mode(), onednn():
        found = vocoder.generator(states)
        assert fastgen.explain().kernels[ONEDNN] == 1
        assert found.is_inference()
    with onednn():
        assert_same(*waveforms(vocoder, states)[:2])
        vocoder.generator.double()
        found, expected, report = waveforms(vocoder, states.double())
        assert not report.kernels and report.codes(VOCODER) == {"DTYPE"}
        assert_same(found, expected)


def test_errors_are_those_of_the_library():
    vocoder = vocoder_of("SeamlessM4THifiGan")
    for wrong in (torch.randn(1, 7, 5), torch.randn(1, 8, 5, dtype=torch.float64), torch.randn(1, 8, 0)):
        errors = []
        for switch in (onednn(), fastgen.disabled()):
            with switch, torch.no_grad(), pytest.raises(RuntimeError) as caught:
                vocoder.generator(wrong)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


@needs_onednn
@pytest.mark.parametrize("frames", [op.MIN_FRAMES - 1, op.MIN_FRAMES])
def test_short_inputs_are_left_to_the_library(frames):
    vocoder = vocoder_of("SeamlessM4THifiGan")
    found, expected, report = waveforms(vocoder, *vocoder.inputs(1, frames))
    assert_same(found, expected)
    assert report.kernels[ONEDNN] == (frames == op.MIN_FRAMES)


def test_vocoders_are_compiled_in_one_graph():
    vocoder = vocoder_of("SeamlessM4THifiGan")
    inputs = vocoder.inputs(1, 5)
    compiled = torch.compile(vocoder.generator, backend="eager", fullgraph=True)
    with torch.no_grad(), fastgen.disabled():
        expected = vocoder.generator(*inputs)
    with torch.no_grad(), onednn():
        assert torch.equal(compiled(*inputs), expected)


def test_copies_and_files_of_a_vocoder_are_those_of_the_library():
    vocoder = vocoder_of("SeamlessM4THifiGan")
    inputs = vocoder.inputs(1, 5)
    with onednn():
        expected = waveforms(vocoder, *inputs)[1]
        assert_same(waveforms(vocoder._replace(generator=copy.deepcopy(vocoder.generator)), *inputs)[0], expected)
        file = io.BytesIO()
        torch.save(vocoder.generator, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert_same(waveforms(vocoder._replace(generator=loaded), *inputs)[0], expected)


def test_random_numbers_are_not_drawn():
    vocoder = vocoder_of("SeamlessM4THifiGan").put_weight_norm()
    inputs = vocoder.inputs(1, 5)
    before = torch.get_rng_state()
    with torch.no_grad(), onednn():
        vocoder.generator(*inputs)
        assert fastgen.explain().kernels[ONEDNN] == 1
    assert torch.equal(before, torch.get_rng_state())
