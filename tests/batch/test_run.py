"""fastgen-generate-for-transformers writes the outputs of a plain loop with the unpatched library."""

import gzip
import json

import pytest
from cli_loop import command, generate, plain_loop, write_lines
from cli_models import WORDS, save_t5, sentences

import fastgen

LINES = sentences(9)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
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
def test_output_is_that_of_a_plain_loop(tmp_path, bart, flags, settings):
    expected = plain_loop(bart, LINES, 4, **settings)
    assert len(set(expected)) > 1  # equal outputs would hide a wrong order
    assert generate(tmp_path, bart, LINES, "--bs", 4, *flags) == expected


@pytest.mark.parametrize("beams", [1, 3])
def test_causal_lm_writes_only_the_new_text(tmp_path, gpt2, beams):
    expected = plain_loop(gpt2, LINES, 4, causal_lm=True, num_beams=beams, max_new_tokens=8)
    flags = ("--bs", 4, "--causal_lm", "--beam", beams, "--max_new_tokens", 8)
    assert generate(tmp_path, gpt2, LINES, *flags) == expected
    assert generate(tmp_path, gpt2, LINES, *flags, "--output_summaries_only") == expected


def test_max_gen_length_wins_over_the_models_own_limit(tmp_path, gpt2):
    lines = [line for line in LINES if len(line.split()) < 10]
    expected = plain_loop(gpt2, lines, 9, causal_lm=True, max_length=20, max_new_tokens=None)
    assert expected != plain_loop(gpt2, lines, 9, causal_lm=True)
    assert generate(tmp_path, gpt2, lines, "--causal_lm", "--bs", 9, "--max_gen_length", 20) == expected


def test_empty_lines_stay_empty_and_in_place(tmp_path, bart):
    lines = ["", LINES[0], "   ", LINES[1], LINES[2], "", ""]
    first, second, third = plain_loop(bart, LINES[:3], 3)
    assert generate(tmp_path, bart, lines, "--bs", 2) == ["", first, "", second, third, "", ""]
    assert generate(tmp_path, bart, ["", ""]) == ["", ""]


def test_n_obs_takes_the_first_lines(tmp_path, bart):
    expected = plain_loop(bart, LINES, 3)
    assert generate(tmp_path, bart, LINES, "--bs", 3, "--n_obs", 6) == expected[:6]
    assert generate(tmp_path, bart, LINES, "--bs", 3, "--n-obs", -1) == expected


def test_task_settings_apply_on_request_and_flags_win(tmp_path, t5, capsys):
    prefixed = [f"word1 word2 {line}" for line in LINES]
    assert generate(tmp_path, t5, LINES) == plain_loop(t5, LINES, 8)
    note = "note: MODEL has no settings for a run without --task (it has: summarization)"
    assert note in capsys.readouterr().err.splitlines()
    task = ("--task", "summarization")
    assert generate(tmp_path, t5, LINES, *task) == plain_loop(t5, prefixed, 8, num_beams=2, max_length=7)
    expected = plain_loop(t5, LINES, 8, num_beams=2, max_new_tokens=9)
    assert generate(tmp_path, t5, LINES, *task, "--prefix", "", "--max_new_tokens", 9) == expected
    assert "note:" not in capsys.readouterr().err


def test_a_task_without_settings_is_a_note(tmp_path, t5, bart, capsys):
    assert generate(tmp_path, t5, LINES, "--task", "translate_text") == plain_loop(t5, LINES, 8)
    assert "note: MODEL has no settings for --task translate_text (it has: summarization)" in capsys.readouterr().err
    assert generate(tmp_path, bart, LINES, "--task", "summarization") == plain_loop(bart, LINES, 8)
    assert "note: MODEL has no settings for --task summarization (it has: none)" in capsys.readouterr().err


def test_outputs_can_be_inputs_of_the_next_run(tmp_path, bart, capsys):
    source = write_lines(tmp_path / "in.txt", [*LINES[:3], "", " ".join(WORDS + WORDS)])
    first, second, third = (tmp_path / name for name in ("one.jsonl.gz", "two.jsonl", "three.txt"))
    assert command(bart, source, first, "--beam", 2, "--num_return_sequences", 2) == 1
    assert command(bart, first, second, "--text_field", "outputs.1.text") == 0
    records, records_of_outputs = gzip.decompress(first.read_bytes()).splitlines(), second.read_text().splitlines()
    chosen = []
    for before, after in zip(map(json.loads, records), map(json.loads, records_of_outputs), strict=True):
        own_fields = {name.removesuffix("_1"): after[name] for name in after if name.endswith("_1") or name == "line"}
        assert before == own_fields
        chosen.append(before["outputs"][1]["text"] if before["outputs"] else "")
    assert [bool(text) for text in chosen] == [True, True, True, False, False] and "limit" in after["error_1"]
    expected = plain_loop(bart, chosen[:3], 3)
    assert [output["text"] for record in records_of_outputs for output in json.loads(record)["outputs"]] == expected
    capsys.readouterr()
    assert command(bart, second, third, "--text_field", "outputs_1.1.text", "--output_format", "text") == 0
    assert f"note: INPUT {second} is read as JSON records" in capsys.readouterr().err
    assert third.read_text().split("\n") == [*expected, "", "", ""]


def test_without_fastgen_opt_runs_the_unchanged_library(tmp_path, bart, monkeypatch):
    entered, disabled = [], fastgen.disabled
    monkeypatch.setattr(fastgen, "disabled", lambda: entered.append(True) or disabled())
    with_fastgen = generate(tmp_path, bart, LINES)
    assert entered == []
    for flag in ("--without_fastgen_opt", "--without-fastseq-opt"):
        assert generate(tmp_path, bart, LINES, flag) == with_fastgen
    assert len(entered) == 2
