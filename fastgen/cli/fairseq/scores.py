"""Scoring in parts, in the workers, that add up to exactly what fairseq's scorers give for the whole.

BLEU's counts add up; so does what sacrebleu and WER keep of a sentence (its tokenised text; its errors and its
length). Every other scorer is given the sentences themselves, in order, where the parts meet.
"""

from __future__ import annotations

from typing import Any

from fairseq import scoring
from fairseq.scoring.bleu import BleuStat, SacrebleuScorer, Scorer
from fairseq.scoring.wer import WerScorer


class Pairs:
    """Keeps the sentences for a scorer whose parts do not add up."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []

    def add_string(self, ref: str, pred: str) -> None:
        """What a scorer that compares strings is called with."""
        self.pairs.append((ref, pred))


# What adds up of a scorer, and what it is before the first sentence.
_SUMS: dict[type, dict[str, Any]] = {
    Scorer: {name: 0 for name, _ in BleuStat._fields_},
    SacrebleuScorer: {"ref": [], "pred": []},
    WerScorer: {"distance": 0, "ref_length": 0},
    Pairs: {"pairs": []},
}


def unsupported_reasons(name: str) -> list[str]:
    """Why `--scoring NAME` cannot be done in parts."""
    scorer = scoring.SCORER_REGISTRY.get(name)
    if scorer is None or scorer is Scorer or hasattr(scorer, "add_string"):
        return []
    return [f"--scoring {name} compares token numbers (supported: bleu, and scorers that compare strings)"]


def scorer_in_parts(scorer: Any) -> Any:
    """What a worker process gives its sentences to, instead of `scorer`."""
    return scorer if type(scorer) in _SUMS else Pairs()


def take_part(scorer: Any) -> dict[str, Any]:
    """What a worker's scorer was given since the last call."""
    owner = getattr(scorer, "stat", scorer)  # where BLEU counts
    part = {name: getattr(owner, name) for name in _SUMS[type(scorer)]}
    for name, empty in _SUMS[type(scorer)].items():
        setattr(owner, name, type(empty)())
    return part


def add_part(scorer: Any, part: dict[str, Any]) -> None:
    """Adds a part to the scorer of the whole; parts come in the order of the sentences."""
    for target, hypothesis in part.pop("pairs", ()):
        scorer.add_string(target, hypothesis)
    owner = getattr(scorer, "stat", scorer)
    for name, value in part.items():
        total = getattr(owner, name)
        total += value  # in place for lists
        setattr(owner, name, total)
