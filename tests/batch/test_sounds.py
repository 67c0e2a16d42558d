"""Tasks that speak: the sounds of a plain loop, whole files next to OUTPUT, and resumed runs."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import transformers
from cli_language_models import save_seamless
from cli_loop import command, write_lines
from cli_models import save_bart

import fastgen
from fastgen.batch.audio import SoundFolder
from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError

TEXTS = ["word1 word2 word3", "word4", "word5 word6 word7 word8", "word9 word2"]
VERSIONS = ("SeamlessM4T", "SeamlessM4Tv2")
T2S = ("--task", "text-to-speech")
TO_FRENCH = ("--src_lang", "eng", "--tgt_lang", "fra")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns the folder of a model, saved once."""
    saved: dict[tuple, Path] = {}

    def folder(save: Callable[..., Path], *details: str) -> Path:
        key = (save, *details)
        if key not in saved:
            saved[key] = save(tmp_path_factory.mktemp("model"), *details)
        return saved[key]

    return folder


@pytest.fixture
def sounds(tmp_path):
    """Returns paths of four files of noise at 16 kHz."""
    draw = np.random.default_rng(0)
    for number in range(4):
        soundfile.write(tmp_path / f"{number}.wav", draw.normal(scale=0.1, size=8000 + 1000 * number), 16000)
    return [str(tmp_path / f"{number}.wav") for number in range(4)]


def run(tmp_path: Path, model: Path, lines: list[str], *flags: str, status: int = 0, name: str = "out.jsonl") -> Path:
    assert command(model, write_lines(tmp_path / "in", lines), tmp_path / name, *flags) == status
    return tmp_path / name


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def spoken(output: Path) -> list[np.ndarray]:
    """Returns the sounds that OUTPUT names, and asserts their lengths."""
    sounds = []
    for record in records(output):
        [described] = record["outputs"]
        samples, rate = soundfile.read(described["path"], dtype="float32")
        assert (rate, len(samples) / rate) == (described["sampling_rate"], described["seconds"])
        sounds.append(samples)
    return sounds


