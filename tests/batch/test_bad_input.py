"""Any mistake of a user is named in one line with status 2, and nothing is written."""

import json
import os
import shutil
from pathlib import Path
from threading import Thread

import pytest
import transformers
from cli_models import save_bart, save_gpt2, save_t5, sentences

from fastgen.batch import errors
from fastgen.cli.transformers.args import PROG
from fastgen.cli.transformers.command import main


@pytest.fixture(scope="module")
def models(tmp_path_factory):
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
def files(tmp_path):
    """A folder with a good input, bad ones, and references."""
    (tmp_path / "input.txt").write_text("\n".join(sentences(4)) + "\n")
    (tmp_path / "three.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin1.txt").write_bytes("word1\nwörd2\n".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    return tmp_path


def check_refused(capsys: pytest.CaptureFixture, folder: Path, command: list[str], *named: str) -> None:
    """Asserts status 2, one line that holds all of `named`, and an unchanged `folder`.

    If loading reveals the mistake, a line before it says what is being loaded.
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
    ("none.txt", "output.txt", "", "INPUT", "none.txt", "no such file"),
    ("folder", "output.txt", "", "INPUT", "folder", "directory"),
    ("input.txt", "none/output.txt", "", "OUTPUT", "none/output.txt", "no folder"),
    ("input.txt", "folder", "", "OUTPUT", "folder", "is a folder"),
    ("input.txt", "folder/../input.txt", "", "OUTPUT", "same file as INPUT"),
    ("input.txt", "output.txt", "--reference_path none.txt", "--reference_path", "none.txt", "no such file"),
    ("input.txt", "output.txt", "--reference_path latin1.txt", "--reference_path", "latin1.txt", "UTF-8"),
    ("input.txt", "output.txt", "--reference_path three.txt", "three.txt", "has 3 lines", "has 4"),
    ("input.txt", "output.txt", "--reference_path empty.txt", "empty.txt", "has 0 lines", "has 4"),
    ("input.txt", "output.txt", "--reference_path input.txt --score_path output.txt", "--score_path", "OUTPUT"),
    ("input.txt", "three.txt", "", "OUTPUT three.txt", "already exists", "--overwrite"),
    ("input.txt", "three.txt", "--resume", "OUTPUT three.txt", "already exists", "--overwrite"),
    (
        "input.txt",
        "output.txt",
        "--reference_path input.txt --score_path three.txt",
        "--score_path three.txt",
        "already exists",
        "--overwrite",
    ),
    ("input.txt", "output.txt", "--reference_path input.txt --score_path folder", "--score_path", "folder"),
    ("input.txt", "output.txt", "--reference_path input.txt --score_path no/s", "--score_path", "no/s"),
    ("input.txt", "output.txt", "--reference_path input.txt --score_path s3://a/b", "s3://a/b: is a URL"),
]


@pytest.mark.parametrize(("source", "output", "flags", "named"), [(a, b, c, named) for a, b, c, *named in BAD_FILES])
def test_bad_files_are_refused_before_the_model_is_loaded(capsys, monkeypatch, files, source, output, flags, named):
    monkeypatch.chdir(files)
    check_refused(capsys, files, ["/no/such/model", source, output, *flags.split()], *named)


BAD_MODELS = [
    ("none", "", "no such folder"),
    ("empty", "", "cannot be loaded"),
    ("no_weights", "", "cannot be loaded"),
    ("broken_weights", "", "cannot be loaded"),
    ("broken_config", "", "cannot be loaded"),
    ("no_tokenizer", "", "has no tokenizer"),
    ("no_decoder", "", "no weights for model.decoder.layers.1"),
    ("no_padding", "--causal_lm", "neither a pad nor an eos token"),
    ("vit", "", "vit", "cannot generate"),
    ("gpt2", "", "gpt2", "--causal_lm"),
    ("t5", "--causal_lm", "t5", "--causal_lm"),
    ("bart/config.json", "", "is a file"),
]


@pytest.mark.parametrize(("model", "flags", "named"), [(model, flags, named) for model, flags, *named in BAD_MODELS])
def test_bad_models_are_refused(capsys, files, models, model, flags, named):
    command = [str(models / model), str(files / "input.txt"), str(files / "output.txt"), *flags.split()]
    check_refused(capsys, files, command, f"MODEL {models / model}", *named)


def test_a_hub_name_that_does_not_exist_is_refused(capsys, files, monkeypatch):
    def not_on_the_hub(name: str) -> None:
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nlisted on the hub")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", not_on_the_hub)
    command = ["no-such-model", str(files / "input.txt"), str(files / "output.txt")]
    check_refused(capsys, files, command, "MODEL no-such-model", "not a valid model identifier")
    command = ["dem", str(files / "input.txt"), str(files / "output.txt")]
    check_refused(capsys, files, command, "MODEL dem: is not a folder", "did you mean demo?")


@pytest.mark.parametrize("package", ["transformers", "tqdm"])
def test_a_missing_package_is_named(capsys, files, monkeypatch, package):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == package else object())
    command = ["model", str(files / "input.txt"), str(files / "output.txt")]
    check_refused(capsys, files, command, f"needs the package {package}: pip install {package}")


@pytest.mark.parametrize("flags", [["--workers", "2"], ["--workers", "auto"], ["--ray", "--workers", "2"]])
def test_workers_without_ray_say_how_to_get_it(capsys, files, monkeypatch, flags):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "ray" else object())
    command = ["model", str(files / "input.txt"), str(files / "output.txt"), *flags]
    message = f"{'--ray auto' if '--ray' in flags else ' '.join(flags)} needs the package ray: pip install ray"
    check_refused(capsys, files, command, message)


def test_a_stream_of_another_kind_is_refused_at_its_first_line(capsys, files, models):
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
def test_a_file_of_utf_16_is_named_at_its_first_line(capsys, files, encoding, name):
    text = json.dumps({"text": "word1"}) if name.endswith("jsonl") else "word1 wörd2"
    (files / name).write_bytes(f"{text}\r\n{text}\r\n".encode(encoding))
    named = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    command = ["/no/such/model", str(files / name), str(files / "output.txt"), "--quiet"]
    check_refused(capsys, files, command, f"INPUT {files / name}: line 1 is {named} text (accepted: UTF-8, as iconv")
