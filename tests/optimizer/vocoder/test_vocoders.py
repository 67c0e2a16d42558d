"""The vocoders of Seamless M4T and of fairseq, with oneDNN, against the library's own forward."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from parity import outcome
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from transformers.models.seamless_m4t import modeling_seamless_m4t
from transformers.models.seamless_m4t_v2 import modeling_seamless_m4t_v2

import fastgen
from fastgen.optimizer import vocoder as op
from fastgen.optimizer.decoding.report import VOCODER, Report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN"),
]

CHANNELS = 8
# Upsampling by an odd and an even number, with kernels that add a sample and kernels that do not.
SHAPE = {
    "upsample_initial_channel": 16,
    "upsample_rates": [3, 2],
    "upsample_kernel_sizes": [6, 4],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 2, 3]],
}
SEAMLESS = {**SHAPE, "unit_embed_dim": 4, "lang_embed_dim": 2, "spkr_embed_dim": 2, "unit_hifi_gan_vocab_size": 30}
DURATIONS = {"encoder_embed_dim": 4, "var_pred_hidden_dim": 4, "var_pred_kernel_size": 3, "var_pred_dropout": 0.5}
UNITS = {**SHAPE, "model_in_dim": 4, "num_embeddings": 30, "embedding_dim": 4, "dur_predictor_params": DURATIONS}
SPEAKERS = {**UNITS, "model_in_dim": 12, "multispkr": True, "num_speakers": 3, "f0": True, "f0_quant_num_bin": 5}
SPECTROGRAMS = {**SHAPE, "model_in_dim": CHANNELS}
MODELS = {"SeamlessM4T": modeling_seamless_m4t, "SeamlessM4Tv2": modeling_seamless_m4t_v2}


def loud(module: nn.Module) -> nn.Module:
    """Returns it with weights that keep states about as large as they come in, and biases that are heard."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape) * (weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.5))
    return module.eval()


def seamless(name: str, part: str = "HifiGan") -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**SEAMLESS)
    return loud(getattr(MODELS[name], name + part)(config))


def fairseq_class(module: str, name: str) -> type[nn.Module]:
    return getattr(pytest.importorskip(f"fairseq.models.text_to_speech.{module}"), name)


def fairseq_generator() -> nn.Module:
    generator = loud(fairseq_class("hifigan", "Generator")(SPECTROGRAMS))
    generator.remove_weight_norm()
    return generator


GENERATORS = {
    "SeamlessM4T": lambda: seamless("SeamlessM4T"),
    "SeamlessM4Tv2": lambda: seamless("SeamlessM4Tv2"),
    "fairseq": fairseq_generator,
}
NORMS = {"hook": nn.utils.weight_norm, "parametrized": parametrizations.weight_norm}


@contextmanager
def onednn(is_used: bool = True) -> Iterator[None]:
    """oneDNN for any number of frames and all layers, or for none."""
    with mock.patch.multiple(op, MIN_FRAMES=0 if is_used else sys.maxsize, MIN_INPUT=0):
        yield


@pytest.fixture
def generator():
    with onednn():
        yield seamless("SeamlessM4T")


def states(batch: int = 1, frames: int = 5) -> Tensor:
    return torch.randn(batch, CHANNELS, frames)


def with_norm(generator: nn.Module, norm: Callable) -> nn.Module:
    """Returns it with a weight norm on each layer that changes the weight."""
    for layer in [layer for layer in generator.modules() if isinstance(layer, (nn.Conv1d, nn.ConvTranspose1d))]:
        norm(layer)
        length = layer.weight_g if norm is nn.utils.weight_norm else layer.parametrizations.weight.original0
        with torch.no_grad():
            length.mul_(torch.rand_like(length) + 0.5)
    return generator


class Waveforms(NamedTuple):
    fast: Tensor
    report: Report

    @property
    def by_onednn(self) -> bool:
        return self.report.kernels[op.ONEDNN] == 1


def compared(call: Callable, *inputs: object, **named: object) -> Waveforms:
    """Calls with and without fastgen, which must return the same waveform to 1e-5, of the same kind."""
    with torch.no_grad():
        fast, report = call(*inputs, **named), fastgen.explain()
        with fastgen.disabled():
            stock = call(*inputs, **named)
    torch.testing.assert_close(fast, stock, rtol=0, atol=1e-5)
    first, expected = (one[0] if isinstance(one, tuple) else one for one in (fast, stock))
    assert first.stride() == expected.stride() and expected.abs().mean() > 0.01
    return Waveforms(first, report)


