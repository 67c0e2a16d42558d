"""`--retry_failed` generates failed lines again, in place, and changes no others."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from cli_loop import command, write_lines
from cli_models import WORDS, sentences

from fastgen.batch import files
from fastgen.batch.task import Task

TOO_LONG = " ".join(WORDS * 2)
LINES = [*sentences(20), "", TOO_LONG, *sentences(50, seed=1), TOO_LONG, *sentences(9, seed=2)]


@pytest.fixture
def run(bart, tmp_path):
    """Runs the command on LINES; OUTPUT is in `tmp_path`."""
    source = write_lines(tmp_path / "in.txt", LINES)
    return lambda output, *flags: command(bart, source, tmp_path / output, "--bs", 4, "--beam", 2, *flags)


def failing_for(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Makes the model raise for lines with `word` until the patch is undone."""
    generate = Task.generate

    def generates(self: Task, batch):
        if any(word.encode() in item.line.raw.split() for item in batch.items):
            raise RuntimeError("the model is tired")
        return generate(self, batch)

    monkeypatch.setattr(Task, "generate", generates)


def summary_of(output: Path) -> dict:
    return json.loads(Path(f"{output}.run.json").read_text())


@pytest.mark.parametrize("name", ["out.txt", "out.jsonl", "out.txt.gz"])
def test_retried_lines_are_those_of_a_run_without_failure(run, tmp_path, monkeypatch, capsys, name):
    run(f"whole_{name}")
    with monkeypatch.context() as tired:
        failing_for(tired, "word7")
        assert run(name) == 1
    failed = [number for number, line in enumerate(LINES, start=1) if "word7" in line.split()]
    assert summary_of(tmp_path / name)["failed"] == failed and 5 < len(failed) < len(LINES)
    capsys.readouterr()
    assert run(name, "--retry_failed") == 1  # two lines are always too long
    said = capsys.readouterr().err
    assert f"{len(failed)} failed lines generated again, 2 failed again\n" in said
    assert f"2 of {len(LINES)} inputs failed (--retry_failed reruns only these)" in said
    retried, expected = (list(files.raw_lines("OUTPUT", str(tmp_path / each))) for each in (name, f"whole_{name}"))
    if name.endswith("jsonl"):
        retried, expected = (
            [[o["text"] for o in json.loads(line)["outputs"]] for line in each] for each in (retried, expected)
        )
    assert retried == expected
    assert run(name, "--resume") == 1 and "the same run wrote it" in capsys.readouterr().err


def test_flags_that_make_lines_fail_may_differ(run, tmp_path, capsys):
    assert run("out.txt") == 1
    before = (tmp_path / "out.txt").read_bytes().split(b"\n")
    assert run("out.txt", "--retry_failed", "--truncation") == 0
    after = (tmp_path / "out.txt").read_bytes().split(b"\n")
    failed = [number for number, line in enumerate(LINES) if line == TOO_LONG]
    assert [n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] == failed
    said = capsys.readouterr().err
    assert "flags differ from those of the run that made OUTPUT: --truncation was not given and is given now" in said
    written = summary_of(tmp_path / "out.txt")
    assert (written["failures"], written["failed"], written["signature"]["--truncation"]) == (0, [], False)
    assert written["retries"] == [{"lines": 2, "changes": ["--truncation was not given and is given now"]}]
    assert run("out.txt", "--retry_failed") == 0
    assert "is complete: none of its lines failed, so nothing is retried" in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["write", "before_replace", "after_replace"])
def test_a_retry_that_is_killed_is_resumed(run, tmp_path, monkeypatch, moment):
    """OUTPUT is whole at any time, and the same command with --resume ends with the same bytes."""
    with monkeypatch.context() as tired:
        failing_for(tired, "word7")
        for name in ("out.jsonl", "whole.jsonl"):
            run(name)
    before = (tmp_path / "out.jsonl").read_bytes()
    run("whole.jsonl", "--retry_failed")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    replace, journal_write, writes = os.replace, files.write_all, iter(range(2))

    def replacing(source, target):
        if Path(target).name == "out.jsonl":
            if moment == "after_replace":
                replace(source, target)
            raise SystemExit
        replace(source, target)

    def writing(descriptor, data):
        if next(writes, None) is None:
            raise OSError("killed")
        journal_write(descriptor, data)

    with monkeypatch.context() as killed:
        if moment == "write":
            killed.setattr(files, "write_all", writing)
        else:
            killed.setattr(os, "replace", replacing)
        with suppress(SystemExit):
            assert run("out.jsonl", "--retry_failed") == 1
    assert (tmp_path / "out.jsonl").read_bytes() == (whole if moment == "after_replace" else before)
    assert (tmp_path / "out.jsonl.part").exists()
    assert run("out.jsonl", "--retry_failed") == 2
    assert run("out.jsonl", "--resume") == 2
    assert run("out.jsonl", "--retry_failed", "--resume") == 1
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert not (tmp_path / "out.jsonl.part").exists()


def test_shards_and_merged_outputs_are_retried(run, tmp_path, monkeypatch):
    shards = [("--num_shards", 2, "--shard_id", shard) for shard in range(2)]
    run("whole.txt", "--seed", 0)
    with monkeypatch.context() as tired:
        failing_for(tired, "word7")
        run("tired.txt", "--seed", 0)
        for shard in shards:
            run("out.txt", *shard)
    run("out.txt", "--num_shards", 2, "--merge")
    assert summary_of(tmp_path / "out.txt") == summary_of(tmp_path / "tired.txt")
    assert run("out.txt", "--retry_failed") == 1
    whole = (tmp_path / "whole.txt").read_bytes()
    assert (tmp_path / "out.txt").read_bytes() == whole
    for shard in shards:
        run("out.txt", *shard, "--retry_failed")
    assert run("out.txt", "--num_shards", 2, "--merge", "--overwrite") == 1
    assert (tmp_path / "out.txt").read_bytes() == whole


REFUSED = [
    ("none.txt", (), "none.txt is not complete (accepted: --resume completes it)"),
    ("begun.txt", (), "begun.txt is not complete (accepted: --resume completes it)"),
    ("out.txt", ("--overwrite",), "--retry_failed and --overwrite contradict each other"),
    ("out.txt", ("--merge", "--num_shards", "2"), "--retry_failed and --merge contradict each other"),
    ("foreign.txt", (), "was changed since its run"),
    ("changed.txt", (), "was changed since its run"),
    ("out.txt", ("--n_obs", "3"), "was made differently: --n_obs was not given and is 3 now"),
    ("out.txt", ("--output_format", "jsonl"), 'was made differently: --output_format was "text" and is "jsonl" now'),
]


def test_an_output_that_cannot_be_retried_is_named(run, tmp_path, capsys):
    for name in ("out.txt", "changed.txt"):
        run(name)
    (tmp_path / "begun.txt.part").write_text("")
    (tmp_path / "foreign.txt").write_text("a\n")
    with (tmp_path / "changed.txt").open("a") as file:
        file.write("\n")
    capsys.readouterr()
    for output, flags, message in REFUSED:
        assert run(output, "--retry_failed", *flags) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    write_lines(tmp_path / "in.txt", ["word1"])
    assert run("out.txt", "--retry_failed") == 2
    assert "was made differently: INPUT's content changed" in capsys.readouterr().err
