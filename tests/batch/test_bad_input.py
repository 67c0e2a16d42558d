"""Whatever the user gets wrong is one line that names it, status 2, and nothing written."""

import json
import os
import shutil
from pathlib import Path
from threading import Thread

import pytest
import torch
import transformers
from cli_models import POSITIONS, WORDS, save_bart, save_gpt2, save_t5, sentences

import fastgen
from fastgen.batch import errors
from fastgen.batch.config import settings_of_run
from fastgen.batch.task import task_for
from fastgen.cli.transformers.args import PROG, parse_arguments
from fastgen.cli.transformers.command import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of model folders, good and bad ones."""
    folder = tmp_path_factory.mktemp("models")
    bart, gpt2 = save_bart(folder / "bart"), save_gpt2(folder / "gpt2")
    save_t5(folder / "t5")
    config = json.loads((bart / "config.json").read_text())
    no_weights = shutil.copytree(bart, folder / "no_weights")
    (no_weights / "model.safetensors").unlink()
    shutil.copytree(bart, folder / "broken_weights")
    (folder / "broken_weights" / "model.safetensors").write_bytes(b"not a model")
    shutil.copytree(bart, folder / "broken_config")
    (folder / "broken_config" / "config.json").write_text("{")
    no_tokenizer = shutil.copytree(bart, folder / "no_tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (no_tokenizer / name).unlink()
    no_decoder = shutil.copytree(bart, folder / "no_decoder")
    (no_decoder / "config.json").write_text(json.dumps(config | {"decoder_layers": 2}))
    no_padding = shutil.copytree(gpt2, folder / "no_padding")
    tokenizer_config = json.loads((gpt2 / "tokenizer_config.json").read_text())
    del tokenizer_config["eos_token"]
    (no_padding / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    transformers.ViTConfig().save_pretrained(folder / "vit")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a good input, bad ones, and references."""
    (tmp_path / "input.txt").write_text("\n".join(sentences(4)) + "\n")
    (tmp_path / "three.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin1.txt").write_bytes("word1\nwörd2\n".encode("latin-1"))
    (tmp_path / "long.txt").write_text("word1 word2\n\n" + " ".join(WORDS + WORDS) + "\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


def check_refused(capsys: pytest.CaptureFixture, folder: Path, command: list[str], *named: str) -> None:
    """The command ends with status 2 and one line that holds all of `named`, and leaves `folder` as it was.

    Before the line stands what is being loaded, where the mistake is found by loading it.
    """
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    capsys.readouterr()
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    said = captured.err.removeprefix(f"loading {command[0]}\n")
    assert said.startswith(f"{PROG}: error: ") and said.count("\n") == 1, captured.err
    for text in named:
        assert text in captured.err
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


BAD_FILES = [
    ("none.txt", "output.txt", (), "INPUT", "none.txt", "no such file"),
    ("folder", "output.txt", (), "INPUT", "folder", "directory"),
    ("input.txt", "none/output.txt", (), "OUTPUT", "none/output.txt", "no folder"),
    ("input.txt", "folder", (), "OUTPUT", "folder", "is a folder"),
    ("input.txt", "folder/../input.txt", (), "OUTPUT", "same file as INPUT"),
    ("input.txt", "output.txt", ("--reference_path", "none.txt"), "--reference_path", "none.txt", "no such file"),
    ("input.txt", "output.txt", ("--reference_path", "latin1.txt"), "--reference_path", "latin1.txt", "UTF-8"),
    ("input.txt", "output.txt", ("--reference_path", "three.txt"), "three.txt", "has 3 lines", "has 4"),
    ("input.txt", "output.txt", ("--reference_path", "empty.txt"), "empty.txt", "has 0 lines", "has 4"),
    (
        "input.txt",
        "output.txt",
        ("--reference_path", "input.txt", "--score_path", "output.txt"),
        "--score_path",
        "OUTPUT",
    ),
    ("input.txt", "three.txt", (), "OUTPUT three.txt", "already exists", "--overwrite"),
    ("input.txt", "three.txt", ("--resume",), "OUTPUT three.txt", "already exists", "--overwrite"),
    (
        "input.txt",
        "output.txt",
        ("--reference_path", "input.txt", "--score_path", "three.txt"),
        "--score_path three.txt",
        "already exists",
        "--overwrite",
    ),
    ("input.txt", "output.txt", ("--reference_path", "input.txt", "--score_path", "folder"), "--score_path", "folder"),
    ("input.txt", "output.txt", ("--reference_path", "input.txt", "--score_path", "no/s"), "--score_path", "no/s"),
    ("input.txt", "output.txt", ("--reference_path", "input.txt", "--score_path", "s3://a/b"), "s3://a/b: is a URL"),
]


@pytest.mark.parametrize(("source", "output", "flags", "named"), [(a, b, c, named) for a, b, c, *named in BAD_FILES])
def test_bad_files_are_refused_before_the_model_is_looked_for(
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    files: Path,
    source: str,
    output: str,
    flags: tuple[str, ...],
    named: list[str],
) -> None:
    monkeypatch.chdir(files)
    check_refused(capsys, files, ["/no/such/model", source, output, *flags], *named)


BAD_MODELS = [
    ("none", (), "no such folder"),
    ("empty", (), "cannot be loaded"),
    ("no_weights", (), "cannot be loaded"),
    ("broken_weights", (), "cannot be loaded"),
    ("broken_config", (), "cannot be loaded"),
    ("no_tokenizer", (), "has no tokenizer"),
    ("no_decoder", (), "no weights for model.decoder.layers.1"),
    ("no_padding", ("--causal_lm",), "neither a pad nor an eos token"),
    ("vit", (), "vit", "cannot generate"),
    ("gpt2", (), "gpt2", "--causal_lm"),
    ("t5", ("--causal_lm",), "t5", "--causal_lm"),
    ("bart/config.json", (), "is a file"),
]


@pytest.mark.parametrize(("model", "flags", "named"), [(model, flags, named) for model, flags, *named in BAD_MODELS])
def test_bad_models_are_refused(
    capsys: pytest.CaptureFixture, files: Path, models: Path, model: str, flags: tuple[str, ...], named: list[str]
) -> None:
    command = [str(models / model), str(files / "input.txt"), str(files / "output.txt"), *flags]
    check_refused(capsys, files, command, f"MODEL {models / model}", *named)


def test_a_hub_name_that_does_not_exist_is_refused(
    capsys: pytest.CaptureFixture, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_on_the_hub(name: str) -> None:
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nlisted on the hub")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", not_on_the_hub)
    command = ["no-such-model", str(files / "input.txt"), str(files / "output.txt")]
    check_refused(capsys, files, command, "MODEL no-such-model", "not a valid model identifier")
    command = ["dem", str(files / "input.txt"), str(files / "output.txt")]
    check_refused(capsys, files, command, "MODEL dem: is no folder", "did you mean demo?")


UNFIT_FLAGS = [
    ("bart", ["--num_return_sequences", "2", "--join_outputs"], "--num_return_sequences 2", "without beam"),
    ("bart", ["--max_gen_length", "65"], "--max_gen_length 65", "up to 64"),
    ("bart", ["--max_new_tokens", "65"], "--max_new_tokens 65", "up to 64"),
    ("bart", ["--max_tokenizer_length", "65"], "--max_tokenizer_length 65", "up to 64"),
    ("bart", ["--decoder_start_token_id", "64"], "--decoder_start_token_id 64", "up to 63"),
    ("bart", ["--eos_token_id", "999"], "--eos_token_id 999", "up to 63"),
    ("gpt2", ["--causal_lm", "--max_gen_length", "1"], "no input fits", "--max_gen_length 1"),
    ("gpt2", ["--causal_lm", "--max_new_tokens", "64"], "no input fits", "64 positions"),
    ("bart", ["--gen", "num_beam=4"], "--gen num_beam=4", "did you mean num_beams?"),
    ("bart", ["--src_lang", "de"], "--src_lang de", "no languages"),
    ("bart", ["--attn_implementation", "tea"], "--attn_implementation tea"),
    ("gpt2", ["--causal_lm", "--chat"], "--chat", "no chat template"),
    ("bart", ["--device", "cuda:99"], "--device cuda:99"),
    ("bart", ["--device", "meta"], "--device meta"),
    ("bart", ["--device", "toaster"], "--device toaster"),
]


@pytest.mark.parametrize(("model", "flags", "named"), [(model, flags, named) for model, flags, *named in UNFIT_FLAGS])
def test_flags_that_the_model_or_machine_cannot_follow_are_refused(
    capsys: pytest.CaptureFixture, files: Path, models: Path, model: str, flags: list[str], named: list[str]
) -> None:
    (files / "input.txt").write_text("word1 word2 word3\nword4\n")
    command = [str(models / model), str(files / "input.txt"), str(files / "output.txt"), *flags]
    check_refused(capsys, files, command, *named)


TOO_LONG = [
    ("bart", [], 3, "122 tokens", f"limit is {POSITIONS}"),
    ("gpt2", ["--causal_lm"], 3, "120 tokens", f"limit is {POSITIONS - 6}"),  # its own max_new_tokens is 6
    ("gpt2", ["--causal_lm", "--max_gen_length", "3"], 3, "120 tokens", "limit is 2", "--max_gen_length 3"),
    ("gpt2", ["--causal_lm", "--max_new_tokens", "60"], 3, "120 tokens", "limit is 4", "64 positions"),
]


@pytest.mark.parametrize(("model", "flags", "line", "named"), [(a, b, c, named) for a, b, c, *named in TOO_LONG])
def test_a_line_longer_than_the_models_limit_fails_alone(
    capsys: pytest.CaptureFixture, files: Path, models: Path, model: str, flags: list[str], line: int, named: list[str]
) -> None:
    output = files / "output.txt"
    assert main([str(models / model), str(files / "long.txt"), str(output), *flags]) == 1
    first, *others = output.read_text().splitlines()
    assert first and others == ["", ""]
    [message] = [each for each in capsys.readouterr().err.splitlines() if f"line {line}" in each]
    for text in named:
        assert text in message


def test_a_line_longer_than_the_tokenizers_limit_fails_unless_truncation_is_asked_for(
    capsys: pytest.CaptureFixture, files: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tmp_path_factory.mktemp("limited") / "t5"
    shutil.copytree(models / "t5", model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, model_max_length=100)
    tokenizer.save_pretrained(model)
    command = [str(model), str(files / "long.txt"), str(files / "output.txt")]
    assert main(command) == 1
    assert "limit is 100" in capsys.readouterr().err
    assert main([*command, "--max_tokenizer_length", "150", "--overwrite"]) == 0


def test_a_line_that_is_not_utf8_fails_alone(capsys: pytest.CaptureFixture, files: Path, models: Path) -> None:
    assert main([str(models / "bart"), str(files / "latin1.txt"), str(files / "output.txt")]) == 1
    first, second = (files / "output.txt").read_text().splitlines()
    assert (bool(first), second) == (True, "")
    assert any("line 2" in line and "UTF-8" in line for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize(("flag", "dtype"), [("--bf16", torch.bfloat16), ("--fp16", torch.float16)])
def test_flags_of_halves_load_the_weights_in_them(models: Path, flag: str, dtype: torch.dtype) -> None:
    task = task_for(parse_arguments([str(models / "bart"), "input", "output", flag]))
    task.load()
    assert task.loaded.model.dtype == dtype


@pytest.mark.parametrize("package", ["transformers", "tqdm"])
def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture, files: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == package else object())
    command = ["model", str(files / "input.txt"), str(files / "output.txt")]
    check_refused(capsys, files, command, f"needs the package {package}: pip install {package}")


@pytest.mark.parametrize("flags", [["--workers", "2"], ["--workers", "auto"], ["--ray", "--workers", "2"]])
def test_workers_without_ray_say_how_to_get_it(
    capsys: pytest.CaptureFixture, files: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "ray" else object())
    command = ["model", str(files / "input.txt"), str(files / "output.txt"), *flags]
    message = f"{'--ray auto' if '--ray' in flags else ' '.join(flags)} needs the package ray: pip install ray"
    check_refused(capsys, files, command, message)


def test_errors_for_every_line_of_several_batches_end_the_run_and_leave_nothing(
    capsys: pytest.CaptureFixture, files: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, **_: object) -> None:
        assert list(files.glob("output.txt*.part"))
        raise ValueError("this\ncannot be")

    monkeypatch.setattr(transformers.BartForConditionalGeneration, "generate", refuse)
    (files / "output.txt").write_text("the output of an earlier run")
    before = sorted(files.iterdir())
    batches = ("--bs", "1", "--window", "0", "--overwrite")
    assert main([str(models / "bart"), str(files / "input.txt"), str(files / "output.txt"), *batches]) == 1
    error = "every line of 3 batches failed; line 1: cannot be generated for (ValueError: this cannot be)"
    assert capsys.readouterr().err.splitlines()[-1] == f"{PROG}: error: {error}"
    assert sorted(files.iterdir()) == before
    assert (files / "output.txt").read_text() == "the output of an earlier run"


def test_a_stream_of_another_kind_is_refused_at_its_first_line(
    capsys: pytest.CaptureFixture, files: Path, models: Path
) -> None:
    wrong = ({"text": 1}, "has a number"), ({"custom_id": "a", "body": {"messages": []}}, "--input_format openai")
    for number, (record, named) in enumerate(wrong):
        pipe = files / str(number)
        os.mkfifo(pipe)
        write = Thread(target=pipe.write_text, args=(json.dumps(record) + "\n",))
        write.start()
        assert main([str(models / "bart"), str(pipe), str(files / "output.jsonl"), "--input_format", "jsonl"]) == 2
        write.join()
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"{PROG}: error: INPUT {pipe}: line 1 ") and named in said


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["wide.txt", "wide.jsonl"])
def test_a_file_of_utf_16_is_named_at_its_first_line(
    capsys: pytest.CaptureFixture, files: Path, encoding: str, name: str
) -> None:
    text = json.dumps({"text": "word1"}) if name.endswith("jsonl") else "word1 wörd2"
    (files / name).write_bytes(f"{text}\r\n{text}\r\n".encode(encoding))
    named = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    command = ["/no/such/model", str(files / name), str(files / "output.txt"), "--quiet"]
    check_refused(capsys, files, command, f"INPUT {files / name}: line 1 is {named} text (accepted: UTF-8, as iconv")


def test_an_interrupt_before_anything_is_written_leaves_nothing(
    capsys: pytest.CaptureFixture, files: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: object, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.BartForConditionalGeneration, "generate", stop)
    before = sorted(files.iterdir())
    assert main([str(models / "bart"), str(files / "input.txt"), str(files / "output.txt")]) == 130
    assert PROG in capsys.readouterr().err.splitlines()[-1]
    assert sorted(files.iterdir()) == before


def test_the_version_is_shown(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"fastgen {fastgen.__version__}\n"


def test_every_flag_has_a_help_text(capsys: pytest.CaptureFixture) -> None:
    assert all(each.metadata["help"] for each in settings_of_run())
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "--max_gen_length N" in capsys.readouterr().out
