"""Mistakes, and sentences that fairseq would silently leave out, are named in one line."""

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fairseq_command_data import CommandData, command_data

import fastgen
from fastgen.cli.fairseq.command import eval_lm, generate

DAMAGED = "is not a checkpoint, or a damaged one ("


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The data of translations, with unusable files for --path."""
    folder = tmp_path_factory.mktemp("mistakes") / "fairseq"
    shutil.copytree(command_data(tmp_path_factory.getbasetemp()).folder, folder)
    checkpoint = (folder / "model" / "checkpoint_last.pt").read_bytes()
    (folder / "text.pt").write_text("hello, this is a text\n")
    (folder / "empty.pt").touch()
    (folder / "cut.pt").write_bytes(checkpoint[: len(checkpoint) // 2])
    torch.save({"model": Path("a class that fairseq never writes")}, folder / "evil.pt")
    (folder / "lm").mkdir()
    (folder / "lm" / "dict.txt").write_text("word 1\n")
    return CommandData(folder, flags=("--num-workers", "0"))  # a process that loads takes 5 seconds to end


def stopped(capfd: pytest.CaptureFixture, main: Callable[[list[str]], int], args: list[str]) -> str:
    """Returns the last line on stderr of a command that refuses `args`."""
    try:
        status = main(args)
    except SystemExit as left:  # argparse's own way
        status = left.code
    captured = capfd.readouterr()
    assert (status, captured.out) == (2, "")
    assert "Traceback" not in captured.err
    return captured.err.splitlines()[-1]


FLAGS = [
    ("--results-path {folder}/text.pt", "--results-path {folder}/text.pt: "),
    ("--postprocess-workers -1", "--postprocess-workers"),
    ("--postprocess-workers many", "argument --postprocess-workers"),
    ("--postprocess-workers 257", "--postprocess-workers 257 (accepted: 0 to 256)"),
    ("--workers 2", "error: --workers 2 is not a flag of this command (accepted: --num-shards N --shard-id I)"),
    ("--sampling --beam 4", "--sampling needs --nbest 4"),
    ("--beam 0", "error: --beam 0 (accepted: 1 or more)"),
    ("--nbest 0", "error: --nbest 0 (accepted: 1 or more)"),
    ("--gen-subset none", "none"),
    ("--no-such-flag", "--no-such-flag"),
    ("--path {folder}/evil.pt", "--path {folder}/evil.pt: holds "),
    ("--path {folder}/evil.pt --no-fastgen", "--path {folder}/evil.pt: holds "),
    ("--lm-path {folder}/text.pt", "error: --lm-path {folder}/text.pt: " + DAMAGED),
]


@pytest.mark.parametrize(("flags", "named"), FLAGS)
def test_a_flag_that_cannot_be_used_is_named(data, capfd, flags, named):
    error = stopped(capfd, generate, [*data.generation, *flags.format(folder=data.folder).split()])
    assert named.format(folder=data.folder) in error


@pytest.mark.parametrize("more", [[], ["--no-fastgen"]])
@pytest.mark.parametrize(
    ("file", "said"),
    [("text.pt", DAMAGED), ("empty.pt", DAMAGED), ("cut.pt", DAMAGED), ("none.pt", "does not exist (accepted: ")],
)
def test_a_file_that_is_no_checkpoint_is_named(data, capfd, file, said, more):
    path = str(data.folder / file)
    for main, args in ((generate, data.generation), (eval_lm, [str(data.folder / "lm"), "--cpu"])):
        assert f"error: --path {path}: {said}" in stopped(capfd, main, [*args, "--path", path, *more])


@pytest.mark.parametrize("main", [generate, eval_lm])
def test_missing_data_is_named(capfd, caplog, tmp_path, main):
    with caplog.at_level(logging.INFO):
        error = stopped(capfd, main, [str(tmp_path / "none"), "--path", "checkpoint.pt", "--cpu"])
    assert f"error: DATA {tmp_path / 'none'}: does not exist" in error
    assert not caplog.text  # before the configuration is logged, and anything is loaded


@pytest.mark.parametrize("main", [generate, eval_lm])
def test_the_version_is_shown_without_fairseq(capfd, monkeypatch, main):
    monkeypatch.setitem(sys.modules, "fairseq", None)
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert (stopped.value.code, capfd.readouterr().out) == (0, f"fastgen {fastgen.__version__}\n")


@pytest.mark.parametrize("main", [generate, eval_lm])
def test_a_missing_path_is_named(capfd, tmp_path, main):
    assert "error: --path is missing" in stopped(capfd, main, [str(tmp_path), "--cpu"])


@pytest.mark.parametrize("more", [[], ["--no-fastgen"]])
def test_missing_languages_are_named(capfd, tmp_path, more):
    args = [str(tmp_path), "--path", "checkpoint.pt", "--cpu", *more]
    error = stopped(capfd, generate, args)
    assert f"DATA {tmp_path}: " in error and "--source-lang and --target-lang" in error
    for languages in ([], ["-s", "de"]):
        error = stopped(capfd, generate, [*args, *languages, "--tokenizer", "moses"])
        assert "error: --tokenizer moses needs --source-lang and --target-lang" in error


def test_wer_names_its_missing_package(data, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "editdistance", None)
    error = stopped(capfd, generate, [*data.generation, "--scoring", "wer"])
    assert "--scoring wer needs the package editdistance" in error


LEFT_OUT = "fastgen-generate-for-fairseq: fairseq leaves out "


def test_sentences_that_fairseq_leaves_out_are_counted(data, capfd):
    assert generate(data.generation) == 0
    captured = capfd.readouterr()
    assert captured.out.count("\nH-") == 56
    (said,) = (line for line in captured.err.splitlines() if LEFT_OUT in line)
    assert said.startswith(f"{LEFT_OUT}4 of 60 sentences") and "--required-batch-size-multiple 1 keeps them" in said


@pytest.mark.parametrize("multiple", [1, 8])
def test_sentences_that_fairseq_skips_are_counted(data, capfd, multiple):
    flags = f"--skip-invalid-size-inputs-valid-test --max-source-positions 9 --required-batch-size-multiple {multiple}"
    assert generate([*data.generation, *flags.split()]) == 0
    captured = capfd.readouterr()
    missing = 60 - captured.out.count("\nH-")
    assert 0 < missing < 60
    (said,) = (line for line in captured.err.splitlines() if LEFT_OUT in line)
    assert said.startswith(f"{LEFT_OUT}{missing} of 60 sentences, those that are too long (--skip-invalid-size-inputs")
    assert ("and a last batch that is not a multiple of 8" in said) == (multiple == 8)


@pytest.mark.parametrize(
    "flags",
    [
        "--required-batch-size-multiple 1",
        "--batch-size 4 --required-batch-size-multiple 4 --distributed-world-size 2",
        "--skip-invalid-size-inputs-valid-test --required-batch-size-multiple 1",
    ],
)
def test_sentences_missing_for_other_reasons_are_not_counted(data, capfd, flags):
    assert generate([*data.generation, *flags.split()]) == 0
    captured = capfd.readouterr()
    assert "\nH-" in captured.out
    assert LEFT_OUT not in captured.err


def test_a_run_without_sentences_is_refused(data, capfd):
    error = stopped(capfd, generate, [*data.generation, "--required-batch-size-multiple", "100"])
    assert "fairseq leaves out 60 of 60 sentences" in error
