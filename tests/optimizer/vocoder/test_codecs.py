"""The decoders of EnCodec and Mimi, against the library's: whole `decode` calls, and what is left alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from vocoders import ONEDNN, make_loud, onednn

import fastgen
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer import vocoder as op
from fastgen.optimizer.decoding import verify

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN"),
]

FRAMES = op.MIN_FRAMES
SHAPE = {"num_filters": 4, "upsampling_ratios": [3, 2], "codebook_size": 16}


def encodec(**settings):
    config = transformers.EncodecConfig(**SHAPE, hidden_size=8, **settings)
    torch.manual_seed(0)
    return loud(transformers.EncodecModel(config))


def mimi(**settings):
    transformer = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    codes = {"codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "num_quantizers": 4}
    shape = SHAPE | transformer | codes
    config = transformers.MimiConfig(**shape, hidden_size=8, head_dim=4, upsample_groups=8, **settings)
    torch.manual_seed(0)
    return loud(transformers.MimiModel(config))


def loud(model):
    make_loud(model)
    for name, buffer in model.named_buffers():
        if name.endswith((".embed", ".embed_sum")):
            buffer.normal_()
    return model.eval()


def decoder_of(model):
    return next(one for one in model.modules() if type(one).__name__ in ("EncodecDecoder", "MimiDecoder"))


def decoded(decoder, states):
    """With fastgen, without it, and the report of the first."""
    with torch.no_grad():
        found = decoder(states)
        report = fastgen.explain()
        with fastgen.disabled():
            return found, decoder(states), report


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found.stride(), found.requires_grad) == (expected.stride(), expected.requires_grad)
    assert expected.abs().mean() > 0.01


def states_of(batch=1, frames=FRAMES):
    return torch.randn(batch, 8, frames)


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (encodec, {}),
        (encodec, {"use_causal_conv": False}),
        (encodec, {"trim_right_ratio": 0.5}),
        (encodec, {"pad_mode": "constant", "use_conv_shortcut": False}),
        (encodec, {"num_residual_layers": 2, "audio_channels": 2}),
        (mimi, {}),
        (mimi, {"pad_mode": "replicate"}),
        (mimi, {"use_causal_conv": False}),
        (mimi, {"use_conv_shortcut": True}),
    ],
)
def test_waveforms_are_those_of_the_library(build, settings):
    decoder = decoder_of(build(**settings))
    for batch, frames in ((1, FRAMES), (1, 301), (3, FRAMES + 1)):
        found, expected, report = decoded(decoder, states_of(batch, frames))
        assert report.kernels[ONEDNN] == 1, report
        assert_same(found, expected)


@pytest.mark.parametrize(("build", "shape"), [(encodec, (1, 2, 1, 40)), (mimi, (2, 4, 20))])
def test_codes_are_decoded_to_the_same_audio(build, shape):
    model, codes = build(), torch.randint(0, 16, shape)
    given = (codes, [None]) if build is encodec else (codes,)
    with torch.no_grad():
        found = model.decode(*given).audio_values
        assert fastgen.explain().kernels[ONEDNN] == 1
        with fastgen.disabled():
            assert_same(found, model.decode(*given).audio_values)


def test_each_layer_is_computed_in_the_way_that_its_weight_asks_for(monkeypatch):
    ways, is_faster = [], op.is_faster
    monkeypatch.setattr(op, "is_faster", lambda *given: ways.append(is_faster(*given)) or ways[-1])
    assert_same(*decoded(decoder_of(encodec()), states_of())[:2])
    changes = [before is not after for before, after in itertools.pairwise(ways)]
    assert (ways[0], ways[-1], sum(changes)) == (False, True, 1)


def test_changes_of_weights_with_norm_are_noticed():
    decoder, states = decoder_of(encodec()), states_of()
    for _ in range(2):
        before = decoded(decoder, states)[0]
    length = decoder.layers[0].conv.parametrizations.weight.original0
    with torch.no_grad():
        length.mul_(1.5)
    found, expected, _ = decoded(decoder, states)
    assert_same(found, expected)
    assert (found - before).abs().max() > 1e-3


def test_weights_without_norm_may_be_written_in():
    decoder, states = decoder_of(mimi()), states_of()
    before = decoded(decoder, states)[0]
    with torch.no_grad():
        decoder.layers[0].conv.weight.mul_(1.5)
    found, expected, _ = decoded(decoder, states)
    assert_same(found, expected)
    assert (found - before).abs().max() > 1e-3


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, parametrizations.weight_norm], ids=["hook", "parametrized"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_may_be_put_on_and_removed(norm):
    decoder, states = decoder_of(mimi()), states_of()
    plain = decoded(decoder, states)[0]
    layers = [one for one in decoder.modules() if isinstance(one, (nn.Conv1d, nn.ConvTranspose1d))]
    for layer in layers:
        norm(layer)
    found, expected, report = decoded(decoder, states)
    assert report.kernels[ONEDNN] == 1
    assert_same(found, expected)
    for layer in layers:
        if norm is nn.utils.weight_norm:
            nn.utils.remove_weight_norm(layer)
        else:
            parametrize.remove_parametrizations(layer, "weight")
    found, expected, _ = decoded(decoder, states)
    assert_same(found, expected)
    assert_same(found, plain)


def test_the_model_stays_what_it_is():
    model = encodec()
    before = copy.deepcopy(model.state_dict())
    assert decoded(decoder_of(model), states_of())[2].kernels[ONEDNN] == 1
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("build", [encodec, mimi])
@pytest.mark.parametrize("is_training", [True, False])
def test_gradients_of_codecs_are_those_of_the_library(build, is_training):
    decoder, states = decoder_of(build()).train(is_training), states_of()
    gradients = []
    for switch in (fastgen.enabled(), fastgen.disabled()):
        with switch:
            decoder.zero_grad()
            decoder(states).pow(2).sum().backward()
        gradients.append([weight.grad.clone() for weight in decoder.parameters()])
    assert gradients[0]
    assert all(map(torch.equal, *gradients))


def left_alone(decoder, states):
    """The reasons, after a comparison."""
    found, expected, report = decoded(decoder, states)
    assert torch.equal(found, expected)
    assert not report.kernels
    return " ".join(report.fallbacks + report.decisions)


def test_what_codecs_leave_to_the_library_has_a_reason():
    decoder, states = decoder_of(encodec()), states_of()
    assert "too few to gain" in left_alone(decoder, states_of(frames=FRAMES - 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in left_alone(decoder, states)
    assert "no layer is known" in left_alone(decoder_of(encodec(norm_type="time_group_norm")), states)
    assert "float64" in left_alone(decoder.double(), states.double())


def test_inputs_no_longer_than_what_a_layer_pads_become_the_same_waveform():
    for build in (encodec, mimi):
        with onednn():
            found, expected, report = decoded(decoder_of(build()), states_of(frames=3))
        assert report.kernels[ONEDNN] == 1
        assert_same(found, expected)


def test_codecs_in_training_mode_give_the_same_waveform():
    assert_same(*decoded(decoder_of(encodec()).train(), states_of())[:2])


def test_modules_with_code_of_their_own_are_called():
    decoder, states, calls = decoder_of(encodec()), states_of(), []

    def twice(module, args, output):
        calls.append(module)
        return output * 2

    first, block = decoder.layers[0], next(one for one in decoder.layers if hasattr(one, "block"))
    for module in (first, first.conv, block, block.block[-1], block.shortcut, nn.ELU):
        module = decoder.layers[2] if module is nn.ELU else module
        without = decoded(decoder, states)[1]
        handle = module.register_forward_hook(twice)
        found, expected, report = decoded(decoder, states)
        handle.remove()
        assert_same(found, expected)
        assert report.kernels[ONEDNN] == 1
        assert calls.count(module) == 2
        assert (found - without).abs().max() > 1e-4
    block.forward = lambda states: states
    assert_same(*decoded(decoder, states)[:2])
    del block.forward
    parametrize.register_parametrization(first.conv, "weight", nn.Hardtanh(-0.1, 0.1))
    assert_same(*decoded(decoder, states)[:2])


def test_errors_of_codecs_are_those_of_the_library():
    decoder = decoder_of(encodec())
    for wrong in (torch.randn(1, 7, FRAMES), torch.randn(1, 8, FRAMES, dtype=torch.float64)):
        errors = []
        for switch in (fastgen.enabled(), fastgen.disabled()):
            with switch, torch.no_grad(), pytest.raises(RuntimeError) as caught:
                decoder(wrong)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


@pytest.mark.parametrize("is_right", [True, False])
def test_with_newer_versions_the_first_waveform_of_a_class_is_compared(monkeypatch, is_right):
    from fastgen.optimizer.transformers.models import vocoders as host

    failed, real, decoder = [], host.faster_waveform, decoder_of(encodec())  # whose import would put patches on
    monkeypatch.setattr(verify, "_verified", set())
    monkeypatch.setattr(PATCH_SET, "untested_hosts", {"transformers"})
    monkeypatch.setattr(PATCH_SET, "fail", lambda group, reason: failed.append(group))
    monkeypatch.setattr(host, "faster_waveform", lambda *given: real(*given) + (0 if is_right else 0.01))
    found, expected, _ = decoded(decoder, states_of())
    assert torch.equal(found, expected)
    assert failed == ([] if is_right else ["transformers.encodec_decoder"])
    assert len(verify._verified) == is_right
