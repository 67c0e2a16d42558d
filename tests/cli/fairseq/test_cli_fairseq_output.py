"""fastgen-generate-for-fairseq writes the bytes of fairseq-generate, for every kind of line and score.

The command is compared with fairseq's own around the same model. With fastgen's faster model lines are the
same but for the last digits of scores.
"""

import logging
import math
import re
import shutil
import sys
import threading

import pytest
import torch
from fairseq_command_data import encoded_data
from torch.utils.data import _utils

import fastgen
from fastgen.cli.fairseq.command import generate
from fastgen.optimizer.fairseq.checkpoints import allowed


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return encoded_data(tmp_path_factory.getbasetemp(), "sentencepiece")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return encoded_data(tmp_path_factory.getbasetemp(), "gpt2")


def written(capfd: pytest.CaptureFixture, *args: str) -> str:
    """Returns the standard output of the command, run in this process.

    Unless `args` say otherwise, no other process reads the data: the tests would wait five seconds for each to end.
    """
    capfd.readouterr()
    assert generate(["--num-workers", "0", *args]) == 0
    return capfd.readouterr().out


def check_pipeline(capfd: pytest.CaptureFixture, args: list[str], *holds: str) -> str:
    """Asserts that the pipeline writes the lines of fairseq-generate's loop, which match `holds`."""
    expected = written(capfd, *args, "--no-fastgen")
    for expression in holds:
        assert re.search(expression, expected, re.MULTILINE), expression
    with fastgen.disabled(), allowed():
        assert written(capfd, *args) == expected
    return expected


FLAGS = [
    "--batch-size 16 --beam 3 --remove-bpe",
    "--batch-size 16 --beam 3 --nbest 3 --remove-bpe --tokenizer moses",
    "--batch-size 7 --beam 2 --post-process subword_nmt --tokenizer moses --scoring sacrebleu",
    "--batch-size 16 --beam 2",
    "--batch-size 16 --beam 2 --quiet --remove-bpe --tokenizer moses",
    "--batch-size 16 --beam 2 --remove-bpe --scoring chrf",
    "--batch-size 16 --beam 2 --print-alignment hard",
    "--batch-size 16 --beam 2 --print-alignment soft --remove-bpe",
    "--batch-size 16 --score-reference",
    "--batch-size 16 --prefix-size 2 --beam 2",
    "--batch-size 16 --sampling --sampling-topk 5 --beam 3 --nbest 3 --seed 7",
    "--max-tokens 60 --gen-subset valid --num-workers 1",
    "--batch-size 16 --beam 2 --distributed-world-size 3 --distributed-rank 1",
    "--batch-size 16 --beam 2 --remove-bpe --postprocess-workers 0",
    "--batch-size 16 --beam 2 --remove-bpe --postprocess-workers 1",
    "--batch-size 16 --beam 2 --remove-bpe --postprocess-workers 5",
]


UNPRINTED = (
    "--batch-size 16 --beam 3 --nbest 2 --remove-bpe",
    "--batch-size 16 --beam 2 --print-alignment hard",
    "--batch-size 16 --beam 2 --quiet",
)


@pytest.mark.parametrize("flags", UNPRINTED)
def test_fields_that_are_not_printed_may_hold_anything(capfd, data, monkeypatch, flags):
    """A task may add fields that cannot be sent to another process."""
    from fairseq.tasks.translation import TranslationTask

    inference_step = TranslationTask.inference_step

    def adding(self, *args, **options):
        hypos = inference_step(self, *args, **options)
        for hypo in (hypo for sentence in hypos for hypo in sentence):
            hypo["score"] = hypo["score"].requires_grad_()
            hypo.update(why=lambda: None, lock=threading.Lock(), steps=threading.Lock(), history=[{"of": adding}])
            if "--print-alignment" not in flags:
                hypo["alignment"] = lambda: None
        return hypos

    monkeypatch.setattr(TranslationTask, "inference_step", adding)
    check_pipeline(capfd, [*data.generation, *flags.split()], r"^Generate \w+ with beam=")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_of_any_dtype_are_printed(capfd, data, monkeypatch, dtype):
    from fairseq.tasks.translation import TranslationTask

    inference_step = TranslationTask.inference_step

    def converted(self, *args, **options):
        hypos = inference_step(self, *args, **options)
        for hypo in (hypo for sentence in hypos for hypo in sentence):
            hypo.update({name: hypo[name].to(dtype) for name in ("score", "positional_scores")})
        return hypos

    monkeypatch.setattr(TranslationTask, "inference_step", converted)
    check_pipeline(capfd, [*data.generation, "--batch-size", "16", "--beam", "2"], r"^P-0\t")


@pytest.mark.parametrize("flags", FLAGS)
def test_every_line_is_fairseq_generates(capfd, data, monkeypatch, flags):
    if "--num-workers 1" in flags:  # torch waits so long for the process that reads the data to end
        monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    lines = check_pipeline(capfd, [*data.generation, *flags.split()], r"^Generate \w+ with beam=")
    assert lines.count("\n") == 1 if "--quiet" in flags else lines.count("\n") > 60


