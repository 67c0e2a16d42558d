"""Speech to text through the command: what a plain loop writes; a file that cannot be read is its line's failure."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import transformers

import fastgen
from fastgen.cli.transformers.command import main

SPEECH = ("--task", "automatic-speech-recognition")


@pytest.fixture
def sounds(tmp_path):
    """Paths of seven files of noise, some of them in stereo at another rate."""
    draw = np.random.default_rng(0)
    for number in range(7):
        rate, channels = (16000, 1) if number % 2 else (22050, 2)
        samples = draw.normal(scale=0.1 * (1 + number), size=(rate * (1 + number) // 5, channels))
        soundfile.write(tmp_path / f"{number}.wav", samples, rate)
    return [str(tmp_path / f"{number}.wav") for number in range(7)]


def plain_loop(folder: Path, paths: list[str], bs: int, **settings: object) -> list[str]:
    """What a user would write, with files that are mono and 16 kHz already."""
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    texts = []
    with fastgen.disabled():
        for start in range(0, len(paths), bs):
            samples = [soundfile.read(path, dtype="float32")[0] for path in paths[start : start + bs]]
            features = processor(samples, sampling_rate=16000, return_tensors="pt")
            sequences = model.generate(features.input_features, **settings)
            texts += processor.batch_decode(sequences, skip_special_tokens=True)
    return texts


@pytest.mark.parametrize("beams", [1, 3])
def test_text_is_that_of_a_plain_loop(tmp_path, whisper, sounds, beams):
    mono = sounds[1::2]
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(mono) + "\n")
    flags = ("--beam", str(beams), "--max_new_tokens", "6", "--bs", "2")
    expected = plain_loop(whisper, mono, 2, num_beams=beams, max_new_tokens=6)
    assert len(set(expected)) > 1
    assert main([str(whisper), str(source), str(output), *SPEECH, *flags]) == 0
    assert output.read_text().split("\n")[:-1] == [" ".join(text.splitlines()) for text in expected]


def test_files_that_cannot_be_read_fail_alone(tmp_path, whisper, sounds, capsys):
    (tmp_path / "text.wav").write_text("no sound at all")
    paths = [sounds[1], str(tmp_path / "none.wav"), sounds[2], str(tmp_path / "text.wav"), "", sounds[3]]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": n, "audio": path}) + "\n" for n, path in enumerate(paths)))
    flags = ("--input_format", "jsonl", "--text_field", "audio", "--id_field", "id", "--max_new_tokens", "6")
    assert main([str(whisper), str(source), str(output), *SPEECH, *flags, "--bs", "2"]) == 1
    stderr = capsys.readouterr().err
    assert f"line 2: id 1: {paths[1]}" in stderr and f"line 4: id 3: {paths[3]}" in stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [len(record["outputs"]) for record in records] == [1, 0, 1, 0, 0, 1]
    assert ["error" in record for record in records] == [False, True, False, True, False, False]
    mono = plain_loop(whisper, [paths[0], paths[5]], 2, max_new_tokens=6)
    assert [records[0]["outputs"][0]["text"], records[5]["outputs"][0]["text"]] == mono


def test_beams_have_no_scores_and_the_whole_text_in_json(tmp_path, whisper, sounds):
    """Where Whisper's generate is asked for scores, it returns but the last of its passes over a sound."""
    mono = sounds[1::2]
    source, text, records = tmp_path / "in", tmp_path / "out", tmp_path / "out.jsonl"
    source.write_text("\n".join(mono) + "\n")
    flags = (*SPEECH, "--beam", "3", "--src_lang", "en", "--bs", "2")
    assert main([str(whisper), str(source), str(text), *flags]) == 0
    assert main([str(whisper), str(source), str(records), *flags, "--output_format", "jsonl"]) == 0
    outputs = [json.loads(line)["outputs"] for line in records.read_text().splitlines()]
    assert [[" ".join(each["text"].splitlines()) for each in one] for one in outputs] == [
        [line] for line in text.read_text().split("\n")[:-1]
    ]
    assert all("score" not in each for one in outputs for each in one)
