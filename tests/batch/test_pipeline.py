"""The pipeline writes what a plain loop writes, however lines are batched; what fails in one line stays there."""

import functools
import json
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_loop import generate, plain_loop, plain_samples
from cli_models import POSITIONS, WORDS, save_bart, save_gpt2, sentences

import fastgen
from fastgen.batch import files
from fastgen.batch.files import Survey
from fastgen.batch.pipeline import SplitOnOOM, batch_seed
from fastgen.batch.planner import Batch, GeneratedBatch
from fastgen.cli.transformers.command import main

LINES = sentences(70)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("gpt2"))


def watched_outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What generate returns for each batch."""
    kind = transformers.BartForConditionalGeneration
    original, outputs = kind.generate, []

    def watched(self: Any, **inputs: Any) -> Any:
        output = original(self, **inputs)
        outputs.append(output)
        return output

    monkeypatch.setattr(kind, "generate", watched)
    return outputs


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of the input_ids of each batch."""
    seen: list[tuple[int, int]] = []
    for kind in (transformers.BartForConditionalGeneration, transformers.GPT2LMHeadModel):
        original = kind.generate

        def watched(self: Any, *, original: Any = original, **inputs: Any) -> Any:
            seen.append(tuple(inputs["input_ids"].shape))
            return original(self, **inputs)

        monkeypatch.setattr(kind, "generate", watched)
    return seen


SIZES = [
    ("--bs", 4, "--window", 20),
    ("--bs", 1),
    ("--bs", 7, "--window", 0),
    ("--batch_tokens", 120),
    ("--bs", 5, "--batch_tokens", 90, "--window", 33, "--preprocess_workers", 3, "--postprocess_workers", 2),
]


@pytest.mark.parametrize("size", SIZES)
def test_output_does_not_depend_on_batches_and_workers(tmp_path: Path, bart: Path, size: tuple) -> None:
    expected = plain_loop(bart, LINES, 4, num_beams=3)
    assert generate(tmp_path, bart, LINES, "--beam", 3, *size) == expected


def test_lines_of_one_length_are_generated_together(tmp_path: Path, bart: Path, shapes: list) -> None:
    generate(tmp_path, bart, LINES, "--bs", 5, "--window", 35)
    widths = [width for _, width in shapes]
    assert widths[:7] == sorted(widths[:7], reverse=True) and widths[7:] == sorted(widths[7:], reverse=True)
    sorted_cells = sum(rows * width for rows, width in shapes)
    shapes.clear()
    generate(tmp_path, bart, LINES, "--bs", 5, "--window", 0)
    assert sorted_cells < 0.85 * sum(rows * width for rows, width in shapes)


def test_batch_tokens_counts_beams(tmp_path: Path, bart: Path, shapes: list) -> None:
    generate(tmp_path, bart, LINES, "--batch_tokens", 240, "--beam", 3)
    assert all(3 * rows * width <= 240 for rows, width in shapes)
    assert max(rows for rows, _ in shapes) > 8


def test_samples_of_a_line_depend_on_the_seed_and_its_number(tmp_path: Path, gpt2: Path) -> None:
    lines = LINES[:14]
    expected = [
        plain_samples(gpt2, line, [(3, number, 0), (3, number, 1)], 5, temperature=0.8, top_k=9)
        for number, line in enumerate(lines, start=1)
    ]
    flags = ("--causal_lm", "--do_sample", "--top_k", 9, "--temperature", 0.8, "--num_return_sequences", 2)
    flags += ("--max_new_tokens", 5, "--seed", 3, "--output_format", "jsonl")
    for others in (("--bs", 4), ("--bs", 5, "--window", 0), ("--bs", 3, "--without_fastgen_opt")):
        records = map(json.loads, generate(tmp_path, gpt2, lines, *flags, *others))
        assert [[output["text"] for output in record["outputs"]] for record in records] == expected


