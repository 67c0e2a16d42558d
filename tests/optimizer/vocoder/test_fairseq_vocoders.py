"""fairseq's vocoders, loaded from files as its users load them."""

from __future__ import annotations

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.models.text_to_speech.codehifigan import CodeGenerator
from fairseq.models.text_to_speech.hifigan import Generator
from fairseq.models.text_to_speech.vocoder import CodeHiFiGANVocoder, HiFiGANVocoder
from vocoders import CHANNELS, ONEDNN, SHAPE, assert_same, make_loud, onednn

import fastgen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]

DURATIONS = {"encoder_embed_dim": 4, "var_pred_hidden_dim": 4, "var_pred_kernel_size": 3, "var_pred_dropout": 0.5}
UNITS = {**SHAPE, "model_in_dim": 4, "num_embeddings": 30, "embedding_dim": 4, "dur_predictor_params": DURATIONS}
SPEAKERS = {**UNITS, "model_in_dim": 12, "multispkr": True, "num_speakers": 3, "f0": True, "f0_quant_num_bin": 5}
SPECTROGRAMS = {**SHAPE, "model_in_dim": CHANNELS}


def saved(folder, generator):
    path = folder / "generator.pt"
    torch.save({"generator": make_loud(generator).state_dict()}, path)
    return str(path)


@pytest.fixture
def unit_vocoder(tmp_path):
    torch.manual_seed(0)
    return CodeHiFiGANVocoder(saved(tmp_path, CodeGenerator(UNITS)), UNITS)


@pytest.fixture
def spectrogram_vocoder(tmp_path):
    torch.manual_seed(0)
    return HiFiGANVocoder(saved(tmp_path, Generator(SPECTROGRAMS)), SPECTROGRAMS)


def compared(call, *names):
    """Calls with and without fastgen; these are what the report has to name."""
    found = call()
    report = fastgen.explain()
    with fastgen.disabled():
        assert_same(found, call())
    assert [report.kernels[name] for name in names] == [1] * len(names)
    return report


@pytest.mark.parametrize("with_durations", [False, True])
def test_units_become_the_same_waveform(unit_vocoder, with_durations):
    codes = torch.tensor([[3, 4, -1, 9, 2, 2, -1, 7]])
    with onednn():
        compared(lambda: unit_vocoder({"code": codes}, with_durations), ONEDNN)


def test_units_with_speakers_and_pitches_become_the_same_waveform():
    torch.manual_seed(0)
    model = make_loud(CodeGenerator(SPEAKERS)).eval()
    given = {"code": torch.randint(30, (2, 5)), "spkr": torch.randint(3, (2, 1)), "f0": torch.randint(5, (2, 10))}
    with torch.no_grad(), onednn():
        compared(lambda: model(**given), ONEDNN)


def test_a_unit_vocoder_removes_its_weight_norm_itself(unit_vocoder):
    assert not [name for name in unit_vocoder.state_dict() if name.endswith("_g")]


@pytest.mark.parametrize("shape", [(6, CHANNELS), (1, 6, CHANNELS), (3, 6, CHANNELS)])
def test_spectrograms_become_the_same_waveform_with_gradients_switched_on(spectrogram_vocoder, shape):
    assert any(name.endswith("_g") for name in spectrogram_vocoder.state_dict())
    spectrogram = torch.randn(shape)
    assert torch.is_grad_enabled()
    with onednn():
        compared(lambda: spectrogram_vocoder(spectrogram), ONEDNN)


def test_weight_norm_may_be_removed_before_and_after_a_call(spectrogram_vocoder):
    spectrogram = torch.randn(6, CHANNELS)
    with fastgen.disabled():
        expected = spectrogram_vocoder(spectrogram)
    with onednn():
        assert_same(spectrogram_vocoder(spectrogram), expected)
        spectrogram_vocoder.model.remove_weight_norm()
        compared(lambda: spectrogram_vocoder(spectrogram), ONEDNN)
    assert not any(name.endswith("_g") for name in spectrogram_vocoder.state_dict())


def test_hooks_find_gradients_where_the_library_records_them(spectrogram_vocoder):
    found = []
    spectrogram_vocoder.model.resblocks[0].register_forward_hook(
        lambda module, inputs, output: found.append(output.requires_grad)
    )
    spectrogram_vocoder(torch.randn(6, CHANNELS))
    assert found == [True]
