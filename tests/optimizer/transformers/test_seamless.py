"""Seamless M4T of both versions: the same tokens, units and waveforms; the report has each stage."""

import sys
from typing import Any

import pytest
import torch
import transformers
from reports import CAPTURED, capturing, not_captured_because
from seamless_models import KINDS, LANGUAGES, SIZES, inputs_of, seamless

import fastgen
from fastgen.optimizer.decoding.report import Report
from fastgen.testing import configured

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12


def generate(model: Any, kind: str, batch_size: int, **options: Any) -> tuple[torch.Tensor, ...]:
    """Returns waveforms and lengths, or tokens. options: of the text decoder."""
    arguments = {"min_new_tokens": STEPS, "max_new_tokens": STEPS, **options}
    if kind == "Model" or kind.endswith("ToSpeech"):
        arguments = {f"text_{name}": value for name, value in arguments.items()}
    torch.manual_seed(3)
    output = model.generate(**inputs_of(kind, batch_size), tgt_lang=LANGUAGES[1], **arguments)
    return output if isinstance(output, tuple) else (output,)


def text_report(report: Report) -> Report:
    """Returns the report of the text decoder's `generate`."""
    return report.stages[0].report if report.stages[0].report is not None else report


def compare(model: Any, kind: str, batch_size: int, **options: Any) -> Report:
    with fastgen.disabled():
        stock = generate(model, kind, batch_size, **options)
    ours = generate(model, kind, batch_size, **options)
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)
    return fastgen.explain()


