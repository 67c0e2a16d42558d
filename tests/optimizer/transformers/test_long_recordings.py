"""Whisper's own generate of recordings longer than it hears: each window is shared; text, segments and times stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import CROSS, PROMPT, is_shared, replays, run_both, tiny

from fastgen.optimizer.decoding.report import Report
from fastgen.testing import watched

WINDOW = 40  # frames that the model hears
TEMPERATURES = (0.0, 0.4, 0.8)

pytestmark = pytest.mark.usefixtures("share_always")


def recordings(*frames: int) -> dict[str, torch.Tensor]:
    """Features of recordings of these lengths as one batch, and the mask that tells them from padding."""
    features = torch.randn(len(frames), 8, max(frames), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor(frames)[:, None]
    mask = (torch.arange(max(frames)) < lengths).long()  # [B, F]
    return {"input_features": features * mask[:, None], "attention_mask": mask}


def transcriber(**settings: Any) -> torch.nn.Module:
    model = tiny("whisper")
    model.generation_config.no_timestamps_token_id, model.generation_config.prev_sot_token_id = 70, 55
    model.generation_config.update(max_length=None, **settings)
    return model


def transcribed(model: torch.nn.Module, inputs: dict[str, torch.Tensor], **arguments: Any) -> list[Report]:
    """Compares sequences, segments and times with the library's; what fastgen says of each of Whisper's own calls."""

    def transcribe() -> tuple[list, list]:
        outputs = model.generate(**inputs, return_timestamps=True, return_segments=True, **arguments)
        segments = [
            [(each["start"].item(), each["end"].item(), each["tokens"].tolist()) for each in recording]
            for recording in outputs["segments"]
        ]
        return outputs["sequences"].tolist(), segments

    with watched("end a call") as calls:
        both = run_both(transcribe)
    assert both.stock == both.fast
    return [call.args[0].report for call in calls]


def assert_shared(reports: list[Report], inputs: list[int], beams: int) -> None:
    """Each window with all beams of these numbers of recordings was shared."""
    assert [(report.inputs, report.rows) for report in reports] == [(each, each * beams) for each in inputs]
    assert all(is_shared(report, PROMPT, CROSS) for report in reports)


@pytest.mark.parametrize("new_tokens", [12, 40], ids=("short", "recorded"))
def test_windows_are_shared_also_when_some_recordings_have_ended(new_tokens):
    reports = transcribed(transcriber(), recordings(130, 75), num_beams=3, max_new_tokens=new_tokens)
    assert_shared(reports, [2, 2, 1, 1], beams=3)


def test_a_single_recording_without_a_mask():
    inputs = {"input_features": recordings(130)["input_features"]}
    assert_shared(transcribed(transcriber(), inputs, num_beams=4, max_new_tokens=12), [1] * 4, beams=4)


def test_earlier_text_as_a_prompt_of_several_tokens():
    reports = transcribed(
        transcriber(), recordings(130, 90, 60), num_beams=3, max_new_tokens=40, condition_on_prev_tokens=True
    )
    assert_shared(reports, [3, 3, 2, 1], beams=3)
    # A prompt is longer than the two tokens that each window begins with, so its rows are padded on the left.
    assert any(replays(report) for report in reports)


def test_beams_before_a_fallback_to_other_temperatures():
    """Whisper's generate falls back with one row per recording, and has no beams from then on."""
    first, *others = transcribed(
        transcriber(),
        recordings(130, 75),
        num_beams=3,
        max_new_tokens=12,
        temperature=TEMPERATURES,
        logprob_threshold=-0.5,
        compression_ratio_threshold=1.35,
    )
    assert_shared([first], [2], beams=3)
    assert len(others) > 3 and {report.rows // report.inputs for report in others} == {1}


def test_samples_of_a_fallback_that_only_some_recordings_need():
    """Of three recordings two are decoded again; the mask that Whisper's generate hands on is of all three."""
    reports = transcribed(
        transcriber(),
        recordings(130, 75, 60),
        max_new_tokens=12,
        temperature=TEMPERATURES,
        logprob_threshold=-1.86,
    )
    inputs = [report.inputs for report in reports]
    assert inputs[:3] == [3, 3, 2] and inputs[-1] == 1


def test_speech_that_is_looked_for_inside_of_a_call():
    reports = transcribed(
        transcriber(),
        recordings(130, 75),
        num_beams=3,
        max_new_tokens=12,
        temperature=TEMPERATURES,
        logprob_threshold=-0.5,
        no_speech_threshold=1e-4,
    )
    assert_shared(reports, [2, 2, 1, 1], beams=3)


def test_several_outputs_of_each_recording():
    """Whisper's generate repeats the recordings, and not the mask of their frames."""
    reports = transcribed(transcriber(), recordings(130, 75), num_beams=4, num_return_sequences=2, max_new_tokens=12)
    assert_shared(reports, [4, 4, 2, 2], beams=4)