@pytest.mark.parametrize("norm", (None, *NORMS))
@pytest.mark.parametrize("name", GENERATORS)
def test_waveforms_are_those_of_the_library(name, norm):
    generator = GENERATORS[name]()
    if norm is not None:
        with_norm(generator, NORMS[norm])
    for batch, frames in ((1, 1), (1, 2), (1, 7), (1, 40), (2, 1), (3, 9)):
        with onednn():
            assert compared(generator, states(batch, frames)).by_onednn


@pytest.mark.parametrize("name", MODELS)
def test_units_of_seamless_become_the_same_waveforms_and_lengths(name):
    vocoder, code = seamless(name, "CodeHifiGan"), torch.ones(1, 1, dtype=torch.long)
    for batch, units in ((1, 9), (3, 7)):
        with onednn():
            inputs = torch.randint(2, 30, (batch, units)), 0 * code.expand(batch, 1), code.expand(batch, 1)
            assert compared(vocoder, *inputs).by_onednn


@pytest.mark.parametrize("norm", NORMS)
def test_vocoder_weights_that_change_are_read_again(generator, norm):
    last = compared(with_norm(generator, NORMS[norm]), states()).fast
    layer, sound = generator.conv_pre, states()

    def stepped() -> None:
        optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)
        with torch.enable_grad():
            generator.train()(sound).sum().backward()
        optimizer.step()
        generator.eval()

    changes = (
        lambda: next(layer.parameters()).mul_(1.5),
        lambda: next(layer.parameters()).data.mul_(1.5),
        lambda: generator.load_state_dict({name: 1.1 * weight for name, weight in generator.state_dict().items()}),
        stepped,
        lambda: setattr(generator, "conv_post", nn.Conv1d(4, 1, 7, padding=3)),
        lambda: setattr(generator, "leaky_relu_slope", 0.3),
    )
    for change in changes:
        with torch.no_grad():
            change()
        result = compared(generator, sound)
        assert result.by_onednn and (result.fast.shape != last.shape or (result.fast - last).abs().max() > 1e-4)
        last = result.fast


