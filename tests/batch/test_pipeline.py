"""The pipeline writes the outputs of a plain loop, however lines are batched; an error fails its line only."""

import json
import shutil
from typing import Any

import pytest
import torch
import transformers
from cli_loop import command, generate, interrupted_after, plain_loop, plain_samples, write_lines
from cli_models import POSITIONS, WORDS, sentences

import fastgen
from fastgen.batch import files
from fastgen.batch.files import Survey

LINES = sentences(70)


@pytest.fixture
def shapes(monkeypatch):
    """Records the shape of input_ids in each batch."""
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
def test_output_does_not_depend_on_batches_and_workers(tmp_path, bart, size):
    expected = plain_loop(bart, LINES, 4, num_beams=3)
    assert generate(tmp_path, bart, LINES, "--beam", 3, *size) == expected


def test_batch_tokens_counts_beams(tmp_path, bart, shapes):
    generate(tmp_path, bart, LINES, "--batch_tokens", 240, "--beam", 3)
    assert all(3 * rows * width <= 240 for rows, width in shapes)
    assert max(rows for rows, _ in shapes) > 8


def test_samples_of_a_line_depend_on_the_seed_and_its_number(tmp_path, gpt2):
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


def test_sampled_beams_depend_on_the_seed_and_the_line(tmp_path, gpt2, capsys):
    """Also the beams of a model's own configuration."""
    shutil.copytree(gpt2, tmp_path / "model")
    config = tmp_path / "model" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_beams": 2}))
    flags = ("--causal_lm", "--do_sample", "--max_new_tokens", 5, "--seed", 3, "--output_format", "jsonl")

    def outputs(*others: object) -> list[list[Any]]:
        lines = generate(tmp_path, tmp_path / "model", LINES[:10], *flags, *others)
        return [[output["text"] for output in json.loads(line)["outputs"]] for line in lines]

    expected = outputs("--bs", 4)
    assert "keep the order of INPUT" not in capsys.readouterr().err
    for others in (("--bs", 10), ("--bs", 3, "--window", 0), ("--bs", 1, "--without_fastgen_opt")):
        assert outputs(*others) == expected
    assert outputs("--bs", 4, "--seed", 4) != expected


def test_jsonl_holds_fields_outputs_scores_and_lengths(tmp_path, bart):
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(bart)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart)
    records = [{"id": f"a{n}", "article": line, "date": {"year": n}} for n, line in enumerate(LINES[:10])]
    flags = ("--input_format", "jsonl", "--text_field", "article", "--id_field", "id", "--bs", 4, "--beam", 3)
    lines = generate(tmp_path, bart, list(map(json.dumps, records)), *flags, "--num_return_sequences", 2)
    outputs = [json.loads(line) for line in lines]
    assert [{name: each[name] for name in ("id", "article", "date")} for each in outputs] == records
    with fastgen.disabled():
        for line, each in zip(LINES, outputs):
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


@pytest.mark.parametrize("flags", [(), ("--gen", "max_time=1000")], ids=["own loop", "library's"])
def test_scores_are_computed_without_those_of_every_step(tmp_path, bart, monkeypatch, flags):
    original, outputs = transformers.BartForConditionalGeneration.generate, []

    def watched(self: Any, **inputs: Any) -> Any:
        outputs.append(original(self, **inputs))
        return outputs[-1]

    monkeypatch.setattr(transformers.BartForConditionalGeneration, "generate", watched)
    lines = generate(tmp_path, bart, LINES[:9], "--beam", 2, "--output_format", "jsonl", *flags)
    assert all("score" in json.loads(line)["outputs"][0] for line in lines)
    assert outputs and all(each.sequences_scores is not None and each.scores is None for each in outputs)