def test_flags_of_fastseq_without_effect_are_notes(capfd, data):
    args = ["--num-workers", "0", *data.generation, "--batch-size", "16", "--beam", "2", "--remove-bpe"]
    expected = written(capfd, *args)
    for flags in ("--decode-hypothesis --use-el-attn --post-process-workers 2", "--decode_hypothesis --use_el_attn"):
        assert generate([*args, *flags.split()]) == 0
        captured = capfd.readouterr()
        assert captured.out == expected
        said = [line for line in captured.err.splitlines() if "changes nothing" in line]
        assert len(said) == 2 and "--decode-hypothesis" in said[0] and "--use-el-attn" in said[1]


SENTENCEPIECE = {
    "--batch-size 16 --beam 3 --nbest 3": r"^H-0\t\S+\t▁",
    "--batch-size 16 --beam 2 --remove-bpe sentencepiece": r"^H-0\t\S+\t[^▁ ]+",
    "--batch-size 7 --beam 2 --tokenizer moses --sacrebleu --print-alignment hard": r"^A-0\t",
    "--batch-size 16 --scoring sacrebleu --sacrebleu-lowercase": r": BLEU = ",
    "--batch-size 16 --sampling --sampling-topk 20 --beam 3 --nbest 3 --seed 7 --scoring chrf": r": chrF2",
}


@pytest.mark.parametrize("flags", SENTENCEPIECE)
def test_lines_of_sentencepiece_are_decoded(capfd, sentencepiece, flags):
    text = r"^D-\d+\t\S+\t[^▁]*ö[^▁]*$"
    check_pipeline(capfd, [*sentencepiece.generation, *flags.split()], SENTENCEPIECE[flags], text)


GPT2 = {
    "--batch-size 16 --beam 3 --nbest 3": r"^H-0\t\S+\t[\d ]+$",
    "--batch-size 7 --beam 2 --tokenizer moses --sacrebleu --print-alignment hard": r"^A-0\t",
    "--batch-size 16 --scoring sacrebleu --remove-bpe": r": BLEU = ",
    # The model draws bytes that are not UTF-8.
    "--batch-size 16 --sampling --sampling-topk 20 --beam 3 --nbest 3 --seed 7": r"^D-.*\ufffd",
}


@pytest.mark.parametrize("flags", GPT2)
def test_lines_of_gpt2_bpe_are_decoded(capfd, gpt2, flags):
    check_pipeline(capfd, [*gpt2.generation, *flags.split()], GPT2[flags], r"^D-\d+\t\S+\t.*ö")


@pytest.mark.parametrize(
    "flags, warning",
    [
        ("", "the BLEU score is computed on BPE tokens"),
        ("--remove-bpe sentencepiece", "BLEU score is being computed by splitting detokenized string on spaces"),
        ("--sacrebleu", ""),
        ("--sacrebleu --remove-bpe sentencepiece", ""),
    ],
)
def test_sacrebleu_silences_a_warning_and_leaves_the_score(capfd, caplog, sentencepiece, flags, warning):
    """fairseq-generate does nothing else with --sacrebleu; `--scoring sacrebleu` chooses the score."""
    args = [*sentencepiece.generation, "--batch-size", "16", *flags.split()]
    logged = []
    for more in (["--no-fastgen"], []):
        caplog.clear()
        assert re.search(r"^Generate test with beam=5: BLEU4 = ", written(capfd, *args, *more), re.MULTILINE)
        logged.append([record.getMessage() for record in caplog.records if record.levelname == "WARNING"])
    assert logged[0] == logged[1]
    assert len(logged[0]) == bool(warning) and all(warning in message for message in logged[0])


def test_the_faster_model_changes_no_word(capfd, data):
    args = [*data.generation, *"--batch-size 16 --beam 3 --nbest 2 --remove-bpe --tokenizer moses".split()]
    expected, output = (written(capfd, *args, *more).split() for more in (["--no-fastgen"], []))
    assert len(output) == len(expected) > 1000
    for word, other in zip(output, expected):
        assert word == other or math.isclose(float(word), float(other), rel_tol=1e-4, abs_tol=1.01e-4)


def test_ensembles_are_scored_as_one(capfd, data):
    args = data.generation
    args[2] = f"{args[2]}:{data.folder / 'model' / 'checkpoint_best.pt'}"
    check_pipeline(capfd, [*args, "--batch-size", "16", "--remove-bpe"], r"^H-0\t")


def test_without_targets_there_is_no_score(capfd, data, tmp_path):
    shutil.copytree(data.folder / "bin", tmp_path / "bin", ignore=shutil.ignore_patterns("test.de-en.en.*"))
    args = [str(tmp_path / "bin"), *data.generation[1:], *"--batch-size 16 --beam 2 --remove-bpe".split()]
    lines = check_pipeline(capfd, args, r"^S-0\t", r"^H-0\t")
    assert not re.search(r"^T-|^Generate ", lines, re.MULTILINE)