@pytest.mark.parametrize(("num_beams", "batch_size"), [(1, 1), (5, 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", SIZES)
def test_all_seamless_classes_share_and_capture(version, kind, num_beams, batch_size):
    model = seamless(version, kind)
    with configured(share="always"):
        report = compare(model, kind, batch_size, num_beams=num_beams)
    assert num_beams == 1 or "prefill: one row per input" in text_report(report).shared
    with capturing():
        report = compare(model, kind, batch_size, num_beams=num_beams)
    assert text_report(report).kernels[CAPTURED] >= STEPS // 2


@pytest.mark.parametrize("version", SIZES)
def test_the_report_has_all_stages_of_seamless(version):
    kind = "ForSpeechToSpeech"
    with capturing():
        report = compare(seamless(version, kind), kind, 2)
    text, units, vocoder = report.stages
    assert [stage.name for stage in text.report.stages] == ["encoder", "decoder"]
    assert units.name == ("text-to-unit" if version == "SeamlessM4Tv2" else f"generate of {units.report.model}")
    assert version == "SeamlessM4Tv2" or units.report.kernels[CAPTURED] > 0
    assert vocoder.name == "vocoder"
    assert all(0 < stage.seconds < report.seconds for stage in report.stages)
    for shown in ("stage: vocoder", "stage: encoder", "stage: decoder"):
        assert shown in repr(report)
    assert report.as_dict()["stages"][0]["report"]["kernels"][CAPTURED] > 0
    items = [item for item in (*report.kernels, *report.fallbacks, *report.decisions) if item.startswith("vocoder")]
    assert items and all(item in repr(report) for item in items)


@pytest.mark.parametrize("version", SIZES)
def test_units_are_drawn_from_the_same_random_numbers(version):
    model, inputs = seamless(version, "ForTextToSpeech"), inputs_of("ForTextToSpeech", 2)
    options = {"text_num_beams": 3, "speech_do_sample": True, "speech_temperature": 1.5, "text_min_new_tokens": STEPS}
    options |= {"text_max_new_tokens": STEPS, "return_intermediate_token_ids": True, "tgt_lang": "eng"}
    outputs = []
    for context in (fastgen.disabled(), capturing()):
        with context:
            torch.manual_seed(5)
            outputs.append(model.generate(**inputs, **options))
    for name in ("sequences", "unit_sequences", "waveform", "waveform_lengths"):
        torch.testing.assert_close(outputs[1][name], outputs[0][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", SIZES)
def test_an_output_with_scores_is_complete(version):
    model, inputs = seamless(version, "Model"), inputs_of("Model", 2)
    outputs = []
    for context in (fastgen.disabled(), capturing()):
        with context:
            outputs.append(model.generate(**inputs, tgt_lang="fra", generate_speech=False, text_num_beams=3))
    stock, ours = outputs
    assert stock.keys() == ours.keys() and len(stock.scores) > 0
    assert torch.equal(stock.sequences, ours.sequences)
    torch.testing.assert_close(ours.scores, stock.scores)


def test_several_outputs_of_version_1_are_chosen_by_their_scores():
    options = {"num_beams": 4, "num_return_sequences": 3}
    compare(seamless("SeamlessM4T", "ForTextToSpeech"), "ForTextToSpeech", 2, **options)


def test_a_table_of_positions_that_has_to_grow_is_not_captured():
    model = seamless("SeamlessM4T", "ForTextToText")
    table = model.text_decoder.embed_positions
    for positions in (STEPS, 100):
        table.make_weights(positions, model.config.hidden_size, table.padding_idx)
        with capturing():
            ours = generate(model, "ForTextToText", 1)
        report = fastgen.explain()
        assert bool(report.kernels[CAPTURED]) == (positions == 100)
        assert not_captured_because(report, "POSITIONS", "the table has") == (positions == STEPS)
        with fastgen.disabled():
            assert torch.equal(ours[0], generate(model, "ForTextToText", 1)[0])


def encoder_calls(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[int, torch.Tensor]:
    """Returns how often the speech encoder runs in a call, and the waveform, without replacing a part of the model."""
    first, calls = model.speech_encoder.encoder.layers[0].ffn1, []
    code = type(first).forward.__code__

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code and frame.f_locals["self"] is first:
            calls.append(frame)

    sys.setprofile(count)
    try:
        waveform = model.generate(**inputs, tgt_lang="eng", text_num_beams=2, **options)[0]
    finally:
        sys.setprofile(None)
    return len(calls), waveform


@pytest.mark.parametrize("kind", ["ForSpeechToSpeech", "Model"])
@pytest.mark.parametrize("version", SIZES)
def test_the_speech_encoder_runs_once_per_input(version, kind):
    model, inputs = seamless(version, kind), inputs_of("ForSpeechToSpeech", 2)
    with fastgen.disabled():
        times, stock = encoder_calls(model, inputs)
    assert times == 2
    times, ours = encoder_calls(model, inputs)
    assert times == 1 and fastgen.explain().kernels["speech encoder, once"] == 1
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5)
    del inputs["attention_mask"]
    times, ours = encoder_calls(model, inputs)
    with fastgen.disabled():
        assert times == 1 and torch.allclose(ours, encoder_calls(model, inputs)[1], atol=1e-5)


class Noise(torch.nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + 0.1 * torch.randn_like(states)


@pytest.mark.parametrize(
    "change",
    [
        lambda encoder: encoder.encoder.layers[0].register_forward_hook(lambda *_: None),
        lambda encoder: [module.train() for module in encoder.modules() if isinstance(module, torch.nn.Dropout)],
        lambda encoder: setattr(encoder.feature_projection, "dropout", Noise().eval()),
    ],
    ids=("hook", "dropout", "noise"),
)
def test_the_speech_encoder_runs_twice_if_it_is_changed(change):
    model, inputs = seamless("SeamlessM4Tv2", "ForSpeechToSpeech"), inputs_of("ForSpeechToSpeech", 2)
    change(model.speech_encoder)
    assert encoder_calls(model, inputs)[0] == 2


class Writes(transformers.LogitsProcessor):
    """A processor that changes the input while the text is decoded."""

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        self.inputs = inputs

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.inputs["input_features"].mul_(1.01)
        return scores


def test_the_speech_encoder_runs_twice_if_inputs_may_change():
    model = seamless("SeamlessM4Tv2", "ForSpeechToSpeech")
    with torch.inference_mode():
        assert encoder_calls(model, inputs_of("ForSpeechToSpeech", 2))[0] == 2
    waveforms = []
    for context in (fastgen.disabled(), fastgen.enabled()):
        inputs = inputs_of("ForSpeechToSpeech", 2)
        with context:
            processors = transformers.LogitsProcessorList([Writes(inputs)])
            times, waveform = encoder_calls(model, inputs, logits_processor=processors)
        waveforms.append(waveform)
        assert times == 2
    torch.testing.assert_close(*waveforms, rtol=0, atol=1e-5)