@pytest.mark.parametrize("source", ["in", "/dev/null"])
@pytest.mark.parametrize("flags", [(), ("--input_format", "jsonl")])
def test_an_empty_input_gives_an_empty_output(tmp_path, bart, monkeypatch, capsys, source, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_bytes(b"")
    assert command(bart, source, "out", *flags) == 0
    assert (tmp_path / "out").read_bytes() == b""
    assert "0 lines in " in capsys.readouterr().err


def test_a_line_that_fails_is_listed_and_stops_no_other(tmp_path, bart, capsys):
    source, output = tmp_path / "in", tmp_path / "out"
    lines = [line.encode() for line in LINES[:12]]
    lines[2] = " ".join(WORDS * 2).encode()
    lines[5] = "wörd".encode("latin-1")
    source.write_bytes(b"\n".join(lines))
    assert command(bart, source, output, "--bs", 4) == 1
    errors = [f"has {2 * len(WORDS) + 2} tokens, the limit is {POSITIONS}", "is not UTF-8"]
    said = capsys.readouterr().err
    assert f"line 3: {errors[0]}" in said and f"line 6: {errors[1]}" in said
    assert "2 of 12 inputs failed (--retry_failed reruns only these)" in said.splitlines()[-1]
    good = [number for number in range(12) if number not in (2, 5)]
    written = output.read_text().split("\n")[:-1]
    assert written[2] == written[5] == ""
    assert [written[number] for number in good] == plain_loop(bart, [LINES[number] for number in good], 4)
    capsys.readouterr()
    assert command(bart, source, output, "--bs", 4, "--output_format", "jsonl", "--quiet", "--overwrite") == 1
    assert capsys.readouterr().err.count("\n") == 3  # the failures, and how many
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [number for number in range(12) if "error" in records[number]] == [2, 5]
    assert (records[2]["line"], records[2]["outputs"]) == (3, []) and errors[0] in records[2]["error"]


def test_an_unknown_token_fails_its_line_before_the_model_runs(tmp_path, bart, capsys):
    model = shutil.copytree(bart, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["unknown"])
    tokenizer.save_pretrained(model)
    source = write_lines(tmp_path / "in", [LINES[0], "word1 unknown", LINES[1]])
    assert command(model, source, tmp_path / "out") == 1
    first, second = plain_loop(bart, LINES[:2], 2)
    assert (tmp_path / "out").read_text().split("\n")[:-1] == [first, "", second]
    assert "line 2: has the token 64, the last that MODEL knows is 63" in capsys.readouterr().err


def test_a_model_that_always_fails_ends_a_run_that_can_resume(tmp_path, bart, monkeypatch, capsys):
    source, output, part = write_lines(tmp_path / "in", LINES), tmp_path / "out", tmp_path / "out.part"
    arguments = (bart, source, output, "--bs", 4, "--window", 16, "--resume")

    def raises(self: Any, **inputs: Any) -> None:
        raise KeyError("of\nthe model")

    with interrupted_after(8):
        assert command(*arguments) == 130
    before = part.read_bytes()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(transformers.BartForConditionalGeneration, "generate", raises)
        assert command(*arguments) == 1
    said = capsys.readouterr().err
    assert "the same run with --resume resumes" in said
    assert "every line of 4 batches failed; line " in said and "KeyError: 'of\\nthe model'" in said
    assert part.read_bytes() == before != b""
    assert command(*arguments) == 0
    assert output.read_text().split("\n")[:-1] == plain_loop(bart, LINES, 4)


def test_input_that_ends_early_completes_no_output(tmp_path, bart, monkeypatch, capsys):
    source, output = write_lines(tmp_path / "in", LINES), tmp_path / "out"
    monkeypatch.setattr(files, "survey", lambda path, as_records: Survey(len(LINES) + 1, "the sum of a longer file"))
    assert command(bart, source, output) == 2
    assert "INPUT changed while it was read: it had 71 lines, and 70 could be read" in capsys.readouterr().err
    assert not output.exists()


def test_resume_of_a_complete_output_does_nothing(tmp_path, bart, shapes, capsys):
    source, output, scores = write_lines(tmp_path / "in", LINES), tmp_path / "out", tmp_path / "scores.json"
    arguments = (bart, source, output)
    assert command(*arguments) == 0
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    shapes.clear()
    capsys.readouterr()
    assert command(*arguments, "--resume") == 0
    assert f"{output} is complete" in capsys.readouterr().err
    assert command(*arguments, "--resume", "--overwrite") == 0
    capsys.readouterr()
    assert command(*arguments, "--resume", "--beam", 2) == 2
    (line,) = capsys.readouterr().err.splitlines()  # nothing is loaded for that
    assert "--beam was not given and is 2 now" in line and "--overwrite" in line
    assert command(*arguments, "--resume", "--n_obs", 3) == 2  # a shorter file would replace it
    assert command(*arguments) == 2
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before
    # Scores that are requested later need no further run.
    for _ in range(2):
        assert command(*arguments, "--resume", "--reference_path", source, "--score_path", scores) == 0
        assert json.loads(scores.read_text())["lines"] == 70
    assert shapes == []
    assert command(*arguments, "--resume", "--beam", 2, "--overwrite") == 0
    assert output.read_text().splitlines() == plain_loop(bart, LINES, 4, num_beams=2)


@pytest.mark.parametrize(("beams", "tokens"), [((), None), (("--beam", "2"), None), ((), 30)])
def test_a_resumed_run_draws_the_samples_of_a_whole_one(tmp_path, gpt2, monkeypatch, shapes, beams, tokens):
    """A batch too large for memory is split in the same places again; no line is generated twice."""
    original = transformers.GPT2LMHeadModel.generate

    def generate_little(self: Any, **inputs: Any) -> Any:
        if tokens and inputs["input_ids"].numel() > tokens:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return original(self, **inputs)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "generate", generate_little)
    flags = ("--causal_lm", "--do_sample", "--max_new_tokens", 5, "--seed", 3, "--bs", 4, *beams)
    expected = generate(tmp_path, gpt2, ["", *LINES, ""], *flags)
    source, output = tmp_path / "input.txt", tmp_path / "resumed.txt"
    shapes.clear()
    for _ in range(3):
        with interrupted_after(5):
            assert command(gpt2, source, output, *flags, "--resume") == 130
        torch.manual_seed(99)
    assert command(gpt2, source, output, *flags, "--resume") == 0
    assert output.read_text().split("\n")[:-1] == expected
    assert sum(rows for rows, _ in shapes) == len(LINES)
