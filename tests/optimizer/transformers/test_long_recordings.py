"""Whisper's generate of recordings longer than 40 frames: windows are shared; text, segments and times stay."""

from typing import Any

import pytest
import torch
from hooks import watched
from parity import run_both
from reports import CROSS, PROMPT, is_shared, replays
from tiny_models import tiny

from fastgen.optimizer.decoding.report import Report

TEMPERATURES = (0.0, 0.4, 0.8)

pytestmark = pytest.mark.usefixtures("share_always")


def recordings(*frames: int) -> dict[str, torch.Tensor]:
    """Returns features of recordings of these lengths as one batch, and the mask of their padding."""
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
    """Compares sequences, segments and times with the library's; returns the reports of Whisper's own calls."""

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
    """Asserts that each window, with all beams of so many recordings, was shared."""
    assert [(report.inputs, report.rows) for report in reports] == [(each, each * beams) for each in inputs]
    assert all(is_shared(report, PROMPT, CROSS) for report in reports)


LOUD = {"temperature": TEMPERATURES, "logprob_threshold": -0.5}
# Lengths of the recordings, options, and how many recordings each window holds.
WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any], list[int]]] = {
    "until some have ended": ((130, 75), {}, [2, 2, 1, 1]),
    "longer texts": ((130, 75), {"max_new_tokens": 40}, [2, 2, 1, 1]),
    "one recording, without a mask": ((130,), {}, [1] * 4),
    # A prompt is longer than the two tokens that each window begins with, so its rows are padded on the left.
    "after earlier text": ((130, 90, 60), {"max_new_tokens": 40, "condition_on_prev_tokens": True}, [3, 3, 2, 1]),
    "a threshold of speech": ((130, 75), LOUD | {"no_speech_threshold": 1e-4}, [2, 2, 1, 1]),
    # Whisper's generate repeats the recordings, and not the mask of their frames.
    "several outputs": ((130, 75), {"num_return_sequences": 2}, [4, 4, 2, 2]),
}


@pytest.mark.parametrize("what", WINDOWS)
def test_all_beams_of_each_window_are_shared(what):
    lengths, options, inputs = WINDOWS[what]
    features = recordings(*lengths)
    if len(lengths) == 1:
        del features["attention_mask"]
    reports = transcribed(transcriber(), features, **{"num_beams": 3, "max_new_tokens": 12} | options)
    assert_shared(reports, inputs, beams=3)
    assert "condition_on_prev_tokens" not in options or any(replays(report) for report in reports)


def test_beams_are_shared_before_a_fallback():
    """Whisper's generate falls back to other temperatures with one row per recording, and then has no beams."""
    first, *others = transcribed(
        transcriber(), recordings(130, 75), num_beams=3, max_new_tokens=12, compression_ratio_threshold=1.35, **LOUD
    )
    assert_shared([first], [2], beams=3)
    assert len(others) > 3 and {report.rows // report.inputs for report in others} == {1}


def test_a_fallback_may_concern_only_some_recordings():
    """Two of three recordings are decoded again; the mask that Whisper's generate passes on has all three."""
    reports = transcribed(
        transcriber(), recordings(130, 75, 60), max_new_tokens=12, **LOUD | {"logprob_threshold": -1.86}
    )
    inputs = [report.inputs for report in reports]
    assert inputs[:3] == [3, 3, 2] and inputs[-1] == 1