class Louder(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class LouderModel(modeling_seamless_m4t.SeamlessM4THifiGan):
    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return super().forward(inputs_embeds) * 2


PUT_IN: dict[str, Callable[[nn.Module], object]] = {
    "spectral norm": lambda generator: parametrizations.spectral_norm(generator.conv_post),
    "pruned": lambda generator: prune.random_unstructured(generator.conv_post, "weight", amount=0.5),
    "norm of a bias": lambda generator: nn.utils.weight_norm(generator.conv_post, "bias", None),
    "layers": lambda generator: setattr(generator, "conv_pre", Louder(CHANNELS, 16, 7, padding=3)),
    "training mode": lambda generator: generator.train(),
    "subclass": lambda generator: setattr(generator, "__class__", LouderModel),
    "one step that is added to each": lambda generator: generator.resblocks[0].convs2.__setitem__(
        0, nn.Conv1d(8, 8, 4, stride=100, padding=1)
    ),
}


@pytest.mark.parametrize("what", PUT_IN)
def test_changes_of_user_code_in_a_vocoder_are_heard(generator, what):
    PUT_IN[what](generator)
    assert compared(generator, states()).by_onednn


@pytest.mark.parametrize("place", ("layer", "block", "class", "method of a layer", "method of all layers"))
def test_forwards_of_user_code_in_a_vocoder_are_called(generator, place, monkeypatch):
    block, sound = generator.resblocks[0], states()
    layer = block.convs1[0]
    owners = {"block": block, "class": type(block), "method of all layers": nn.Conv1d}
    owner, name = owners.get(place, layer), "_conv_forward" if place.startswith("method") else "forward"
    forward, before = getattr(owner, name), compared(generator, sound).fast
    monkeypatch.setattr(owner, name, lambda *args: forward(*args) * 1.5)
    assert (compared(generator, sound).fast - before).abs().max() > 1e-3


def test_hooks_are_called_and_see_the_states_of_the_library(generator):
    block, register_for_all = generator.resblocks[0], nn.modules.module.register_module_forward_hook
    layers = [module.register_forward_hook for module in (generator.conv_pre, block.convs1[0], block)]
    for register in (*layers, generator.upsampler[1].register_forward_hook, register_for_all):
        seen: list = []
        handle = register(lambda module, args, output, seen=seen: seen.extend((*args, output)))
        assert compared(generator, states()).by_onednn
        handle.remove()
        torch.testing.assert_close(seen[: len(seen) // 2], seen[len(seen) // 2 :], rtol=0, atol=1e-5)


def test_vocoder_calls_left_to_the_library_have_a_reason(generator):
    cases = {
        "AUTOCAST": (torch.autocast("cpu", dtype=torch.bfloat16), torch.float32),
        "LAYERS": (mock.patch.object(nn.functional, "conv1d", lambda *args: torch.conv1d(*args)), torch.float32),
        "DTYPE": (onednn(), torch.float64),
    }
    for code, (context, dtype) in cases.items():
        with context:
            result = compared(generator.to(dtype), states().to(dtype))
        assert not result.report.kernels and result.report.codes(VOCODER) == {code}


def test_short_inputs_are_left_to_the_library():
    for frames, codes in ((op.MIN_FRAMES - 1, {"FEW_FRAMES"}), (op.MIN_FRAMES, set())):
        result = compared(seamless("SeamlessM4T"), states(1, frames))
        assert result.by_onednn is (not codes) and result.report.codes(VOCODER) == codes


@pytest.mark.parametrize("name", GENERATORS)
def test_gradients_are_those_of_the_library(name):
    generator, sound, gradients = GENERATORS[name](), states(), []
    for switch in (onednn(), fastgen.disabled()):
        with switch:
            generator.zero_grad()
            generator(sound).sum().backward()
        gradients.append([weight.grad.clone() for weight in generator.parameters() if weight.grad is not None])
    assert gradients[0] and all(map(torch.equal, *gradients))


def test_errors_are_those_of_the_library(generator):
    for wrong in (torch.randn(1, 7, 5), states().double(), states(1, 0)):
        with torch.no_grad(), fastgen.disabled():
            error = outcome(partial(generator, wrong), RuntimeError)
        with torch.no_grad():
            assert outcome(partial(generator, wrong), RuntimeError) == error and error[0] == "RuntimeError"


def test_vocoders_compile_in_one_graph_and_know_inference_mode(generator):
    sound, compiled = states(), torch.compile(generator, backend="eager", fullgraph=True)
    with torch.no_grad(), fastgen.disabled():
        expected = generator(sound)
    with torch.no_grad():
        assert torch.equal(compiled(sound), expected)
    with torch.inference_mode():
        assert generator(sound).is_inference() and fastgen.explain().kernels[op.ONEDNN] == 1


# fairseq's, loaded from files as its users load them.


def loaded(folder: Path, vocoder: str, generator: type[nn.Module], config: dict) -> nn.Module:
    path = str(folder / "generator.pt")
    torch.save({"generator": loud(generator(config)).state_dict()}, path)
    return getattr(pytest.importorskip("fairseq.models.text_to_speech.vocoder"), vocoder)(path, config)


@pytest.mark.parametrize("with_durations", (False, True))
def test_units_of_fairseq_become_the_same_waveform(tmp_path, with_durations):
    vocoder = loaded(tmp_path, "CodeHiFiGANVocoder", fairseq_class("codehifigan", "CodeGenerator"), UNITS)
    with onednn():
        assert compared(vocoder, {"code": torch.tensor([[3, 4, -1, 9, 2, 2, -1, 7]])}, with_durations).by_onednn


def test_units_with_speakers_and_pitches_sound_the_same():
    model = loud(fairseq_class("codehifigan", "CodeGenerator")(SPEAKERS))
    voice, pitches = torch.randint(3, (2, 1)), torch.randint(5, (2, 10))
    with onednn():
        assert compared(model, code=torch.randint(30, (2, 5)), spkr=voice, f0=pitches).by_onednn


def test_spectrograms_become_the_same_waveform_with_their_norm(tmp_path):
    """And without the norm, after user code has removed it; a hook sees gradients as in the library."""
    vocoder = loaded(tmp_path, "HiFiGANVocoder", fairseq_class("hifigan", "Generator"), SPECTROGRAMS)
    with onednn():
        for shape in ((6, CHANNELS), (1, 6, CHANNELS), (3, 6, CHANNELS)):
            assert compared(vocoder, torch.randn(shape)).by_onednn
        recorded: list[bool] = []
        block = vocoder.model.resblocks[0]
        handle = block.register_forward_hook(lambda module, args, output: recorded.append(output.requires_grad))
        vocoder(torch.randn(6, CHANNELS))
        handle.remove()
        assert recorded == [True]
        vocoder.model.remove_weight_norm()
        assert compared(vocoder, torch.randn(6, CHANNELS)).by_onednn
