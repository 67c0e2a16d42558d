"""`fastgen.verify` of a generator of fairseq.
Tests: tests/optimizer/test_verify.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen.optimizer.decoding.verify import Difference
from fastgen.optimizer.fairseq.checks import HostGenerator

# How far scores of one hypothesis may lie apart.
TOLERANCE = 1e-4


@dataclass
class FairseqCall:
    """`generator.generate(models, sample, **kwargs)`: hypotheses of each sentence, the best first."""

    generator: HostGenerator
    sample: dict[str, Any]
    kwargs: dict[str, Any]
    host: str = "fairseq"

    def run(self) -> list[list[dict[str, Any]]]:
        return self.generator.generate(list(self.generator.model.models), self.sample, **self.kwargs)

    def rows_of(self, output: list[list[dict[str, Any]]]) -> int:
        return sum(map(len, output))

    def difference(self, ours: list[list[dict[str, Any]]], theirs: list[list[dict[str, Any]]]) -> Difference | None:
        """Of the hypothesis that differs at the earliest step; the scores are those of the whole hypotheses."""
        if list(map(len, ours)) != list(map(len, theirs)):
            return Difference(f"{list(map(len, ours))} hypotheses instead of {list(map(len, theirs))}")
        pairs = [pair for found, expected in zip(ours, theirs) for pair in zip(found, expected)]
        found = (_first_difference(row, *pair) for row, pair in enumerate(pairs))
        return min((one for one in found if one is not None), key=lambda one: (one.step, one.row), default=None)


def _first_difference(row: int, ours: dict[str, Any], theirs: dict[str, Any]) -> Difference | None:
    scores = float(ours["score"]), float(theirs["score"])
    tokens = ours["tokens"].tolist(), theirs["tokens"].tolist()
    if tokens[0] == tokens[1]:
        steps = (ours["positional_scores"] - theirs["positional_scores"]).abs() > TOLERANCE
        if not steps.any():
            return None
        step = int(steps.nonzero()[0])
        return Difference(f"step {step} of row {row} gives other scores", step, row, *scores)
    step = next((i for i, pair in enumerate(zip(*tokens)) if pair[0] != pair[1]), min(map(len, tokens)))
    names = [f"token {one[step]}" if step < len(one) else "the end" for one in tokens]
    return Difference(f"step {step} of row {row} gives {names[0]} instead of {names[1]}", step, row, *scores)