def test_sampled_beams_are_those_of_a_loop_that_seeds_batches(tmp_path: Path, gpt2: Path) -> None:
    settings = {"do_sample": True, "num_beams": 2, "max_new_tokens": 5}
    texts = []
    for start in range(0, 10, 4):
        torch.manual_seed(batch_seed(3, start // 4))
        texts += plain_loop(gpt2, LINES[start : min(start + 4, 10)], 4, causal_lm=True, **settings)
    flags = ("--causal_lm", "--do_sample", "--beam", 2, "--max_new_tokens", 5, "--seed", 3, "--bs", 4)
    assert generate(tmp_path, gpt2, LINES[:10], *flags) == texts


def test_equal_inputs_are_generated_once(
    tmp_path: Path, bart: Path, shapes: list, capsys: pytest.CaptureFixture
) -> None:
    lines = [*LINES[:5], *LINES[:3], LINES[0], ""]
    flags = ("--bs", 4, "--output_format", "jsonl", "--beam", 2)
    records = [json.loads(line) for line in generate(tmp_path, bart, lines, *flags)]
    assert sum(rows for rows, _ in shapes) == 5
    assert "4 inputs equal others, and were generated once with them" in capsys.readouterr().err
    assert [record.pop("line") for record in records] == list(range(1, 11))
    assert records[:3] == records[5:8] and records[8] == records[0] and records[9]["outputs"] == []
    assert [record["outputs"][0]["text"] for record in records[:9]] == plain_loop(bart, lines[:9], 4, num_beams=2)
    samples = generate(tmp_path, bart, lines[:1] * 6, "--do_sample", "--seed", 1)
    assert len(set(samples)) > 1


def test_jsonl_holds_the_fields_the_outputs_their_scores_and_lengths(tmp_path: Path, bart: Path) -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(bart)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart)
    records = [{"id": f"a{n}", "article": line, "date": {"year": n}} for n, line in enumerate(LINES[:10])]
    flags = ("--input_format", "jsonl", "--text_field", "article", "--id_field", "id", "--bs", 4, "--beam", 3)
    lines = generate(tmp_path, bart, list(map(json.dumps, records)), *flags, "--num_return_sequences", 2)
    found = [json.loads(line) for line in lines]
    assert [{name: each[name] for name in ("id", "article", "date")} for each in found] == records
    with fastgen.disabled():
        for line, each in zip(LINES, found):
            batch = tokenizer([line], return_tensors="pt")
            plain = model.generate(
                input_ids=batch.input_ids,
                num_beams=3,
                num_return_sequences=2,
                output_scores=True,
                return_dict_in_generate=True,
            )
            assert [o["text"] for o in each["outputs"]] == tokenizer.batch_decode(
                plain.sequences, skip_special_tokens=True
            )
            scores = [output["score"] for output in each["outputs"]]
            assert scores == pytest.approx(plain.sequences_scores.tolist(), abs=1e-4)
            assert each["input_tokens"] == batch.input_ids.shape[1]
            generated = plain.sequences[:, 1:]
            lengths = [(row != 1).sum().item() for row in generated]
            assert [output["tokens"] for output in each["outputs"]] == lengths


@pytest.mark.parametrize(
    "flags", [("--beam", 2), ("--beam", 2, "--gen", "max_time=1000")], ids=["own loop", "library's"]
)
def test_scores_do_not_cost_those_of_every_step(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple
) -> None:
    outputs = watched_outputs(monkeypatch)
    lines = generate(tmp_path, bart, LINES, *flags, "--output_format", "jsonl")
    assert all("score" in json.loads(line)["outputs"][0] for line in lines)
    assert outputs and all(each.sequences_scores is not None and each.scores is None for each in outputs)


def test_scores_are_the_same_without_fastgen(tmp_path: Path, bart: Path) -> None:
    flags = ("--beam", 3, "--num_return_sequences", 2, "--output_format", "jsonl")
    expected = generate(tmp_path, bart, LINES, *flags, "--without_fastgen_opt")
    found = generate(tmp_path, bart, LINES, *flags)
    pairs = [[json.loads(line)["outputs"] for line in lines] for lines in (expected, found)]
    for stock, ours in zip(*map(chain.from_iterable, pairs)):
        assert ours["text"] == stock["text"] and ours["score"] == pytest.approx(stock["score"], abs=1e-4)


def test_from_standard_input_to_standard_output(bart: Path) -> None:
    call = [sys.executable, "-m", "fastgen.cli.transformers.command", bart, "-", "-", "--bs", "4"]
    done = subprocess.run(
        call, input="\n".join(LINES), capture_output=True, text=True, cwd=Path(fastgen.__file__).parents[1], check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == plain_loop(bart, LINES, 4)
    assert "70 lines in " in done.stderr
    done = subprocess.run(
        call, input="", capture_output=True, text=True, cwd=Path(fastgen.__file__).parents[1], check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("flags", [(), ("--input_format", "jsonl"), ("--reference_path", "in")])
def test_an_empty_input_gives_an_empty_output(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, flags: tuple
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_bytes(b"")
    assert main([str(bart), "in", "out", *flags]) == 0
    assert (tmp_path / "out").read_bytes() == b""
    assert "0 lines in " in capsys.readouterr().err


def test_a_line_that_fails_is_listed_and_stops_no_other(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    lines = [line.encode() for line in LINES[:12]]
    lines[2] = " ".join(WORDS * 2).encode()
    lines[5] = "wörd".encode("latin-1")
    lines[7] = b"word1 POISON word2"
    source.write_bytes(b"\n".join(lines))
    tokenize = transformers.PreTrainedTokenizerFast._encode_plus

    def raises(self: Any, text: Any, *args: Any, **more: Any) -> Any:
        if "POISON" in str(text):
            raise TypeError("cannot\nbe read")
        return tokenize(self, text, *args, **more)

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "_encode_plus", raises)
    assert main([str(bart), str(source), str(output), "--bs", "4"]) == 1
    stderr = capsys.readouterr().err
    assert f"line 3: has {2 * len(WORDS) + 2} tokens, the limit is {POSITIONS}" in stderr
    assert "line 6: is not UTF-8" in stderr
    assert "line 8: cannot be tokenized (TypeError: cannot be read)" in stderr
    assert "3 of 12 inputs failed" in stderr.splitlines()[-1]
    good = [n for n in range(12) if n not in (2, 5, 7)]
    written = output.read_text().split("\n")[:-1]
    assert [written[n] for n in (2, 5, 7)] == ["", "", ""]
    assert [written[n] for n in good] == plain_loop(bart, [LINES[n] for n in good], 4)
    capsys.readouterr()
    assert (
        main([str(bart), str(source), str(output), "--bs", "4", "--output_format", "jsonl", "--quiet", "--overwrite"])
        == 1
    )
    assert capsys.readouterr().err.count("\n") == 4  # the failures, and how many
    failed = [json.loads(line) for line in output.read_text().splitlines()]
    assert [bool(each.get("error")) for each in failed] == [n not in good for n in range(12)]
    assert failed[7] == {"line": 8, "outputs": [], "error": "cannot be tokenized (TypeError: cannot be read)"}


def test_out_of_memory_makes_batches_smaller_and_changes_no_output(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    expected = plain_loop(bart, LINES, 4, num_beams=2)
    forward = transformers.models.bart.modeling_bart.BartEncoder.forward
    longest = max(len(line.split()) for line in LINES) + 2

    @functools.wraps(forward)  # the library looks at its arguments
    def small_memory(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        if input_ids.numel() > 3 * longest:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return forward(self, input_ids=input_ids, **more)

    monkeypatch.setattr(transformers.models.bart.modeling_bart.BartEncoder, "forward", small_memory)
    assert generate(tmp_path, bart, LINES, "--bs", 16, "--beam", 2) == expected
    stderr = capsys.readouterr().err
    assert f"out of memory with 16 inputs of length {longest}" in stderr
    assert 3 <= stderr.count("out of memory") <= 6  # 16, 8 and 4 rows; then only what is smaller, and fails too
    source, output = tmp_path / "input.txt", tmp_path / "output.txt"
    longest = longest // 3 - 1
    assert main([str(bart), str(source), str(output), "--bs", "16", "--beam", "2", "--overwrite"]) == 1
    stderr = capsys.readouterr().err
    failed = [n for n, line in enumerate(LINES) if len(line.split()) + 2 > 3 * longest]
    assert failed
    for n in failed:
        assert f"line {n + 1}: the memory is too small for this input" in stderr
    written = output.read_text().splitlines()
    assert written == ["" if n in failed else text for n, text in enumerate(expected)]


POISON = "word9 " * 13


def poisoned(monkeypatch: pytest.MonkeyPatch, every_line: bool = False) -> None:
    """The model raises for a batch with POISON in it, or always."""
    original = transformers.BartForConditionalGeneration.generate

    def raising(self: Any, **inputs: Any) -> Any:
        poison = inputs["input_ids"].eq(13).sum(1).ge(13).any()
        if every_line or poison:
            raise KeyError("of\nthe model")
        return original(self, **inputs)

    monkeypatch.setattr(transformers.BartForConditionalGeneration, "generate", raising)


@pytest.mark.parametrize("flags", [(), ("--window", "0"), ("--bs", "1"), ("--batch_tokens", "60")])
def test_a_line_for_which_the_model_raises_fails_alone(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, flags: tuple
) -> None:
    expected = plain_loop(bart, LINES, 4)
    poisoned(monkeypatch)
    source, output = tmp_path / "in", tmp_path / "out"
    bad = [4, 9, 10, 33]
    lines = [POISON if number in bad else line for number, line in enumerate(LINES)]
    source.write_text("\n".join(lines))
    command = [str(bart), str(source), str(output), "--output_format", "jsonl", *flags]
    assert main(command) == 1
    records = [json.loads(line) for line in output.read_text().splitlines()]
    error = "cannot be generated for (KeyError: 'of\\nthe model')"
    for number, record in enumerate(records):
        if number in bad:
            assert record == {"line": number + 1, "outputs": [], "error": error}
        else:
            assert record["outputs"][0]["text"] == expected[number]
    stderr = capsys.readouterr().err
    assert f"line 5: {error}" in stderr and stderr.splitlines()[-1].endswith("4 of 70 inputs failed")


def test_an_unknown_token_fails_its_line_before_a_gpu_meets_it(
    tmp_path: Path, bart: Path, capsys: pytest.CaptureFixture
) -> None:
    model = shutil.copytree(bart, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["unknown"])
    tokenizer.save_pretrained(model)
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join([LINES[0], "word1 unknown", LINES[1]]))
    assert main([str(model), str(source), str(output)]) == 1
    first, second = plain_loop(bart, LINES[:2], 2)
    assert output.read_text().split("\n")[:-1] == [first, "", second]
    assert "line 2: has the token 64, the last that MODEL knows is 63" in capsys.readouterr().err


def test_a_model_that_fails_for_every_line_ends_the_run_which_can_be_gone_on_with(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(LINES * 20))
    command = [str(bart), str(source), str(output), "--bs", "4", "--window", "16", "--resume"]
    with monkeypatch.context() as patch:
        crash_after(patch, 8)
        with pytest.raises(Crash):
            main(command)
    part = tmp_path / "out.part"
    before = part.read_bytes()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        poisoned(patch, every_line=True)
        assert main(command) == 1
    *_, last, left = capsys.readouterr().err.splitlines()
    assert "the same run with --resume resumes" in last + left
    assert "every line of 4 batches failed; line " in last + left and "KeyError: 'of\\nthe model'" in last + left
    assert part.read_bytes() == before != b""
    assert main(command) == 0
    assert output.read_text().split("\n")[:-1] == plain_loop(bart, LINES, 4) * 20


def small_memory_for(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    original = transformers.GPT2LMHeadModel.generate

    def generate_little(self: Any, **inputs: Any) -> Any:
        if inputs["input_ids"].numel() > tokens:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return original(self, **inputs)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "generate", generate_little)


class Crash(Exception):
    """Between two batches, in the middle of a run."""


def crash_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    original, left = SplitOnOOM.__call__, [batches]

    def crashing(self: SplitOnOOM, batch: Batch) -> list[GeneratedBatch]:
        left[0] -= 1
        if left[0] < 0:
            raise Crash
        return original(self, batch)

    monkeypatch.setattr(SplitOnOOM, "__call__", crashing)


def test_failures_before_a_resumed_run_count(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"\xff\n" + "\n".join(LINES).encode())
    command = [str(bart), str(source), str(output), "--bs", "4", "--window", "8"]
    with monkeypatch.context() as patch:
        crash_after(patch, 5)
        with pytest.raises(Crash):
            main(command)
    capsys.readouterr()
    assert main([*command, "--resume"]) == 1
    assert "1 of 71 inputs failed" in capsys.readouterr().err
    assert output.read_text().split("\n")[1:-1] == plain_loop(bart, LINES, 4)
    assert main([*command, "--resume"]) == 1  # it is complete, and so it stays
    assert "1 of 71 inputs failed" in capsys.readouterr().err


def test_input_that_ends_early_completes_nothing(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(LINES))
    monkeypatch.setattr(files, "survey", lambda path: Survey(len(LINES) + 1, "the sum of a longer file"))
    assert main([str(bart), str(source), str(output)]) == 2
    assert "INPUT changed while it was read: it had 71 lines, and 70 could be read" in capsys.readouterr().err
    assert not output.exists()


def test_resume_has_nothing_to_do_where_the_same_command_has_completed_output(
    tmp_path: Path, bart: Path, shapes: list, capsys: pytest.CaptureFixture
) -> None:
    source, output, scores = tmp_path / "in", tmp_path / "out", tmp_path / "scores.json"
    source.write_text("\n".join(LINES))
    command = [str(bart), str(source), str(output), "--resume"]
    assert main(command) == 0
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    shapes.clear()
    capsys.readouterr()
    assert main(command) == 0
    assert f"{output} is complete" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    capsys.readouterr()
    assert main([*command, "--beam", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()  # nothing is loaded for that
    assert "--beam was not given, is 2" in line and "--overwrite" in line
    assert main([*command, "--n_obs", "3"]) == 2  # a shorter file would take the place of a longer one
    assert main(command[:-1]) == 2
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before
    # Scores that are asked for later need no further run.
    scored = [*command, "--reference_path", str(source), "--score_path", str(scores)]
    for _ in range(2):
        assert main(scored) == 0
        assert json.loads(scores.read_text())["lines"] == 70
    assert shapes == []
    assert main([*command, "--beam", "2", "--overwrite"]) == 0
    assert output.read_text().splitlines() == plain_loop(bart, LINES, 4, num_beams=2)


SAMPLING = ("--causal_lm", "--do_sample", "--max_new_tokens", "5", "--seed", "3", "--bs", "4")


@pytest.mark.parametrize(("beams", "tokens"), [((), None), (("--beam", "2"), None), ((), 30)])
def test_a_resumed_run_draws_the_samples_of_one_that_was_not_ended(
    tmp_path: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch, beams: tuple, tokens: int | None
) -> None:
    """Also where memory is too small for a batch, which is split in the same places again."""
    if tokens is not None:
        small_memory_for(monkeypatch, tokens)
    expected = generate(tmp_path, gpt2, ["", *LINES, ""], *SAMPLING, *beams)
    source, output = tmp_path / "input.txt", tmp_path / "output.txt"
    output.unlink()
    command = [str(gpt2), str(source), str(output), *SAMPLING, *beams]
    for _ in range(3):
        with monkeypatch.context() as patch:
            crash_after(patch, 5)
            with pytest.raises(Crash):
                main([*command, "--resume"])
        torch.manual_seed(99)
    assert main([*command, "--resume"]) == 0
    assert output.read_text().split("\n")[:-1] == expected


def test_resume_refuses_another_run_and_says_what_is_different(
    tmp_path: Path, bart: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    source, output, other = tmp_path / "input.txt", tmp_path / "output.txt", tmp_path / "other.txt"
    source.write_text("\n".join(LINES))
    other.write_text("\n".join(reversed(LINES)))
    flags = ["--bs", "4", "--window", "8"]
    with monkeypatch.context() as patch:
        crash_after(patch, 5)
        with pytest.raises(Crash):
            main([str(bart), str(source), str(output), *flags])
    part = output.with_name("output.txt.part")
    capsys.readouterr()
    changed = [
        ([str(bart), str(source), str(output), *flags], "--resume resumes it"),
        ([str(bart), str(source), str(output), *flags, "--beam", "2", "--resume"], "--beam"),
        ([str(bart), str(other), str(output), *flags, "--resume"], "INPUT"),
        ([str(save_bart(tmp_path / "more", init_std=0.4)), str(source), str(output), *flags, "--resume"], "MODEL"),
    ]
    before = part.read_bytes()
    for command, named in changed:
        assert main(command) == 2
        assert named in capsys.readouterr().err.splitlines()[-1]
        assert part.read_bytes() == before
    assert main([str(bart), str(source), str(output), *flags, "--resume", "--postprocess_workers", "2"]) == 0
    assert output.read_text().splitlines() == plain_loop(bart, LINES, 4)
