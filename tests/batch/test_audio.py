"""Audio files become the features of a plain loop; a bad file is an error of its line only."""

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
from transformers import Speech2TextFeatureExtractor, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from fastgen.batch.audio import AudioInput, _read
from fastgen.batch.config import BatchConfig
from fastgen.batch.files import Line
from fastgen.batch.planner import Item

RATE = 16000
FORMAT = BatchConfig("model", "in", "out", input_format="text")
RECORDS = replace(FORMAT, input_format="jsonl", text_field="path")
EXTRACTORS = {
    "whisper": WhisperFeatureExtractor(),
    "speech2text": Speech2TextFeatureExtractor(),
    "wav2vec2": Wav2Vec2FeatureExtractor(return_attention_mask=True),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A temporary folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sound(seconds: float, rate: int = RATE, channels: int = 1, seed: int = 0) -> np.ndarray:
    """Returns two tones and noise, different in every channel."""
    draw = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate))[:, None] / rate
    tones = sum(np.sin(2 * np.pi * draw.uniform(100, 4000, channels) * time) for _ in range(2))
    return (0.2 * tones + 0.05 * draw.standard_normal(tones.shape)).astype(np.float32)


def save(name: str, samples: np.ndarray, rate: int = RATE, **details: str) -> str:
    soundfile.write(name, samples, rate, **details)
    return name


def prepare(paths: list[str], extractor: str = "whisper", args: BatchConfig = FORMAT) -> list[Item]:
    lines = [Line(number, path.encode()) for number, path in enumerate(paths, start=1)]
    return AudioInput(EXTRACTORS[extractor], args).prepare(lines)


def batch(prepared: list[Item], extractor: str) -> dict[str, torch.Tensor]:
    assert [each.error for each in prepared] == [None] * len(prepared)
    return AudioInput(EXTRACTORS[extractor], FORMAT).collate(prepared)


def plain(sounds: list[np.ndarray], extractor: str) -> dict[str, torch.Tensor]:
    """Calls the feature extractor once for the whole batch, as its documentation does."""
    padding = {} if extractor == "whisper" else {"padding": True}
    return dict(EXTRACTORS[extractor](sounds, sampling_rate=RATE, return_tensors="pt", **padding))


