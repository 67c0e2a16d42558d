"""References and scores: ROUGE, BLEU, chrF and exact match of generated lines; word error rate of transcripts.

Tests: tests/batch/test_metrics.py, tests/batch/test_files.py
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from fastgen.batch.config import TRANSCRIBE, BatchConfig
from fastgen.batch.errors import InputError, check_packages
from fastgen.batch.files import Line, raw_lines, write_whole
from fastgen.batch.records import RecordError, decode, field, first_text, kind, parse
from fastgen.reasons import counted

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
# Scripts without spaces between words, as a class of the package regex.
UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]"


def references_of(args: BatchConfig, lines: int | None) -> list[str] | None:
    """Returns the references of --reference_path, or else in the records of INPUT; None if nothing is scored.

    lines: the number of lines of INPUT, None if it can be read only once. Raises InputError if references, or a package
    for the scores, are missing.
    """
    if args.reference_path is None and args.reference_field is None:
        return None
    requested = args.setting("reference_path") or args.setting("reference_field")
    of_words = ["jiwer"] * (args.kind == TRANSCRIBE)
    check_packages("rouge_score", "sacrebleu", *of_words, needed_by=requested)
    if args.reference_path is None and lines is None:
        needs = f"needs INPUT to be a file, or {args.named('reference_path')}"
        raise InputError(f"{requested} {needs}, and {args.input} can be read only once")
    flag = "INPUT" if args.reference_path is None else args.named("reference_path")
    references = read_references(flag, args.reference_path or args.input, args.reference_field)
    if lines is not None:
        _check_count(args, references, lines)
    return references[: args.n_obs]


def read_references(flag: str, path: str, reference_field: str | None = None) -> list[str]:
    """Returns the reference of each line: the lines of a UTF-8 file, or a field of its JSON records."""
    references = []
    for number, raw in enumerate(raw_lines(flag, path, reference_field is not None), start=1):
        try:
            reference = decode(Line(number, raw))
            if reference_field is not None and reference.strip():
                reference = field(parse(reference), reference_field)
            if not isinstance(reference, str):
                raise RecordError(f'has {kind(reference)} in its field "{reference_field}" (accepted: a string)')
        except RecordError as error:
            raise InputError(f"{flag} {path}: line {number} {error}") from error
        references.append(reference)
    return references


def scores_of_output(args: BatchConfig, references: list[str] | None, lines: int) -> dict[str, Any] | None:
    """Returns the scores of the first output of each line, and writes them to `score_path` if it is set."""
    if references is None:
        return None
    _check_count(args, references, lines)
    outputs = [first_text(record, args) for record in raw_lines("OUTPUT", args.output)]
    scores = score(outputs, references, transcripts=args.kind == TRANSCRIBE)
    if args.score_path is not None and (args.overwrite or args.retry_failed or not os.path.exists(args.score_path)):
        write_whole(Path(os.path.realpath(args.score_path)), (json.dumps(scores, indent=2) + "\n").encode())
    return scores


def score(outputs: list[str], references: list[str], transcripts: bool = False) -> dict[str, Any]:
    """Returns the scores of `outputs` against the same number of `references`.

    rouge1, rouge2, rougeL: mean F1 over the lines, 0 to 1. bleu, chrf: sacrebleu's corpus scores, 0 to 100. Signatures
    say how these were computed. exact_match: the share of lines that are equal except for
    white space at their ends, 0 to 1. lines: the number of scored lines, without those that are empty on both sides.
    wer, for transcripts: jiwer's corpus score, wrong words per word of the references, with case and punctuation.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU, CHRF

    # A line that is empty on both sides has no words that ROUGE could count.
    pairs = [pair for pair in zip(outputs, references, strict=True) if any(text.strip() for text in pair)]
    if not pairs:
        return {"lines": 0}
    outputs, references = map(list, zip(*pairs, strict=True))
    words = _tokenizer_of(references)
    rouge = RougeScorer(ROUGE_TYPES, use_stemmer=True, tokenizer=words)
    line_scores = [rouge.score(target=reference, prediction=output) for output, reference in pairs]
    scores: dict[str, Any] = {name: fmean(line[name].fmeasure for line in line_scores) for name in ROUGE_TYPES}
    tokenizer = "stem:porter|tok:rouge_score" if words is None else "stem:no|tok:unicode"
    scores["rouge_signature"] = f"case:lc|{tokenizer}|version:{version('rouge_score')}"
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(outputs, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())  # complete only after something was scored
    if transcripts:
        import jiwer

        scores["wer"] = jiwer.process_words(references, outputs).wer
    exact = sum(output.strip() == reference.strip() for output, reference in pairs)
    return scores | {"exact_match": exact / len(pairs), "lines": len(pairs)}


def _tokenizer_of(references: list[str]) -> Any:
    """Returns a tokenizer for ROUGE that fits any script; None if at least half of each reference's letters are Latin.

    Its tokens are runs of letters, marks and digits, and single characters of scripts without spaces. The package's own
    tokenizer drops all characters but a to z and digits.
    """
    import regex  # which sacrebleu needs, too

    letters, latin = regex.compile(r"\p{L}"), regex.compile(r"\p{Latin}")
    if all(2 * len(latin.findall(text)) >= len(letters.findall(text)) for text in references):
        return None
    words = regex.compile(rf"(?V1){UNSPACED}\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}\p{{Join_C}}]--{UNSPACED}]+")
    return SimpleNamespace(tokenize=lambda text: words.findall(text.lower()))


def _check_count(args: BatchConfig, references: list[str], lines: int) -> None:
    if len(references) != lines:
        what = f"has {counted(len(references), 'line')}, but INPUT {args.input} has {lines}"
        raise InputError(f"{args.setting('reference_path') or 'INPUT'}: {what}")
