"""ROUGE, BLEU, chrF and exact match of generated lines against reference lines; word error rate of transcripts.

Tests: tests/cli/transformers/test_cli_metrics.py
"""

from importlib import import_module
from typing import Any

from fastgen.cli.errors import InputError

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


PACKAGES = {"rouge-score": "rouge_score.rouge_scorer", "sacrebleu": "sacrebleu.metrics"}
PACKAGES_OF_TRANSCRIPTS = PACKAGES | {"jiwer": "jiwer"}


def check_installed(transcripts: bool) -> None:
    """Raise InputError where the packages for it are missing, before anything is generated."""
    packages = PACKAGES_OF_TRANSCRIPTS if transcripts else PACKAGES
    try:
        for module in packages.values():
            import_module(module)
    except ImportError as error:
        raise InputError(
            f"--reference_path needs {' and '.join(packages)}: pip install {' '.join(packages)} ({error})"
        ) from error


def score(outputs: list[str], references: list[str], transcripts: bool = False) -> dict[str, Any]:
    """Scores of `outputs` against as many `references`.

    rouge1, rouge2, rougeL: mean F1 over the lines with stemming, 0 to 1. bleu and chrf: sacrebleu's of the corpus, 0 to
    100, and their signatures say how they were computed. exact_match: share of lines that are equal but for white space
    at their ends, 0 to 1. lines: how many were scored, without those that are empty on both sides. wer, of transcripts:
    jiwer's of the corpus, wrong words by words of the references, where capitals and punctuation count.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU, CHRF

    rouge = RougeScorer(ROUGE_TYPES, use_stemmer=True)
    # A line that is empty on both sides has no words that ROUGE could count.
    pairs = [pair for pair in zip(outputs, references, strict=True) if any(text.strip() for text in pair)]
    if not pairs:
        return {"lines": 0}
    outputs, references = ([pair[side] for pair in pairs] for side in (0, 1))
    line_scores = [rouge.score(target=reference, prediction=output) for output, reference in pairs]
    scores: dict[str, Any] = {
        name: sum(line[name].fmeasure for line in line_scores) / len(pairs) for name in ROUGE_TYPES
    }
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(outputs, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())  # complete only after something was scored
    if transcripts:
        import jiwer

        scores["wer"] = jiwer.process_words(references, outputs).wer
    exact = sum(output.strip() == reference.strip() for output, reference in pairs)
    return scores | {"exact_match": exact / len(pairs), "lines": len(pairs)}


def report(scores: dict[str, Any]) -> str:
    """The scores as lines to print, one a line."""
    rounded = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in scores.items()}
    return "\n".join(f"{name:<16}{value}" for name, value in rounded.items())
