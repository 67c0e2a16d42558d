"""fastgen-generate-for-transformers writes what a plain loop with the unpatched library would write."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from cli_loop import generate, plain_loop
from cli_models import POSITIONS, WORDS, save_bart, save_gpt2, save_t5, sentences

import fastgen
from fastgen.cli.transformers.command import main

LINES = sentences(9)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = {"num_beams": 2, "max_length": 7, "prefix": "word1 word2 "}
    return save_t5(tmp_path_factory.mktemp("t5"), task_specific_params={"summarization": task})


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ((), {}),
        (("--beam", 3, "--no_repeat_ngram_size", 2), {"num_beams": 3, "no_repeat_ngram_size": 2}),
        (("--max_gen_length", 9, "--min_gen_length", 5), {"max_length": 9, "min_length": 5}),
        (
            ("--beam", 2, "--max-new-tokens=6", "--length-penalty", -0.5, "--early-stopping", "never"),
            {"num_beams": 2, "max_new_tokens": 6, "length_penalty": -0.5, "early_stopping": "never"},
        ),
        (("--repetition-penalty", 1.7, "--eos_token_id", 30), {"repetition_penalty": 1.7, "eos_token_id": 30}),
        (("--decoder_start_token_id", 7, "--max_new_tokens", 5), {"decoder_start_token_id": 7, "max_new_tokens": 5}),
    ],
)
def test_output_is_that_of_a_plain_loop(tmp_path: Path, bart: Path, flags: tuple, settings: dict) -> None:
    expected = plain_loop(bart, LINES, 4, **settings)
    assert len(set(expected)) > 1  # a model that always says the same would hide a wrong order
    assert generate(tmp_path, bart, LINES, "--bs", 4, *flags) == expected


@pytest.mark.parametrize("beams", [1, 3])
def test_causal_lm_writes_only_the_new_text(tmp_path: Path, gpt2: Path, beams: int) -> None:
    expected = plain_loop(gpt2, LINES, 4, causal_lm=True, num_beams=beams, max_new_tokens=8)
    flags = ("--bs", 4, "--causal_lm", "--beam", beams, "--max_new_tokens", 8)
    assert generate(tmp_path, gpt2, LINES, *flags) == expected
    assert generate(tmp_path, gpt2, LINES, *flags, "--output_summaries_only") == expected


def test_the_models_own_limit_does_not_win_over_max_gen_length(tmp_path: Path, gpt2: Path) -> None:
    lines = [line for line in LINES if len(line.split()) < 10]
    expected = plain_loop(gpt2, lines, 9, causal_lm=True, max_length=20, max_new_tokens=None)
    assert expected != plain_loop(gpt2, lines, 9, causal_lm=True)
    assert generate(tmp_path, gpt2, lines, "--causal_lm", "--bs", 9, "--max_gen_length", 20) == expected


def test_empty_lines_stay_empty_and_in_place(tmp_path: Path, bart: Path) -> None:
    lines = ["", LINES[0], "   ", LINES[1], LINES[2], "", ""]
    first, second, third = plain_loop(bart, LINES[:3], 3)
    assert generate(tmp_path, bart, lines, "--bs", 2) == ["", first, "", second, third, "", ""]
    assert generate(tmp_path, bart, ["", ""]) == ["", ""]


def test_line_ends_of_windows_and_a_missing_last_one(tmp_path: Path, bart: Path) -> None:
    source, output = tmp_path / "input.txt", tmp_path / "output.txt"
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(LINES[:3]).encode())
    assert main([str(bart), str(source), str(output)]) == 0
    assert output.read_text().splitlines() == plain_loop(bart, LINES[:3], 3)


def test_n_obs_takes_the_first_lines(tmp_path: Path, bart: Path) -> None:
    expected = plain_loop(bart, LINES, 3)
    assert generate(tmp_path, bart, LINES, "--bs", 3, "--n_obs", 6) == expected[:6]
    assert generate(tmp_path, bart, LINES, "--bs", 3, "--n-obs", -1) == expected


def test_prefix_stands_before_every_line(tmp_path: Path, bart: Path) -> None:
    expected = plain_loop(bart, [f"word3 {line}" for line in LINES], 9)
    assert generate(tmp_path, bart, [*LINES, ""], "--prefix", "word3 ", "--bs", 9) == [*expected, ""]


def test_task_settings_of_the_model_apply_when_asked_for_and_flags_win(
    tmp_path: Path, t5: Path, capsys: pytest.CaptureFixture
) -> None:
    prefixed = [f"word1 word2 {line}" for line in LINES]
    assert generate(tmp_path, t5, LINES) == plain_loop(t5, LINES, 8)
    note = "note: MODEL has no settings for a run without --task (it has: summarization)"
    assert note in capsys.readouterr().err.splitlines()
    task = ("--task", "summarization")
    assert generate(tmp_path, t5, LINES, *task) == plain_loop(t5, prefixed, 8, num_beams=2, max_length=7)
    expected = plain_loop(t5, LINES, 8, num_beams=2, max_new_tokens=9)
    assert generate(tmp_path, t5, LINES, *task, "--prefix", "", "--max_new_tokens", 9) == expected
    assert "note:" not in capsys.readouterr().err


def test_a_task_without_settings_changes_nothing_and_says_so(
    tmp_path: Path, t5: Path, bart: Path, capsys: pytest.CaptureFixture
) -> None:
    assert generate(tmp_path, t5, LINES, "--task", "translate_text") == plain_loop(t5, LINES, 8)
    assert "note: MODEL has no settings for --task translate_text (it has: summarization)" in capsys.readouterr().err
    assert generate(tmp_path, bart, LINES, "--task", "summarization") == plain_loop(bart, LINES, 8)
    assert "note: MODEL has no settings for --task summarization (it has: none)" in capsys.readouterr().err


def test_truncates_only_where_a_length_is_given(tmp_path: Path, bart: Path) -> None:
    lines = [" ".join(WORDS), *LINES]
    cut = [" ".join(line.split()[:4]) for line in lines]
    # Two of the six tokens are <s> and </s>.
    assert generate(tmp_path, bart, lines, "--max_tokenizer_length", 6, "--bs", 16) == plain_loop(bart, cut, 16)


def test_truncates_to_the_models_limit_on_request_and_a_line_that_fails_says_so(
    tmp_path: Path, bart: Path, capsys: pytest.CaptureFixture
) -> None:
    lines = [" ".join(WORDS + WORDS), *LINES]
    cut = [" ".join(line.split()[: POSITIONS - 2]) for line in lines]
    assert generate(tmp_path, bart, lines, "--truncation", "--bs", 16) == plain_loop(bart, cut, 16)
    assert main([str(bart), str(tmp_path / "input.txt"), str(tmp_path / "failed.txt")]) == 1
    assert "--truncation" in next(line for line in capsys.readouterr().err.splitlines() if "line 1" in line)


def test_several_outputs_of_an_input_are_joined(tmp_path: Path, bart: Path) -> None:
    texts = plain_loop(bart, LINES, 4, num_beams=3, num_return_sequences=2)
    expected = ["####".join(texts[i : i + 2]) for i in range(0, len(texts), 2)]
    flags = ("--bs", 4, "--beam", 3, "--num_return_sequences", 2, "--join_outputs")
    assert generate(tmp_path, bart, LINES, *flags) == expected


def test_sequence_scores_stand_before_the_text(tmp_path: Path, bart: Path) -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(bart)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart)
    batch = tokenizer(LINES, padding=True, return_tensors="pt")
    with fastgen.disabled():
        generated = model.generate(
            **{name: batch[name] for name in ("input_ids", "attention_mask")},
            num_beams=2,
            output_scores=True,
            return_dict_in_generate=True,
        )
    texts = tokenizer.batch_decode(generated.sequences, skip_special_tokens=True)
    lines = generate(tmp_path, bart, [*LINES, ""], "--bs", 9, "--beam", 2, "--output_sequence_scores")
    assert lines[-1] == "NA\t"
    columns = [line.split("\t") for line in lines[:-1]]
    assert [text for _, text in columns] == texts
    assert [float(score) for score, _ in columns] == pytest.approx(generated.sequences_scores.tolist(), abs=1e-4)
    several = ("--num_return_sequences", 2, "--join_outputs", "--output_sequence_scores")
    pair = generate(tmp_path, bart, LINES[:1], "--beam", 2, *several)
    scores, text = pair[0].split("\t")
    assert len(scores.split("####")) == len(text.split("####")) == 2
    greedy = generate(tmp_path, bart, LINES[:1], "--output_sequence_scores")
    assert greedy == ["NA\t" + plain_loop(bart, LINES[:1], 1)[0]]


def test_a_seed_repeats_the_samples(tmp_path: Path, gpt2: Path) -> None:
    flags = ("--causal_lm", "--do_sample", "--top_k", 9, "--temperature", 1.5, "--bs", 4)
    flags += ("--num_return_sequences", 3, "--join_outputs")
    samples = {seed: generate(tmp_path, gpt2, LINES, *flags, "--seed", seed) for seed in (1, 2)}
    assert samples[1] != samples[2]
    assert generate(tmp_path, gpt2, LINES, *flags, "--seed", 1) == samples[1]


def test_outputs_can_be_inputs_of_the_next_run(tmp_path: Path, bart: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in.txt").write_text("\n".join([*LINES[:3], "", " ".join(WORDS + WORDS)]))
    paths = [str(tmp_path / name) for name in ("in.txt", "one.jsonl.gz", "two.jsonl", "three.txt")]
    two = ("--beam", "2", "--num_return_sequences", "2")
    assert main([str(bart), *paths[:2], *two]) == 1
    assert main([str(bart), *paths[1:3], "--text_field", "outputs.1.text"]) == 0
    first, second = gzip.decompress(Path(paths[1]).read_bytes()).splitlines(), Path(paths[2]).read_text().splitlines()
    chosen = []
    for before, after in zip(map(json.loads, first), map(json.loads, second), strict=True):
        assert before == {
            name.removesuffix("_1"): after[name] for name in after if name.endswith("_1") or name == "line"
        }
        chosen.append(before["outputs"][1]["text"] if before["outputs"] else "")
    assert [bool(text) for text in chosen] == [True, True, True, False, False] and "limit" in after["error_1"]
    expected = plain_loop(bart, chosen[:3], 3)
    assert [output["text"] for record in second for output in json.loads(record)["outputs"]] == expected
    capsys.readouterr()
    by_hand = ("--text_field", "outputs_1.1.text", "--output_format", "text")
    assert main([str(bart), paths[2], paths[3], *by_hand]) == 0
    assert f"note: INPUT {paths[2]} is read as JSON records" in capsys.readouterr().err
    assert Path(paths[3]).read_text().split("\n") == [*expected, "", "", ""]


def test_special_tokens_are_kept_on_request(tmp_path: Path, bart: Path) -> None:
    assert all(line.startswith("</s>") for line in generate(tmp_path, bart, LINES, "--include_special_tokens"))


def test_line_breaks_inside_an_output_become_spaces(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(self: object, sequences: torch.Tensor, **_: object) -> list[str]:
        return ["a\nb\r\nc\rd"] * len(sequences)

    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "batch_decode", decode)
    assert generate(tmp_path, bart, LINES[:2]) == ["a b c d"] * 2


def test_without_fastgen_opt_runs_the_unchanged_library(
    tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []
    disabled = fastgen.disabled

    def watched() -> object:
        entered.append(True)
        return disabled()

    monkeypatch.setattr(fastgen, "disabled", watched)
    with_fastgen = generate(tmp_path, bart, LINES)
    assert entered == []
    for flag in ("--without_fastgen_opt", "--without-fastseq-opt"):
        assert generate(tmp_path, bart, LINES, flag) == with_fastgen
    assert len(entered) == 2


def test_progress_and_summary_go_to_stderr(tmp_path: Path, bart: Path, capsys: pytest.CaptureFixture) -> None:
    generate(tmp_path, bart, [*LINES, ""])
    captured = capsys.readouterr()
    assert captured.out == ""
    summary = captured.err.splitlines()[-1]
    assert re.fullmatch(r"10 lines in [\d.]+ s, [\d.]+ inputs/s, \d+ tokens/s", summary)
    generate(tmp_path, bart, LINES, "--quiet")
    assert capsys.readouterr() == ("", "")


def test_demo_is_the_model_inside_fastgen(tmp_path: Path, bart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = ModuleType("fastgen.models.demo")
    demo.demo_path = lambda: bart
    monkeypatch.setitem(sys.modules, "fastgen.models.demo", demo)
    assert generate(tmp_path, "demo", LINES) == plain_loop(bart, LINES, 8)


def test_runs_as_a_module_in_another_process(tmp_path: Path, bart: Path) -> None:
    source, output = tmp_path / "input.txt", tmp_path / "output.txt"
    source.write_text("\n".join(LINES))
    command = [sys.executable, "-m", "fastgen.cli.transformers.command", bart, source, output]
    env = os.environ | {"FASTGEN_AUTO": "0", "FASTGEN_LOG": "debug"}  # whoever calls the command asks for fastgen
    folder = Path(fastgen.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, env=env)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "fastgen DEBUG: generate: BartForConditionalGeneration: " in done.stderr
    assert output.read_text().splitlines() == plain_loop(bart, LINES, 8)