def assert_equal(output: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert output.keys() == expected.keys()
    for name, tensor in expected.items():
        assert output[name].dtype == tensor.dtype
        assert torch.equal(output[name], tensor), name


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_features_and_batches_are_those_of_a_plain_loop(extractor):
    files = [save(f"{number}.wav", sound(0.4 + 0.5 * number, seed=number), subtype="FLOAT") for number in range(3)]
    sounds = [soundfile.read(file, dtype="float32")[0] for file in files]
    expected = plain(sounds, extractor)
    assert_equal(batch(prepare(files, extractor), extractor), expected)
    records = [json.dumps({"id": number, "path": file}) for number, file in enumerate(files)]
    assert_equal(batch(prepare(records, extractor, RECORDS), extractor), expected)
    # Arrays have no batch dimension, and each has the length of its sound.
    shapes = [each.arrays[EXTRACTORS[extractor].model_input_names[0]].shape for each in prepare(files, extractor)]
    assert len(set(shapes)) == (1 if extractor == "whisper" else 3)


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg", "mp3"])
def test_channels_are_averaged_and_rates_converted(ending):
    file = save(f"stereo.{ending}", sound(1.5, rate=44100, channels=2), 44100)
    samples, rate = soundfile.read(file, dtype="float32")
    assert samples.shape == (66150, 2)
    expected = soxr.resample(samples.mean(axis=1), rate, RATE)
    assert_equal(batch(prepare([file]), "whisper"), plain([expected], "whisper"))


@pytest.mark.parametrize("rate", [RATE, 44100])
def test_sound_longer_than_the_models_window_is_refused(rate):
    extractor = EXTRACTORS["whisper"]
    most = extractor.chunk_length * rate
    just = save("just.wav", np.zeros(most, np.float32) + sound(1)[0], rate)
    longer = save("longer.wav", np.zeros(most + 1, np.float32), rate)
    long = save("long.wav", np.zeros(most + 10 * rate, np.float32), rate)
    items = prepare([just, longer, long])
    assert items[0].arrays["input_features"].shape == (80, 3000)
    assert items[1].error == f"longer.wav: lasts {30 + 1 / rate:g} s, and MODEL transcribes 30 s (accepted: up to 30 s)"
    assert items[2].error == "long.wav: lasts 40 s, and MODEL transcribes 30 s (accepted: up to 30 s)"
    assert items[2].arrays is None
    assert prepare([save("long.wav", sound(40, rate), rate)], "speech2text")[0].error is None


def test_an_unusable_file_fails_its_line_only(folder):
    good = save("good.wav", sound(1))
    (folder / "text.wav").write_text("hello")
    (folder / "nothing.wav").write_bytes(b"")
    (folder / "folder").mkdir()
    save("no_samples.wav", np.zeros(0, np.float32))
    save("not_finite.wav", np.full(RATE, np.nan, np.float32), subtype="FLOAT")
    whole = Path(save("whole.mp3", sound(3))).read_bytes()
    (folder / "cut.mp3").write_bytes(whole[: len(whole) // 2])
    whole = Path(save("whole.flac", sound(3))).read_bytes()
    (folder / "cut.flac").write_bytes(whole[: len(whole) // 2])
    for ending in ("wav", "aiff", "au"):
        whole = Path(save(f"whole.{ending}", sound(3))).read_bytes()
        (folder / f"cut.{ending}").write_bytes(whole[: len(whole) // 2])
    (folder / "text.mp3").write_text("hello")
    errors = {
        "missing.wav": "there is no such file",
        "two\\nlines": "there is no such file",
        "folder": "is a folder (accepted: an audio file)",
        "x" * 300: "File name too long",
        "text.wav": "cannot be read (LibsndfileError: Format not recognised",
        "text.mp3": "cannot be read (LibsndfileError: ",
        "nothing.wav": "Format not recognised",
        "cut.flac": "flac decoder lost sync",
        "cut.mp3": "s of 3 s: it is not complete",
        "cut.wav": "ends after 1.49931 s of 3 s: it is not complete",
        "cut.aiff": "s of 2.99969 s: it is not complete",
        "cut.au": "s of 3 s: it is not complete",
        "no_samples.wav": "has no sound in it",
        "not_finite.wav": "gives features that are not finite numbers",
        "\\u0000": "there is no such file",
    }
    lines = [f'{{"path": "{path}"}}' for path in [good, *errors, good]]
    first, *bad, last = prepare(lines, args=RECORDS)
    for path, item in zip(errors, bad, strict=True):
        name = " ".join(json.loads(f'"{path}"').splitlines())
        assert item.error.startswith(f"{name}: ") and errors[path] in item.error, item.error
        assert "\n" not in item.error
    assert np.array_equal(first.arrays["input_features"], last.arrays["input_features"])
    assert all(each.arrays is None and each.error is None for each in prepare(["", " "]))
    assert prepare(['{"file": "good.wav"}'], args=RECORDS)[0].error.startswith('has no field "path"')


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the feature extractor, about means of nothing
def test_sound_without_features_fails_its_line_only():
    silent = save("silent.wav", np.zeros(RATE, np.float32))
    short = save("short.wav", sound(0.02))
    shorter = save("shorter.wav", sound(0.001))
    items = prepare([silent, short, shorter, save("good.wav", sound(1))], "speech2text")
    assert items[0].error.startswith("silent.wav: gives features that are not finite numbers")
    assert items[1].error == "short.wav: is too short (0.02 s)"
    assert items[2].error == "shorter.wav: cannot be read (ValueError: negative dimensions are not allowed)"
    assert items[3].error is None
    assert prepare([silent])[0].error is None  # Whisper hears silence


def test_a_stream_of_unknown_length_is_read_to_its_end(folder):
    whole = bytearray(Path(save("whole.wav", sound(2))).read_bytes())
    size = whole.find(b"data") + 4
    whole[size : size + 4] = struct.pack("<I", 0xFFFFFFFF)  # as streaming programs write it
    (folder / "stream.wav").write_bytes(whole)
    stream, plainly = prepare(["stream.wav", "whole.wav"])
    assert np.array_equal(stream.arrays["input_features"], plainly.arrays["input_features"])


def id3(size: int) -> bytes:
    """Returns a tag, as taggers and phone recorders write before a sound."""
    return b"ID3\x03\0\0" + bytes(size >> shift & 127 for shift in (21, 14, 7, 0)) + b"\0" * size


@pytest.mark.parametrize("ending", ["wav", "aiff", "au", "flac", "mp3"])
def test_a_sound_after_a_tag_is_read_whole(folder, ending):
    whole = Path(save(f"whole.{ending}", sound(2))).read_bytes()
    (folder / f"tagged.{ending}").write_bytes(id3(64_000) + whole)
    tagged, plainly = prepare([f"tagged.{ending}", f"whole.{ending}"])
    assert np.array_equal(tagged.arrays["input_features"], plainly.arrays["input_features"])
    (folder / f"cut.{ending}").write_bytes(id3(300) + whole[: len(whole) // 2])
    assert prepare([f"cut.{ending}"])[0].error.startswith(f"cut.{ending}: ")


def without_header(data: bytes) -> bytes:
    """Returns an MP3 without its first frame, which has the number of frames."""
    return data[data.index(data[:2], 2) :]


def samples(*files: str) -> np.ndarray:
    """Returns the sounds of files, one after the other."""
    sounds = [soundfile.read(file, dtype="float32") for file in files]
    return np.concatenate([sound if rate == RATE else soxr.resample(sound, rate, RATE) for sound, rate in sounds])


def assert_heard(file: str, expected: np.ndarray) -> None:
    [item] = prepare([file])
    assert item.error is None
    [features] = plain([expected], "whisper")["input_features"]
    np.testing.assert_allclose(item.arrays["input_features"], features, atol=1e-4)


@pytest.mark.parametrize(("kind", "subtype"), [("mp3", None), ("flac", None), ("ogg", "VORBIS"), ("ogg", "OPUS")])
def test_joined_sounds_are_read_one_after_the_other(folder, kind, subtype):
    parts = [save(f"{n}.{kind}", sound(n, rate, seed=n), rate, subtype=subtype) for n, rate in ((1, 16000), (2, 24000))]
    tag = id3(300) if kind == "mp3" else b""
    joined = b"".join(Path(parts[number]).read_bytes() + tag for number in (0, 1, 0))
    (folder / f"joined.{kind}").write_bytes(joined)
    assert_heard(f"joined.{kind}", samples(parts[0], parts[1], parts[0]))
    save(f"long.{kind}", sound(20), subtype=subtype)
    (folder / f"joined.{kind}").write_bytes(Path(f"long.{kind}").read_bytes() * 2)
    assert prepare([f"joined.{kind}"])[0].error.startswith(f"joined.{kind}: lasts 40 s, and MODEL transcribes 30 s")


@pytest.mark.parametrize("kind", ["flac", "ogg"])
def test_a_joined_sound_that_is_cut_fails_its_line(folder, kind):
    whole, long = (Path(save(f"{seconds}.{kind}", sound(seconds))).read_bytes() for seconds in (1, 20))
    for data in (long[: len(long) // 2], whole + long[: len(long) // 2], long[: len(long) // 2] + whole):
        (folder / f"cut.{kind}").write_bytes(data)
        assert prepare([f"cut.{kind}"])[0].error.startswith(f"cut.{kind}: ")


def test_bytes_after_an_mp3_are_tags_or_an_error(folder):
    whole = Path(save("whole.mp3", sound(2))).read_bytes()
    for end in (b"TAG" + b"x" * 125, b"APETAGEX" + b"x" * 9000, bytes(9000), b"x" * 99):
        (folder / "tagged.mp3").write_bytes(whole + end)
        assert_heard("tagged.mp3", samples("whole.mp3"))
    (folder / "junk.mp3").write_bytes(whole + b"x" * 9000 + whole)
    size = len(whole)
    expected = f"junk.mp3: holds no sound that can be read from byte {size} of {2 * size + 9000} on (accepted: a file"
    assert prepare(["junk.mp3"])[0].error.startswith(expected)


def test_an_mp3_without_a_length_is_read_to_its_end(folder, caplog):
    constant = Path(save("whole.mp3", sound(4), bitrate_mode="CONSTANT", compression_level=0.3)).read_bytes()
    (folder / "middle.mp3").write_bytes(constant[777:])  # begins in the middle of a frame
    expected = samples("middle.mp3")
    assert len(expected) > 3.9 * RATE
    assert_heard("middle.mp3", expected)
    # Most of it is silent and has smaller frames than its beginning, so libsndfile's estimate is too short.
    loud, silence = sound(2), np.zeros((12 * RATE, 1), np.float32)
    whole = Path(save("whole.mp3", np.concatenate([loud, silence, loud]))).read_bytes()
    (folder / "variable.mp3").write_bytes(without_header(whole))
    assert len(samples("variable.mp3")) < 12 * RATE
    heard = _read(folder / "variable.mp3", RATE, None)
    assert abs(len(heard) - 16 * RATE) < 0.1 * RATE
    np.testing.assert_allclose(heard[-RATE:].std(), loud[-RATE:].std(), rtol=0.1)
    assert not caplog.messages


def test_a_header_may_name_a_few_bytes_too_many(folder, caplog):
    whole = bytearray(Path(save("whole.wav", sound(2), subtype="PCM_16")).read_bytes())
    size = whole.find(b"data") + 4
    for more, is_accepted in ((44, True), (64, True), (65, False)):
        caplog.clear()
        whole[size : size + 4] = struct.pack("<I", 4 * RATE + more)
        (folder / "more.wav").write_bytes(whole)
        [item] = prepare(["more.wav"])
        assert (item.error is None) == is_accepted
        assert caplog.messages == [f"more.wav: its header names {more} bytes more than the file holds"] * is_accepted
        assert is_accepted or item.error.startswith("more.wav: ends after 2 s of 2.00")


def test_gsm_in_wav_is_read_whole():
    """Recorders of call centres write it, and soundfile cannot seek in it."""
    save("gsm.wav", sound(2, 8000), 8000, subtype="GSM610")
    assert_heard("gsm.wav", samples("gsm.wav"))


def test_a_flac_without_a_length_is_named(folder):
    whole = bytearray(Path(save("whole.flac", sound(1))).read_bytes())
    whole[21] &= 0xF0
    whole[22:26] = bytes(4)  # 36 bits, as streaming encoders write them
    (folder / "stream.flac").write_bytes(whole)
    for extractor in ("whisper", "wav2vec2"):
        [item] = prepare(["stream.flac"], extractor)
        assert item.error.startswith("stream.flac: has no length in its header")


def test_threads_may_share_a_feature_extractor():
    files = [save(f"{number}.wav", sound(0.2 + 0.1 * number)) for number in range(8)]
    expected = prepare(files)
    with ThreadPoolExecutor(4) as threads:
        items = list(threads.map(lambda file: prepare([file])[0], files))
    for item, other in zip(items, expected, strict=True):
        assert np.array_equal(item.arrays["input_features"], other.arrays["input_features"])
