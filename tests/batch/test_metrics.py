"""Scores of fastgen-generate-for-transformers are those of rouge-score and sacrebleu."""

import gzip
import json
import sys
from pathlib import Path

import pytest
import sacrebleu
from cli_loop import command, write_lines
from cli_models import sentences
from rouge_score.rouge_scorer import RougeScorer

from fastgen.batch import metrics

LINES = sentences(5)


def test_scores_are_those_of_the_libraries():
    outputs = ["the cats sat on the mat", "hello there world of words", "", "same line "]
    references = ["the cat sat on a mat", "hello world of many words", "missing", "same line"]
    scores = metrics.score(outputs, references)
    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for name in ("rouge1", "rouge2", "rougeL"):
        each = [
            rouge.score(reference, output)[name].fmeasure for output, reference in zip(outputs, references, strict=True)
        ]
        assert scores[name] == pytest.approx(sum(each) / 4)
        assert 0 < scores[name] < 1
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(outputs, [references]).score)
    assert scores["bleu"] > 0
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, [references]).score)
    assert scores["chrf"] > 0
    for name, detail in (("bleu", "tok:13a"), ("chrf", "nc:6")):
        assert f"version:{sacrebleu.__version__}" in scores[f"{name}_signature"]
        assert detail in scores[f"{name}_signature"]
    assert scores["exact_match"] == 0.25
    assert scores["lines"] == 4


@pytest.mark.parametrize(
    ("reference", "output", "rouge1", "rouge2"),
    [
        ("Он весит пять килограммов.", "он весит, шесть килограммов", 3 / 4, 1 / 3),
        ("पूर्व प्रधानमन्त्री आए", "पूर्व मन्त्री आए", 2 / 3, 0),
        ("他跑了3公里。", "他跑了5公里。", 5 / 6, 3 / 5),
        ("สวัสดี", "สวัสดี ครับ", 2 * 4 / (4 + 7), 2 * 3 / (3 + 6)),
        ("می‌روم خانه", "می‌رود خانه", 1 / 2, 0),
        ("データ BERT を使う", "データ bert を使う", 1, 1),
    ],
)
def test_rouge_counts_words_of_any_script(reference, output, rouge1, rouge2):
    scores = metrics.score([output], [reference])
    assert (scores["rouge1"], scores["rouge2"]) == (pytest.approx(rouge1), pytest.approx(rouge2))
    assert scores["rouge_signature"].startswith("case:lc|stem:no|tok:unicode|version:")
    assert metrics.score([reference], [reference])["rougeL"] == 1


def test_the_references_alone_choose_the_words_of_rouge():
    latin = ["A dose of 5 μg of β-blockers", "Él pesó más", "42"]
    of_package = metrics.score(latin, latin)["rouge_signature"]
    assert of_package.startswith("case:lc|stem:porter|tok:rouge_score|version:")
    assert metrics.score(["Он весит", "他", "५"], latin)["rouge_signature"] == of_package
    assert metrics.score(latin, ["он", *latin[1:]])["rouge_signature"] != of_package


def test_scores_are_printed_and_written(tmp_path, bart, capsys):
    source, output, saved = write_lines(tmp_path / "in", [LINES[0], "", *LINES[1:]]), tmp_path / "out", tmp_path / "s"
    assert command(bart, source, output, "--beam", 2) == 0
    generated = output.read_text().splitlines()
    # A reference for each line: one is equal, and a line that is empty on both sides does not count.
    references = [generated[0], "", *LINES[1:]]
    reference = write_lines(tmp_path / "reference", references)
    capsys.readouterr()
    flags = ("--beam", 2, "--reference_path", reference, "--score_path", saved, "--overwrite")
    assert command(bart, source, output, *flags) == 0
    assert json.loads(saved.read_text()) == metrics.score(generated, references)
    assert json.loads(saved.read_text())["exact_match"] == pytest.approx(1 / 5)
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    corpus = ["bleu", "bleu_signature", "chrf", "chrf_signature"]
    assert list(printed) == ["rouge1", "rouge2", "rougeL", "rouge_signature", *corpus, "exact_match", "lines"]
    assert (printed["exact_match"], printed["lines"]) == ("0.2000", "5")
    # The first of several outputs counts, its score does not; and only as many lines as --n_obs allows.
    several = ("--num_return_sequences", 2, "--join_outputs", "--output_sequence_scores", "--n_obs", 3)
    assert command(bart, source, output, *flags, *several) == 0
    assert json.loads(saved.read_text()) == metrics.score(generated[:3], references[:3])


def test_missing_packages_for_scores_are_named_early(tmp_path, bart, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    source, output = write_lines(tmp_path / "in", LINES[:1]), tmp_path / "out"
    assert command("/no/such/model", source, output, "--reference_path", source) == 2
    assert "needs the package sacrebleu: pip install sacrebleu" in capsys.readouterr().err
    assert not output.exists()
    assert command(bart, source, output) == 0


def test_references_may_be_records_of_any_file(tmp_path, bart, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(Path("in.jsonl"), [json.dumps({"text": line, "good": {"answer": line}}) for line in LINES])
    Path("references.jsonl.gz").write_bytes(gzip.compress(Path("in.jsonl").read_bytes()))
    write_lines(Path("references.txt"), LINES)
    sources = {
        "of_input": ("--reference_field", "good.answer"),
        "of_records": ("--reference_path", "references.jsonl.gz", "--reference_field", "text"),
        "of_text": ("--reference_path", "references.txt"),
    }
    scores = []
    for name, flags in sources.items():
        assert command(bart, "in.jsonl", f"{name}.gz", *flags, "--score_path", f"{name}.json", "--n_obs", 4) == 0
        scores.append(json.loads(Path(f"{name}.json").read_text()))
    written = gzip.decompress(Path("of_text.gz").read_bytes()).splitlines()
    outputs = [json.loads(record)["outputs"][0]["text"] for record in written]
    assert scores == [metrics.score(outputs, LINES[:4])] * 3
    capsys.readouterr()
    assert command(bart, "in.jsonl", "other.txt", "--reference_path", "references.jsonl.gz") == 2
    assert "--reference_path references.jsonl.gz holds records (needs --reference_field" in capsys.readouterr().err
    assert not Path("other.txt").exists()
