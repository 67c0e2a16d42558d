"""Recordings through the command: text, segments and times are those of a plain call of Whisper for each."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from cli_loop import command, interrupted_after, write_lines

import fastgen
from fastgen.batch.pipeline import batch_seed

SPEECH = ("--task", "automatic-speech-recognition")
RATE = 16000
SECONDS = {"a": 5.0, "b": 0.8, "c": 7.313, "d": 2.0, "e": 3.1, "f": 2.0001, "g": 1.2}  # two fit into one window
FALLBACK = {"temperature": [0.0, 0.4, 0.8], "logprob_threshold": -1.0, "compression_ratio_threshold": 1.35}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with a WAV file of noise for each of SECONDS."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for number, (name, seconds) in enumerate(SECONDS.items()):
        samples = draw.normal(scale=0.1 * (1 + number), size=int(seconds * RATE))
        soundfile.write(f"{name}.wav", samples, RATE, subtype="FLOAT")
    return tmp_path


def transcribe(whisper: Path, names: str, *flags: object, output: str = "out.jsonl", status: int = 0) -> list[Any]:
    """Returns the records, or lines of text, that the command writes for these recordings."""
    write_lines(Path("in"), [f"{name}.wav" for name in names])
    assert command(whisper, "in", output, *SPEECH, *flags) == status
    if status == 2 or not Path(output).exists():
        return []
    lines = Path(output).read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines] if output.endswith("jsonl") else lines


def plain(whisper: Path, names: str, **arguments: Any) -> list[dict[str, Any]]:
    """Transcribes recordings one by one, as Whisper's documentation does; returns records of the command."""
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(whisper)
    processor = transformers.AutoProcessor.from_pretrained(whisper)
    outputs = []
    with fastgen.disabled():
        for name in names:
            samples = soundfile.read(f"{name}.wav", dtype="float32")[0]
            long = {"truncation": False, "padding": "longest", "return_attention_mask": True}
            inputs = processor(samples, sampling_rate=RATE, return_tensors="pt", **long if len(samples) > 32000 else {})
            generated = model.generate(**inputs, return_timestamps=True, return_segments=True, **arguments)
            (sequence,), (segments,) = generated["sequences"], generated["segments"]
            outputs.append(
                {
                    "text": processor.decode(sequence, skip_special_tokens=True),
                    "segments": [
                        {
                            **{end: pytest.approx(segment[end].item()) for end in ("start", "end")},
                            "text": processor.decode(segment["tokens"], skip_special_tokens=True),
                        }
                        for segment in segments
                    ],
                    "tokens": len(sequence),
                }
            )
    return outputs


def outputs_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [output for record in records for output in record["outputs"]]


@pytest.mark.parametrize("beams", [1, 3])
def test_short_recordings_have_the_text_of_a_plain_call(whisper, beams):
    """They have no score: with scores, Whisper's generate returns only the last of its passes over a sound."""
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(whisper)
    processor = transformers.AutoProcessor.from_pretrained(whisper)
    sounds = [soundfile.read(f"{name}.wav", dtype="float32")[0] for name in "bdg"]
    features = processor(sounds, sampling_rate=RATE, return_tensors="pt").input_features
    with fastgen.disabled():
        sequences = model.generate(features, num_beams=beams, max_new_tokens=6)
    texts = processor.batch_decode(sequences, skip_special_tokens=True)
    assert len(set(texts)) > 1
    flags = ("--beam", beams, "--max_new_tokens", 6, "--bs", 2)
    outputs = outputs_of(transcribe(whisper, "bdg", *flags))
    assert [output["text"] for output in outputs] == texts and all("score" not in output for output in outputs)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("window", [(), ("--window", "0")], ids=("sorted", "in order"))
def test_recordings_have_text_and_segments_of_their_own_call(whisper, beams, window):
    flags = ("--beam", beams, "--bs", "4", *window)
    records = transcribe(whisper, "abcdefg", *flags)
    assert [record["line"] for record in records] == [*range(1, 8)]
    expected = plain(whisper, "acef", num_beams=beams)
    assert len({output["text"] for output in expected}) == 4
    assert min(len(output["segments"]) for output in expected[:3]) > 1
    assert outputs_of([records[place] for place in (0, 2, 4, 5)]) == expected
    # Short ones are transcribed as without the long ones.
    short = outputs_of(transcribe(whisper, "bdg", *flags, output="short.jsonl"))
    assert short == outputs_of([records[place] for place in (1, 3, 6)])
    assert all("segments" not in output for output in short)
    text = transcribe(whisper, "abcdefg", *flags, output="out.txt")
    assert text == [output["text"] for output in outputs_of(records)]


def test_short_recordings_have_segments_on_request(whisper):
    records = transcribe(whisper, "bad", "--gen", "return_timestamps=true", "--bs", "4")
    expected = plain(whisper, "bad")
    # Only timestamps give the times inside one window.
    assert outputs_of(records) == expected


