"""`fastgen.verify` of a generator of fairseq.
Tests: tests/optimizer/test_verify.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch.nn.utils.rnn import pad_sequence

from fastgen.ops.tolerances import tolerance
from fastgen.optimizer.decoding.verify import ABSENT, Difference, first_token_difference
from fastgen.optimizer.fairseq.checks import HostGenerator


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
        """Of tokens first; the scores are those of the whole hypotheses."""
        if list(map(len, ours)) != list(map(len, theirs)):
            return Difference(f"{list(map(len, ours))} hypotheses instead of {list(map(len, theirs))}")
        rows = [list(chain.from_iterable(hypotheses)) for hypotheses in (ours, theirs)]
        tokens = [pad_sequence([row["tokens"] for row in each], True, ABSENT) for each in rows]
        found = first_token_difference(tokens[0], tokens[1], 0)
        if found is None:
            by_step = [pad_sequence([row["positional_scores"] for row in each], True) for each in rows]
            atol = tolerance("score", by_step[0].dtype)
            steps = ((by_step[0] - by_step[1]).abs() > atol).t().nonzero()  # the earliest step first
            if not len(steps):
                return None
            step, row = steps[0].tolist()
            found = Difference(f"step {step} of row {row} gives other scores", step, row)
        scores = [float(each[found.row or 0]["score"]) for each in rows]
        return replace(found, ours=scores[0], theirs=scores[1])
