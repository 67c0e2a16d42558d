"""Scoring in parts, in the workers, that add up to exactly what fairseq's scorers give for the whole.

Three kinds of scorers: BLEU's counts add up; so does what sacrebleu and WER keep of a sentence (its tokenised text;
its errors and its length). Every other scorer is given the sentences themselves, in order, where the parts meet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fairseq import scoring
from fairseq.scoring.bleu import SacrebleuScorer, Scorer
from fairseq.scoring.wer import WerScorer

# What `add_string` of these changes, and what it is before the first sentence.
_ADDITIVE: dict[type, dict[str, Any]] = {
    SacrebleuScorer: {"ref": [], "pred": []},
    WerScorer: {"distance": 0, "ref_length": 0},
}


@dataclass
class Part:
    """What some sentences add to a score."""

    counts: list[int] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    pairs: list[tuple[str, str]] = field(default_factory=list)


def unsupported_reasons(name: str) -> list[str]:
    """Why `--scoring NAME` cannot be done in parts."""
    scorer = scoring.SCORER_REGISTRY.get(name)
    if scorer is None or scorer is Scorer or hasattr(scorer, "add_string"):
        return []
    return [f"--scoring {name} compares token numbers (supported: bleu, and scorers that compare strings)"]


class PartialScorer:
    """A scorer of a worker process; what was added since the last `take` is one Part."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer
        self.wants_tokens = not hasattr(scorer, "add_string")
        self._additive = _ADDITIVE.get(type(scorer))
        self._pairs: list[tuple[str, str]] = []

    def add_tokens(self, target: np.ndarray, hypothesis: np.ndarray) -> None:
        """For scorers that want tokens; both are int32 and one-dimensional."""
        self.scorer.add(torch.from_numpy(target), torch.from_numpy(hypothesis))

    def add_string(self, target: str, hypothesis: str) -> None:
        """For all other scorers."""
        if self._additive is None:
            self._pairs.append((target, hypothesis))
        else:
            self.scorer.add_string(target, hypothesis)

    def take(self) -> Part:
        """What was added since the last call."""
        if self.wants_tokens:
            counts = [getattr(self.scorer.stat, name) for name, _ in self.scorer.stat._fields_]
            self.scorer.reset()
            return Part(counts=counts)
        if self._additive is None:
            pairs, self._pairs = self._pairs, []
            return Part(pairs=pairs)
        attributes = {name: getattr(self.scorer, name) for name in self._additive}
        for name, empty in self._additive.items():
            setattr(self.scorer, name, type(empty)())
        return Part(attributes=attributes)


def add_part(scorer: Any, part: Part) -> None:
    """Adds a part to the scorer of the whole; parts come in the order of the sentences."""
    for (name, _), count in zip(scorer.stat._fields_ if part.counts else (), part.counts):
        setattr(scorer.stat, name, getattr(scorer.stat, name) + count)
    for name, value in part.attributes.items():
        total = getattr(scorer, name)
        total += value  # in place for lists
        setattr(scorer, name, total)
    for target, hypothesis in part.pairs:
        scorer.add_string(target, hypothesis)
