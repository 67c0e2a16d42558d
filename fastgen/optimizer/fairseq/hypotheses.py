"""Hypotheses that have ended, as fairseq's generator returns them.

Tests: tests/optimizer/fairseq/test_fairseq_loop.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgen.optimizer.decoding.step_history import StepHistory

Hypothesis = dict[str, Tensor]


@dataclass
class Scoring:
    """How a generator scores what has ended; source_lengths is set if each output is to be as long as its source."""

    eos: int
    normalize: bool
    len_penalty: float
    match_source_len: bool


@dataclass
class Collected:
    """The hypotheses of each sentence of the batch, in the order in which they ended, at most `num_beams` of each."""

    num_beams: int
    sentences: list[list[Hypothesis]] = field(default_factory=list)

    def wanted(self, ended: list[list[bool]], numbers: list[int]) -> list[tuple[int, int]]:
        """Of the candidates that ended (`[B][M]`), those there is room for: (place of the sentence, of the candidate).

        numbers: for each place the number of its sentence in the batch.
        """
        found = []
        for place, (number, flags) in enumerate(zip(numbers, ended)):
            room = self.num_beams - len(self.sentences[number])
            found += [(place, candidate) for candidate, flag in enumerate(flags) if flag][: max(room, 0)]
        return found

    def finished(
        self, is_finished: Callable[[int, int], bool], ended: list[list[bool]], numbers: list[int]
    ) -> list[int]:
        """Places of the sentences of which something ended and that need no more, by their number of hypotheses."""
        return [
            place
            for place, (number, flags) in enumerate(zip(numbers, ended))
            if any(flags) and is_finished(place, len(self.sentences[number]))
        ]

    def sorted_sync(self) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence, the best first; reads all scores at once."""
        scores = [hypothesis["score"] for sentence in self.sentences for hypothesis in sentence]
        remaining = iter(torch.stack(scores).tolist() if scores else ())
        result = []
        for sentence in self.sentences:
            _, order = torch.sort(torch.tensor([next(remaining) for _ in sentence]), descending=True)
            result.append([sentence[index] for index in order.tolist()])
        return result


def build(
    step: int,
    rows: Tensor,
    end_scores: Tensor,
    tokens: Tensor,
    scores: Tensor,
    attention: StepHistory | None,
    source_lengths: Tensor,
    scoring: Scoring,
) -> list[Hypothesis]:
    """The hypotheses that end at `step` (0 for the first), one for each of `rows`.

    rows: which rows of the batch they continue, `[n]`. end_scores: their sums of log-probabilities, the end included,
    `[n]`. tokens: `[all rows, …]`, the first of which is not the hypothesis'. scores: sums of log-probabilities up to
    each position, `[all rows, …]`. source_lengths: those of the sources of `rows`, `[n]`.
    """
    words = tokens[:, 1 : step + 2].index_select(0, rows)
    words[:, step] = scoring.eos
    sums = scores[:, : step + 1].index_select(0, rows)
    sums[:, step] = end_scores
    by_position = torch.cat([sums[:, :1], sums[:, 1:] - sums[:, :-1]], dim=1)
    if scoring.normalize:
        end_scores = end_scores / (step + 1) ** scoring.len_penalty
    if scoring.match_source_len:
        end_scores = end_scores.masked_fill(step > source_lengths, -torch.inf)
    weights = None if attention is None else attention.read(rows, step + 1)
    return [
        {
            "tokens": words[index],
            "score": end_scores[index],
            "attention": torch.empty(0) if weights is None else weights[index],
            "alignment": torch.empty(0),
            "positional_scores": by_position[index],
        }
        for index in range(rows.shape[0])
    ]


def on_device(values: list[int], device: torch.device) -> Tensor:
    """Numbers of the host (int64) for the device, without waiting for it."""
    numbers: Any = torch.tensor(values, dtype=torch.int64)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