def assert_same(waveforms: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [len(waveform) for waveform in waveforms] == [len(waveform) for waveform in expected]
    for waveform, other in zip(waveforms, expected, strict=True):
        assert len(waveform) and np.abs(other).max() > 1e-3
        np.testing.assert_allclose(waveform, other, rtol=0, atol=1e-5)


def plain_calls(folder: Path, kind: str, inputs: list[Any], bs: int, **settings: Any) -> list[Any]:
    """Returns the results of generate for each batch of a loop as users write it."""
    model = getattr(transformers, kind).from_pretrained(folder)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    returned = []
    with fastgen.disabled():
        for start in range(0, len(inputs), bs):
            batch = inputs[start : start + bs]
            if isinstance(batch[0], str):
                arguments = dict(processor.tokenizer(batch, src_lang="eng", return_tensors="pt", padding=True))
                arguments = {name: arguments[name] for name in ("input_ids", "attention_mask")}
            else:
                arguments = processor.feature_extractor(batch, sampling_rate=16000, return_tensors="pt")
            returned.append(model.generate(**arguments, tgt_lang="fra", **settings))
    return returned


def plain_sounds(folder: Path, kind: str, inputs: list[Any], bs: int, **settings: Any) -> list[np.ndarray]:
    sounds = []
    for waveforms, lengths, *_ in plain_calls(folder, kind, inputs, bs, **settings):
        rows = waveforms.reshape(lengths.numel(), -1).numpy()
        sounds += [row[:length] for row, length in zip(rows, lengths.reshape(-1).tolist())]
    return sounds


@pytest.mark.parametrize("version", VERSIONS)
def test_seamless_speaks_texts_as_in_a_plain_loop(tmp_path, folders, version, capsys):
    folder = folders(save_seamless, version)
    flags = ("--speaker_id", "2", "--beam", "2", "--bs", "2", "--gen", "text_max_new_tokens=8")
    output = run(tmp_path, folder, TEXTS, *T2S, *TO_FRENCH, *flags)
    speaker = {"spkr_id" if version == "SeamlessM4T" else "speaker_id": 2}
    settings = {"num_beams": 2, "text_max_new_tokens": 8, **speaker}
    expected = plain_sounds(folder, f"{version}ForTextToSpeech", TEXTS, 2, **settings)
    assert_same(spoken(output), expected)
    printed = capsys.readouterr()
    assert "seconds of sound/s" in printed.err
    other = run(tmp_path, folder, TEXTS, *T2S, *TO_FRENCH, *flags, "--speaker_id", "0", name="other.jsonl")
    assert any(not np.array_equal(one, two) for one, two in zip(spoken(other), expected))


@pytest.mark.parametrize("version", VERSIONS)
def test_seamless_translates_speech_to_speech(tmp_path, folders, sounds, version):
    folder = folders(save_seamless, version, "ForSpeechToSpeech")
    lines = [sounds[0], sounds[1], str(tmp_path / "none.wav"), sounds[2], sounds[3]]
    flags = ("--task", "speech-to-speech", "--tgt_lang", "fra", "--bs", "2")
    output = run(tmp_path, folder, lines, *flags, status=1)
    heard = [soundfile.read(path, dtype="float32")[0] for path in sounds]
    expected = plain_sounds(folder, f"{version}ForSpeechToSpeech", heard, 2)
    answers = records(output)
    assert answers[2]["outputs"] == [] and "there is no such file" in answers[2]["error"]
    assert not (tmp_path / "out.jsonl.audio" / "000003.wav").exists()
    described = [record["outputs"][0]["path"] for record in answers if record["outputs"]]
    assert_same([soundfile.read(path, dtype="float32")[0] for path in described], expected)


@pytest.mark.parametrize(("task", "kind"), [("speech-to-text", "ForSpeechToText"), ("translation", "ForTextToText")])
def test_seamless_writes_text(tmp_path, folders, sounds, task, kind, capsys):
    folder = folders(save_seamless, "SeamlessM4Tv2", kind)
    lines, languages = (TEXTS, TO_FRENCH) if task == "translation" else (sounds, TO_FRENCH[2:])
    flags = ("--task", task, *languages, "--beam", "2", "--max_new_tokens", "5", "--bs", "1")
    output = run(tmp_path, folder, lines, *flags, name="out.txt")
    said = capsys.readouterr().err
    assert "settings" not in said and "tgt_lang" not in said
    inputs = lines if task == "translation" else [soundfile.read(line, dtype="float32")[0] for line in lines]
    tokenizer, texts = transformers.AutoProcessor.from_pretrained(folder).tokenizer, []
    for tokens in plain_calls(folder, f"SeamlessM4Tv2{kind}", inputs, 1, num_beams=2, max_new_tokens=5):
        texts += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert output.read_text().splitlines() == texts and any(texts)


def full_at(name: str) -> Callable[[Path, bytes], int]:
    """Returns a `Path.write_bytes` whose disk becomes full in the middle of this file."""
    write = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if self.name == name:
            write(self, data[:4])
            raise OSError(28, "No space left on device")
        return write(self, data)

    return full


@pytest.mark.parametrize("ends_at", ["a sound", "the name of OUTPUT"])
def test_a_resumed_run_writes_incomplete_sounds_again(tmp_path, folders, monkeypatch, ends_at, capsys):
    folder, flags = folders(save_seamless, "SeamlessM4Tv2"), (*T2S, *TO_FRENCH, "--bs", "1")
    expected = spoken(run(tmp_path, folder, TEXTS, *flags, name="whole.jsonl"))
    output, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part.audio"
    with monkeypatch.context() as patched:
        if ends_at == "a sound":
            patched.setattr(Path, "write_bytes", full_at("000003.wav"))
        else:  # the folder has its name, and OUTPUT does not exist yet
            patched.setattr("os.replace", _fail_for(output))
        run(tmp_path, folder, TEXTS, *flags, status=1)
    error = capsys.readouterr().err
    assert not output.exists() and ("No space left" in error or "no more names" in error)
    assert part.exists() is (ends_at == "a sound")
    run(tmp_path, folder, TEXTS, *flags, "--resume")
    assert_same(spoken(output), expected)
    sounds = [sorted(Path(f"{tmp_path / name}.audio").iterdir()) for name in ("out.jsonl", "whole.jsonl")]
    assert [path.name for path in sounds[0]] == [f"00000{number}.wav" for number in range(1, 5)]
    assert [path.read_bytes() for path in sounds[0]] == [path.read_bytes() for path in sounds[1]]
    assert not part.exists()


def _fail_for(output: Path) -> Callable[..., None]:
    from os import replace

    def fail(source: Any, target: Any) -> None:
        if Path(target) == output:
            raise OSError("no more names")
        replace(source, target)

    return fail


def test_earlier_sounds_stay_until_new_ones_are_complete(tmp_path):
    args, samples = BatchConfig("model", "in", str(tmp_path / "out"), task="text-to-speech"), np.ones(9, np.float32)

    def begun(number: int) -> SoundFolder:
        folder = SoundFolder(args, 8000)
        folder.begin(resumes=False)
        folder.write(number, samples)
        return folder

    begun(1).complete(overwrite=False)
    second = begun(2)
    with pytest.raises(InputError, match=r"out\.audio already exists .accepted: overwrite=True, with resume=True"):
        second.complete(overwrite=False)
    assert [path.name for path in (tmp_path / "out.audio").iterdir()] == ["000001.wav"]
    second.complete(overwrite=True)
    assert [path.name for path in (tmp_path / "out.audio").iterdir()] == ["000002.wav"]


def test_output_without_sounds_and_sounds_without_it_are_refused(tmp_path, folders, capsys):
    folder, flags = folders(save_seamless, "SeamlessM4Tv2"), (*T2S, *TO_FRENCH)
    output = run(tmp_path, folder, TEXTS[:1], *flags)
    run(tmp_path, folder, TEXTS[:1], *flags, status=2)
    for path in (Path(f"{output}.audio"), output):
        path.rename(tmp_path / "away")
        capsys.readouterr()
        run(tmp_path, folder, TEXTS[:1], *flags, "--resume", status=2)
        assert ".audio exists (accepted: another" in capsys.readouterr().err
        (tmp_path / "away").rename(path)


def test_a_sound_of_no_length_is_a_failed_input(tmp_path, folders, monkeypatch):
    kind = transformers.SeamlessM4Tv2ForTextToSpeech
    generate = kind.generate

    @functools.wraps(generate)
    def short(self: Any, *args: Any, **arguments: Any) -> Any:
        waveforms, lengths, *more = generate(self, *args, **arguments)
        lengths.reshape(-1)[0] = 0
        return waveforms, lengths, *more

    monkeypatch.setattr(kind, "generate", short)
    output = run(tmp_path, folders(save_seamless, "SeamlessM4Tv2"), TEXTS[:2], *T2S, *TO_FRENCH, status=1)
    first, second = records(output)
    assert (first["outputs"], first["error"]) == ([], "became a sound of no length")
    assert len(second["outputs"]) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*T2S, "--output_format", "text"), "--output_format text does not go with --task text-to-speech"),
        ((*T2S, "--causal_lm"), "--causal_lm does not go with --task text-to-speech, whose outputs are audio files"),
        ((*T2S, "--num_return_sequences", "2"), "--num_return_sequences 2 does not go with --task text-to-speech"),
        ((*T2S, "--retry_failed"), "--retry_failed does not go with --task text-to-speech"),
        (("--speaker_id", "1"), "--speaker_id 1 needs --task text-to-speech or speech-to-speech"),
        (("--task", "text-to-speach"), "--task text-to-speach is not known (did you mean text-to-speech?)"),
        (("--task", "speech-to-speech", "--prefix", "a"), "--prefix a does not go with --task speech-to-speech"),
    ],
)
def test_flags_that_contradict_a_task_are_named(tmp_path, capsys, flags, message):
    run(tmp_path, Path("/nowhere"), ["a"], *flags, status=2)
    assert message in capsys.readouterr().err
    assert command("model", tmp_path / "in", "-", *T2S) == 2
    assert "OUTPUT - does not go with --task text-to-speech" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("save", "flags", "message"),
    [
        (save_seamless, T2S, "--task text-to-speech needs --tgt_lang"),
        (save_seamless, (*T2S, "--tgt_lang", "xyz"), "--tgt_lang xyz is not known to MODEL"),
        (save_seamless, (*T2S, "--tgt_lang", "fra", "--speaker_id", "3"), "--speaker_id 3 is not known to MODEL (acc"),
        (save_seamless, (*T2S, "--tgt_lang", "fra", "--gen", "coarse_top_k=3"), "--gen coarse_top_k=3: there is no"),
        (save_bart, T2S, "bart cannot generate with --task text-to-speech (accepted without"),
    ],
)
def test_a_task_that_the_model_cannot_do_is_named(tmp_path, folders, capsys, save, flags, message):
    output = run(tmp_path, folders(save), ["word1"], *flags, status=2)
    assert message in capsys.readouterr().err
    assert list(tmp_path.glob(f"{output.name}*")) == []


def test_files_of_sound_keep_every_sample(tmp_path):
    """They are next to the file that OUTPUT links to."""
    samples = np.array([0.1, -1.5, 1e-9], np.float32)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "out")
    for name in ("link", "other"):
        folder = SoundFolder(BatchConfig("model", "in", str(tmp_path / name)), 8000)
        folder.begin(resumes=False)
        path = folder.write(7, samples)
        folder.complete(overwrite=False)
    assert path == str(tmp_path / "other.audio" / "000007.wav")
    assert Path(path).read_bytes() == (tmp_path / "there" / "out.audio" / "000007.wav").read_bytes()
    stored, rate = soundfile.read(path, dtype="float32")
    assert np.array_equal(stored, samples) and rate == 8000 and soundfile.info(path).subtype == "FLOAT"