def test_wer_is_summed_over_sentences(capfd, data, monkeypatch, tmp_path):
    """fairseq's WER needs a package with one function, replaced here by any distance."""
    (tmp_path / "editdistance.py").write_text("def eval(a, b):\n    return len(set(a) ^ set(b)) + len(a)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    args = [*data.generation, *"--batch-size 16 --remove-bpe --scoring wer".split()]
    check_pipeline(capfd, args, r"WER: \d\d")
    sys.modules.pop("editdistance")


def test_raw_text_is_printed_if_unknown_words_are_replaced(capfd, data, tmp_path):
    (tmp_path / "alignment").write_text("kato otak\n")
    # A hypothesis with an unknown word needs a model with alignments; for others fairseq-generate stops.
    args = [str(data.folder / "raw"), *data.generation[1:], "--dataset-impl", "raw", "--unkpen", "100", "--remove-bpe"]
    args += ["--batch-size", "16", "--max-len-b", "5", "--replace-unk", str(tmp_path / "alignment")]
    check_pipeline(capfd, args, r"^T-0\t.*@@")


def test_refinement_steps_and_histories_are_printed(capfd, data):
    checkpoint = data.folder / "levenshtein" / "checkpoint_last.pt"
    args = [str(data.folder / "bin"), "--path", str(checkpoint), "--cpu", "-s", "de", "-t", "en"]
    args += "--task translation_lev --iter-decode-max-iter 3 --print-step --retain-iter-history".split()
    check_pipeline(capfd, [*args, "--beam", "1", "--batch-size", "16"], r"^I-0\t", r"^E-\d+_1\t")


def test_logs_on_standard_output_keep_their_place(capfd, data):
    """They stand between the lines that were ready at that time."""
    args = [*data.generation, *"--batch-size 4 --beam 2 --remove-bpe --tokenizer moses --log-interval 2".split()]
    root, handler = logging.getLogger(), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(name)s | %(message)s"))
    level = root.level
    root.setLevel("INFO")
    root.addHandler(handler)
    try:
        expected = written(capfd, *args, "--no-fastgen")
        with fastgen.disabled(), allowed():
            lines = written(capfd, *args)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert expected.count("wps=") > 3
    assert without_speeds(lines) == without_speeds(expected)


def without_speeds(text: str) -> str:
    text = re.sub(r"wps=\d+", "wps=SPEED", text)
    return re.sub(r"in [\d.]+s \(.*\)", "in SECONDS", text)


def test_results_path_holds_all_lines(capfd, data, tmp_path):
    args = [*data.generation, "--batch-size", "16", "--remove-bpe", "--results-path"]
    assert written(capfd, *args, str(tmp_path / "stock"), "--no-fastgen") == ""
    with fastgen.disabled(), allowed():
        assert written(capfd, *args, str(tmp_path / "ours")) == ""
    stock, ours = ((tmp_path / folder / "generate-test.txt").read_text() for folder in ("stock", "ours"))
    assert "\nGenerate test with beam=5: BLEU4" in stock
    assert ours == stock


class Words:
    """A scorer that compares token numbers of several sentences."""

    def __init__(self, cfg: object) -> None:
        self.numbers: set[int] = set()

    def add(self, target: torch.Tensor, hypothesis: torch.Tensor) -> None:
        self.numbers.update(target.tolist(), hypothesis.tolist())

    def result_string(self) -> str:
        return f"{len(self.numbers)} words"


def test_a_scorer_gets_token_numbers_of_one_dictionary(capfd, data, monkeypatch):
    from fairseq.scoring import SCORER_REGISTRY

    monkeypatch.setitem(SCORER_REGISTRY, "chrf", Words)
    args = [*data.generation, *"--batch-size 4 --scoring chrf --remove-bpe --tokenizer moses".split()]
    expected = written(capfd, *args, "--no-fastgen")
    assert re.search(r"beam=5: \d\d+ words$", expected)
    with fastgen.disabled(), allowed():
        assert generate([*args, "--num-workers", "0"]) == 0
    captured = capfd.readouterr()
    assert captured.out == expected
    assert "without --postprocess-workers: --scoring chrf compares token numbers (supported: " in captured.err


def test_all_shards_together_write_the_lines_of_one_run(data, capfd):
    args = [*data.generation, *"--batch-size 7 --beam 3 --remove-bpe".split()]

    def lines(*flags: str) -> list[str]:
        with fastgen.disabled(), allowed():  # the pipeline alone, whose scores have the same digits in every run
            output = written(capfd, *args, *flags).splitlines()
        return [line for line in output if re.match(r"[STHDP]-\d+\t", line)]

    whole = lines()
    parts = [lines("--num-shards", "3", "--shard-id", str(shard)) for shard in range(3)]
    assert all(parts) and sorted(line for part in parts for line in part) == sorted(whole)
    assert written(capfd, *args, "--num-shards", "40", "--shard-id", "39") == ""  # it has no batch
    for flags, message in (
        (["--num-shards", "3", "--shard-id", "3"], "--shard-id 3 (accepted: 0 to 2"),
        (["--num-shards", "3", "--no-fastgen"], "--num-shards 3 is ignored by fairseq's own command"),
    ):
        capfd.readouterr()
        assert generate([*args, *flags]) == 2
        assert message in capfd.readouterr().err
