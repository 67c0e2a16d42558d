"""Shards together write the records of one run; --merge orders them, and names missing shards."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest
from cli_loop import command, interrupted_after, write_lines
from cli_models import WORDS, save_llama, sentences
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.batch.errors import InputError
from fastgen.batch.files import Line
from fastgen.batch.planner import Item, Planner
from fastgen.batch.shards import Share, of_launcher, output_of, rank_and_world_size
from fastgen.batch.task import Task
from fastgen.cli.transformers.args import parse_arguments
from fastgen.reasons import counted
from fastgen.testing import configured

# Two blocks of 64 lines and a part of one, with lines that need no model and lines that fail.
LINES = [*sentences(60), "", "", *sentences(70, seed=1), " ".join(WORDS * 2), *sentences(9, seed=2)]
FLAGS = ("--bs", "4", "--beam", "2", "--output_format", "jsonl")
SAMPLING = ("--causal_lm", "--do_sample", "--seed", "3", "--max_new_tokens", "6", "--bs", "2", "--window", "0")


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "in.txt", LINES)


def run(model: Path, source: Path, output: Path, *flags: object) -> int:
    return command(model, source, output, "--quiet", *flags)


def run_shards(model: Path, source: Path, output: Path, shards: int, *flags: object) -> list[int]:
    """Runs all shards; returns their statuses."""
    each = [("--num_shards", shards, "--shard_id", shard) for shard in range(shards)]
    return [run(model, source, output, *flags, *shard) for shard in each]


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_shards_write_what_one_run_writes(bart, source, tmp_path, capsys, shards):
    assert run(bart, source, tmp_path / "one", *FLAGS) == 1  # a line fails
    assert sum(run_shards(bart, source, tmp_path / "out", shards, *FLAGS)) == 1  # in one of them
    assert command(bart, source, tmp_path / "out", *FLAGS, "--num_shards", shards, "--merge") == 1
    wrote = f"{len(LINES)} records of {counted(shards, 'shard')} merged into {tmp_path / 'out'}, 1 failed\n"
    assert wrote in capsys.readouterr().err
    assert (tmp_path / "out").read_bytes() == (tmp_path / "one").read_bytes()
    merged, single = (json.loads((tmp_path / f"{name}.run.json").read_bytes()) for name in ("out", "one"))
    del merged["signature"]["--seed"], single["signature"]["--seed"]  # drawn
    assert merged == single


def test_samples_of_shards_are_those_of_one_run(gpt2, source, tmp_path, capsys):
    single, output = tmp_path / "one.txt.gz", tmp_path / "out.txt.gz"
    run(gpt2, source, single, *SAMPLING)
    run_shards(gpt2, source, output, 3, *SAMPLING)
    parts = [gzip.decompress((tmp_path / f"out-0000{shard}-of-00003.txt.gz").read_bytes()) for shard in range(3)]
    assert [part.count(b"\n") for part in parts] == [46, 48, 48]
    run(gpt2, source, output, *SAMPLING, "--num_shards", 3, "--merge")
    assert output.read_bytes() == single.read_bytes()


def test_merge_names_shards_that_are_missing_or_differ(bart, source, tmp_path, capsys):
    for shard in (0, 2):
        run(bart, source, tmp_path / "out", *FLAGS, "--num_shards", 4, "--shard_id", shard)
    (tmp_path / "out-00002-of-00004").write_text("changed\n")
    capsys.readouterr()
    assert run(bart, source, tmp_path / "out", *FLAGS, "--num_shards", 4, "--merge") == 2
    missing = ", ".join(str(tmp_path / f"out-0000{shard}-of-00004") for shard in (1, 2, 3))
    assert f"not complete: 3 of 4 shards, {missing}\n" in capsys.readouterr().err
    for shard, beam in (0, 2), (1, 3):
        other = ("--bs", "4", "--beam", beam, "--num_shards", 2, "--shard_id", shard, "--output_format", "jsonl")
        run(bart, source, tmp_path / "out", *other)
    assert run(bart, source, tmp_path / "out", *FLAGS, "--num_shards", 2, "--merge") == 2
    assert "made differently" in (said := capsys.readouterr().err) and "--beam was 2 and is 3 now" in said
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out.")) == []


def test_a_merge_that_is_complete_stays(bart, source, tmp_path, capsys):
    output, merged = tmp_path / "out", (*FLAGS, "--num_shards", 2, "--merge")
    (tmp_path / "references").write_text("word1\n" * len(LINES))
    scored = ("--reference_path", tmp_path / "references")
    run(bart, source, tmp_path / "one", *FLAGS, *scored)
    scores = capsys.readouterr().out
    run_shards(bart, source, output, 2, *FLAGS)
    assert run(bart, source, output, *merged, *scored) == 1  # a line fails
    assert scores.startswith("rouge1") and capsys.readouterr().out == scores  # those of all shards
    before = output.read_bytes()
    assert run(bart, source, output, *merged) == 2
    assert "already exists" in capsys.readouterr().err
    assert command(bart, source, output, *merged, "--resume") == 1
    assert "out is complete" in capsys.readouterr().err
    assert output.read_bytes() == before


AUTO = ("--num_shards", "auto", "--shard_id", "auto")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def array(task: int, *tasks: int) -> dict[str, str]:
    """Returns the variables of a task of `sbatch --array=TASKS`."""
    values = {"ID": task, "MIN": min(tasks), "MAX": max(tasks), "COUNT": len(tasks), "STEP": 1}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN, (3, 8)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        (array(3, *range(5)) | {"SLURM_PROCID": "0"}, (3, 5)),
        (array(3, *range(5)) | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (7, 10)),
        (array(6, 3, 6), (6, None)),  # a part of an array
        (array(0, 0, 3), (0, None)),
        (array(8, *range(1, 9)), (8, None)),
        (array(6, *range(0, 8, 2)), (6, None)),
        (TORCHRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (3, 8)),  # torchrun inside srun
        ({"JOB_COMPLETION_INDEX": "4"}, (4, None)),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, (0, 1)),  # one process of `accelerate launch`
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, (3, 8)),
        (array(3, *range(5)) | {"ACCELERATE_MIXED_PRECISION": "no"}, (3, 5)),
        ({"RANK": "", "WORLD_SIZE": "", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        ({"RANK": "0", "WORLD_SIZE": "", "SLURM_ARRAY_TASK_ID": ""}, (0, 1)),
        (dict.fromkeys(("RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"), ""), None),
    ],
)
def test_auto_takes_the_numbers_of_the_launcher(environ, expected):
    assert rank_and_world_size(environ) == expected


@pytest.mark.parametrize("task", [3, 6])
def test_part_of_an_array_runs_the_shards_it_names(task):
    args = of_launcher(parsed("--num_shards", "8", "--shard_id", "auto"), array(task, 3, 6))
    assert (args.shard_id, args.output) == (task, f"out-{task:05}-of-00008.txt")


def parsed(*flags: str, output: str = "out.txt"):
    return parse_arguments(["demo", "in.txt", output, *flags])


def test_launchers_are_read_with_auto_only():
    shard = of_launcher(parsed("--num_shards", "2", "--shard_id", "1"), TORCHRUN)
    assert (shard.num_shards, shard.shard_id, shard.output, shard.seed) == (2, 1, "out-00001-of-00002.txt", 0)
    assert of_launcher(parsed(), TORCHRUN) == parsed()
    both = of_launcher(parsed("--num_shards", "auto", "--shard_id", "auto", "--seed", "4"), TORCHRUN)
    assert (both.num_shards, both.shard_id, both.output, both.seed) == (8, 3, "out-00003-of-00008.txt", 4)
    job = of_launcher(parsed("--num_shards", "9", "--shard_id", "auto"), {"JOB_COMPLETION_INDEX": "4"})
    assert (job.num_shards, job.shard_id) == (9, 4)


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (("--num_shards", "2"), {}, "--num_shards and --shard_id need each other"),
        (("--shard_id", "2"), {}, "--num_shards and --shard_id need each other"),
        (("--num_shards", "2", "--shard_id", "2"), {}, "--shard_id 2 (accepted: 0 to 1)"),
        (("--merge",), {}, "--merge needs --num_shards N without --shard_id"),
        (("--num_shards", "2", "--shard_id", "1", "--merge"), {}, "--merge needs --num_shards N without --shard_id"),
        (AUTO, {}, "auto: no variables of a launcher are set"),
        (("--num_shards", "3", "--shard_id", "auto"), TORCHRUN, "--shard_id 3 (accepted: 0 to 2): auto takes it from"),
        (("--num_shards", "8", "--shard_id", "auto"), array(8, *range(1, 9)), "with --array=0-7"),
        (AUTO, array(3, 3, 6), "SLURM_ARRAY_TASK_ID=3, SLURM_ARRAY_TASK_MIN=3"),
        (("--num_shards", "auto", "--shard_id", "0"), array(1, 1, 2, 3), "--num_shards N, or a whole Slurm array"),
        (AUTO, {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX=4 does not say how many shards there are"),
        (AUTO, {"RANK": "zero", "WORLD_SIZE": "2"}, "auto: RANK=zero is not a number (accepted: a whole number"),
        (AUTO, {"RANK": "-1", "WORLD_SIZE": "2"}, "auto: RANK=-1 is not a number"),
        (AUTO, {"RANK": "0", "WORLD_SIZE": "2.5"}, "auto: WORLD_SIZE=2.5 is not a number"),
        (("--num_shards", "2", "--shard_id", "1", "--reference_path", "r"), {}, "--reference_path r does not go with"),
    ],
)
def test_contradicting_flags_of_shards_are_refused(flags, environ, message):
    with pytest.raises(InputError) as error:
        of_launcher(parsed(*flags), environ)
    assert message in str(error.value)


def test_streams_have_no_shards():
    with pytest.raises(InputError, match="OUTPUT - does not go with --num_shards 2"):
        of_launcher(parsed("--num_shards", "2", "--shard_id", "1", output="-"), os.environ)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("out", "out-00003-of-00008"),
        ("a.b/my.data.jsonl.gz", "a.b/my.data-00003-of-00008.jsonl.gz"),
        ("s3://bucket/out.txt", "s3://bucket/out-00003-of-00008.txt"),
    ],
)
def test_the_name_of_a_shard_keeps_its_suffixes(output, expected):
    assert output_of(output, 3, 8) == expected


def test_an_empty_shard_says_so_even_if_quiet(bart, source, tmp_path, capsys):
    flags = ("--bs", "200", "--num_shards", 3)  # one batch
    assert run(bart, source, tmp_path / "out", *flags, "--shard_id", 0) == 0
    said = capsys.readouterr().err
    assert "shard 0 of 3 is empty: INPUT has fewer batches than there are shards (142 lines)" in said
    assert (tmp_path / "out-00000-of-00003").read_bytes() == b""
    assert run(bart, source, tmp_path / "out", *flags, "--shard_id", 1) == 0
    assert run(bart, source, tmp_path / "out", *flags, "--shard_id", 2) == 1  # a line fails
    assert run(bart, source, tmp_path / "out", *flags[2:], "--merge") == 1
    assert len((tmp_path / "out").read_bytes().splitlines()) == 142


def test_input_without_lines_loads_no_model(bart, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Task, "load", lambda self: pytest.fail("the model is loaded"))
    source.write_bytes(b"")
    assert run(bart, source, tmp_path / "none") == 0 and (tmp_path / "none").read_bytes() == b""
    assert capsys.readouterr().err == ""
    assert run(bart, source, tmp_path / "out", *FLAGS, "--num_shards", 4, "--shard_id", 3) == 0
    assert (tmp_path / "out-00003-of-00004").read_bytes() == b""
    assert "shard 3 of 4 is empty" in capsys.readouterr().err


def lines_of_each(lines: int, rows: int, shards: int, planner: Planner | None = None) -> list[list[int]]:
    """Returns the numbers of the lines of each shard, of INPUT with lines of 1 to 50 tokens."""
    planner = planner or Planner(rows, None, 16 * rows)
    each = []
    for shard in range(shards):
        share = Share(shard, shards, planner.window, lines, 1 if planner.window % rows else rows)
        draw = random.Random(1)
        chunk = [Line(number, b"") for number in range(1, lines + 1)]
        lengths = [draw.randint(1, 50) for _ in chunk]
        chunks = share.chunks(chunk[start : start + 64] for start in range(0, lines, 64))
        items = [Item(line, length=lengths[line.number - 1]) for own in chunks for line in own]
        batches = [*share.batches(planner, items)]
        each.append([item.line.number for batch in batches for item in (*batch.items, *batch.skipped)])
    return each


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 900), st.integers(1, 9), st.integers(1, 12))
@example(200, 16, 2)
@example(10_000, 64, 8)
def test_shards_have_equal_shares_to_a_batch(lines, rows, shards):
    each = lines_of_each(lines, rows, shards)
    assert sorted(number for own in each for number in own) == list(range(1, lines + 1))
    counts = list(map(len, each))
    assert max(counts) - min(counts) <= rows


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 300), st.integers(1, 9), st.integers(1, 9), st.integers(1, 40), st.none() | st.integers(1, 200)
)  # fmt: skip
def test_each_line_is_in_one_shard(lines, rows, shards, window, padded_tokens):
    each = lines_of_each(lines, rows, shards, Planner(rows, padded_tokens, window, window_tokens=300))
    assert sorted(number for own in each for number in own) == list(range(1, lines + 1))
    assert all(abs(len(own) - lines / shards) < 2 * rows for own in each)


def test_resumed_shards_of_equal_inputs_give_one_runs_output(bart, tmp_path):
    """All share a window, in which lines equal lines of other shards."""
    lines = [*sentences(30), *sentences(20), "", *sentences(13, seed=2)]
    source = write_lines(tmp_path / "in.txt", lines)
    assert run(bart, source, tmp_path / "one", *FLAGS) == 0
    with interrupted_after(2):
        assert run(bart, source, tmp_path / "out", *FLAGS, "--num_shards", 4, "--shard_id", 1) == 130
    assert run_shards(bart, source, tmp_path / "out", 4, *FLAGS, "--resume") == [0, 0, 0, 0]
    assert run(bart, source, tmp_path / "out", *FLAGS, "--num_shards", 4, "--merge") == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_shard_of_an_earlier_version_is_not_merged(bart, source, tmp_path, capsys):
    run_shards(bart, source, tmp_path / "out", 2, *FLAGS)
    run_json = tmp_path / "out-00001-of-00002.run.json"
    content = json.loads(run_json.read_bytes())
    del content["lines"]
    run_json.write_text(json.dumps(content))
    assert run(bart, source, tmp_path / "out", *FLAGS, "--num_shards", 2, "--merge") == 2
    assert "not complete: 1 of 2 shards, " in capsys.readouterr().err


def test_scores_of_shards_and_of_resumed_runs_are_bit_equal(tmp_path):
    """Steps captured by earlier batches must not be replayed sooner than in one run."""
    llama, out = save_llama(tmp_path / "llama"), tmp_path / "out"
    source = write_lines(tmp_path / "in.txt", sentences(48, longest=9))
    flags = ("--causal_lm", *FLAGS[:2], "--window", 4, "--beam", 3, "--max_new_tokens", 100, *FLAGS[4:])
    with configured(share="always"):
        run(llama, source, tmp_path / "one", *flags)
        with interrupted_after(2):
            assert run(llama, source, out, *flags, "--num_shards", 3, "--shard_id", 0) == 130
        assert run_shards(llama, source, out, 3, *flags, "--resume") == [0, 0, 0]
        assert run(llama, source, out, *flags, "--num_shards", 3, "--merge") == 0
        assert out.read_bytes() == (tmp_path / "one").read_bytes()