def test_segments_are_those_of_each_output(whisper):
    flags = ("--beam", "4", "--num_return_sequences", "2")
    records = transcribe(whisper, "ae", *flags)
    assert [len(record["outputs"]) for record in records] == [2, 2]
    for output in outputs_of(records):
        assert "".join(segment["text"] for segment in output["segments"]) == output["text"]


def test_settings_of_long_recordings_are_applied(whisper, capsys):
    settings = FALLBACK | {"condition_on_prev_tokens": True}
    flags = [f"--gen={name}={json.dumps(value)}" for name, value in settings.items()]
    records = transcribe(whisper, "ace", *flags, "--beam", "3", "--seed", "3", "--bs", "1")
    expected = []
    for batch, name in enumerate("ace"):
        torch.manual_seed(batch_seed(3, batch))
        expected += plain(whisper, name, num_beams=3, **settings)
    assert outputs_of(records) == expected
    reasons = "the fallback to other temperatures samples, condition_on_prev_tokens pads earlier text"
    assert f"batches keep the order of INPUT, so that outputs stay the same: {reasons}" in capsys.readouterr().err


def test_beams_with_probability_thresholds_are_those_of_a_call(whisper):
    flags = ("--gen", "logprob_threshold=-1", "--gen", "no_speech_threshold=0.001", "--beam", "3", "--bs", "1")
    expected = plain(whisper, "ace", num_beams=3, logprob_threshold=-1, no_speech_threshold=0.001, temperature=0.0)
    assert outputs_of(transcribe(whisper, "ace", *flags, "--gen", "temperature=[0.0]")) == expected


def test_recordings_without_speech_have_no_segments(whisper):
    flags = ("--gen", "logprob_threshold=0", "--gen", "no_speech_threshold=0", "--gen", "temperature=[0.0]")
    records = transcribe(whisper, "ae", *flags, "--beam", "3")
    assert outputs_of(records) == [{"text": "", "segments": [], "tokens": 0}] * 2


def test_transcripts_can_be_resumed(whisper):
    flags = [f"--gen={name}={json.dumps(value)}" for name, value in FALLBACK.items()]
    flags += ["--seed", "5", "--bs", "1"]
    expected = transcribe(whisper, "acebc", *flags, output="whole.jsonl")
    with interrupted_after(2):
        transcribe(whisper, "acebc", *flags, status=130)
    assert Path("out.jsonl.part").read_text().count('"line') == 2
    assert transcribe(whisper, "acebc", *flags, "--resume") == expected


def test_a_batch_of_recordings_is_halved_to_fit_the_memory(whisper, monkeypatch, capsys):
    kind = transformers.WhisperForConditionalGeneration
    generate, widths = kind.generate, []

    def with_little_memory(self: Any, input_features: torch.Tensor, **kwargs: Any) -> Any:
        if len(input_features) > 1:
            raise MemoryError("out of memory")
        widths.append(input_features.shape[-1])
        return generate(self, input_features=input_features, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "generate", with_little_memory)
        records = transcribe(whisper, "cae", "--bs", "4")
    assert outputs_of(records) == plain(whisper, "cae")
    assert widths == [731, 500, 310]  # narrower than the longest of the batch
    assert "out of memory with 3 inputs of length 731" in capsys.readouterr().err


def test_a_recording_that_would_be_cut_fails_by_name(whisper, capsys):
    records = transcribe(whisper, "ab", "--gen", "return_timestamps=false", status=1)
    assert records[0]["error"] == "a.wav: lasts 5 s, and MODEL transcribes 2 s (accepted: up to 2 s)"
    assert len(records[1]["outputs"]) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("return_timestamps=word",), "--gen return_timestamps: 'word' is not known (accepted: true, false)"),
        (("logprob_threshold=low",), "--gen logprob_threshold: 'low' is not a number"),
        (("no_speech_threshold=0.6",), "no_speech_threshold 0.6 needs a logprob_threshold (accepted: both)"),
    ],
)
def test_settings_that_recordings_cannot_use_are_refused(whisper, capsys, settings, message):
    transcribe(whisper, "a", *(f"--gen={setting}" for setting in settings), status=2)
    assert message in capsys.readouterr().err


def test_a_missing_package_of_word_error_rates_is_named(whisper, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    transcribe(whisper, "a", "--reference_path", "in", status=2)
    assert "needs the package jiwer: pip install jiwer" in capsys.readouterr().err


def test_word_error_rate_is_that_of_jiwer(whisper):
    records = transcribe(whisper, "acb")
    texts = [output["text"] for output in outputs_of(records)]
    words = texts[0].split()
    references = [" ".join([*words[1:], "more", "words"]), texts[1], texts[2]]
    Path("references").write_text("".join(f"{line}\n" for line in references))
    transcribe(whisper, "acb", "--overwrite", "--reference_path", "references", "--score_path", "scores.json")
    wrong = 3  # one word too many, two too few
    assert json.loads(Path("scores.json").read_text())["wer"] == pytest.approx(
        wrong / sum(len(line.split()) for line in references)
    )
