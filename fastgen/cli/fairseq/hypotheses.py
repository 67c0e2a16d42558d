"""A batch's sentences and hypotheses as plain numbers, small enough to be sent to another process.

What is printed of a tensor is computed here, on the tensor's device and in its dtype, as fairseq-generate does: a
division on a GPU may differ from the host's in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LOG_2 = math.log(2)  # fairseq prints scores in base 2
SMALLEST_CHUNK = 8  # sentences; below, sending them costs more than working on them together


@dataclass(frozen=True)
class Hypothesis:
    """What is printed of one hypothesis; None where nothing of it is printed."""

    tokens: np.ndarray
    score: float | str | None
    positional_scores: np.ndarray | None
    alignment: Any = None
    step: str | None = None
    history: list[np.ndarray] | None = None


@dataclass(frozen=True)
class Sentences:
    """Some sentences of a batch; the lists and arrays have one entry or row for each."""

    ids: list[int]
    src_tokens: np.ndarray | None  # [B, S], padded
    target: np.ndarray | None  # [B, T], padded
    hypotheses: list[list[Hypothesis]]
    originals: list[tuple[str, str | None]] | None  # source and target as they were read, for --replace-unk
    ignored: frozenset[int]  # symbols that are not part of a text

    def split(self, parts: int) -> Iterator[Sentences]:
        """The same sentences in at most `parts` pieces of equal size, none smaller than SMALLEST_CHUNK but the last."""
        size = max(SMALLEST_CHUNK, -(-len(self.ids) // parts))
        for start in range(0, len(self.ids), size):
            rows = slice(start, start + size)
            yield replace(
                self,
                ids=self.ids[rows],
                src_tokens=None if self.src_tokens is None else self.src_tokens[rows],
                target=None if self.target is None else self.target[rows],
                hypotheses=self.hypotheses[rows],
                originals=None if self.originals is None else self.originals[rows],
            )


@dataclass(frozen=True)
class Wanted:
    """What of a hypothesis is printed, by the flags of a run."""

    nbest: int
    scores: bool
    alignment: bool
    step: bool
    history: bool

    @classmethod
    def from_config(cls, cfg: Any) -> Wanted:
        """By --nbest, --quiet, --print-alignment, --replace-unk, --print-step and --retain-iter-history."""
        generation, printed = cfg.generation, not cfg.common_eval.quiet
        return cls(
            nbest=generation.nbest,
            scores=printed,
            alignment=(printed and generation.print_alignment is not None) or generation.replace_unk is not None,
            step=printed and generation.print_step,
            history=printed and generation.retain_iter_history,
        )


def collect(hypos: list[list[dict[str, Any]]], wanted: Wanted) -> list[list[Hypothesis]]:
    """The first `wanted.nbest` hypotheses of each sentence, copied to the host in as few pieces as possible."""
    chosen = [sentence[: wanted.nbest] for sentence in hypos]
    flat = [hypo for sentence in chosen for hypo in sentence]
    nothing = [None] * len(flat)
    tokens = _tokens([hypo["tokens"] for hypo in flat])
    scores = _scores([hypo["score"] for hypo in flat]) if wanted.scores else nothing
    positional = to_host([hypo["positional_scores"] for hypo in flat], _LOG_2) if wanted.scores else nothing
    alignments = [_plain(hypo["alignment"]) for hypo in flat] if wanted.alignment else nothing
    steps = [str(hypo["steps"]) for hypo in flat] if wanted.step else nothing
    histories = [_tokens([h["tokens"] for h in hypo["history"]]) for hypo in flat] if wanted.history else nothing
    made = map(Hypothesis, tokens, scores, positional, alignments, steps, histories)
    return [[next(made) for _ in sentence] for sentence in chosen]


def to_host(tensors: Sequence[Tensor], divisor: float | None = None) -> list[np.ndarray]:
    """The values, divided if asked to, as arrays: one copy from the device where the tensors are rows of one kind."""
    first = tensors[0]
    if first.dim() == 1 and all(t.dim() == 1 and t.dtype == first.dtype and t.device == first.device for t in tensors):
        ends = list(accumulate(tensor.shape[0] for tensor in tensors))
        array = _array(_divided(torch.cat(list(tensors)), divisor))
        return [array[start:end] for start, end in zip([0, *ends], ends)]
    return [_array(_divided(tensor, divisor)) for tensor in tensors]


def _tokens(rows: Sequence[Tensor]) -> list[np.ndarray]:
    """As 32-bit integers, which is what dictionaries and alignments take."""
    return [array.astype(np.int32) for array in to_host(rows)]


def _scores(scores: list[Any]) -> list[float | str]:
    """What is printed as the score of each hypothesis."""
    kinds = {(s.dim(), s.dtype, s.device) if isinstance(s, Tensor) else None for s in scores}
    if len(kinds) == 1 and None not in kinds and scores[0].dim() == 0:
        return _divided(torch.stack(scores), _LOG_2).tolist()
    return [format(score / _LOG_2) for score in scores]


def _divided(tensor: Tensor, divisor: float | None) -> Tensor:
    return tensor if divisor is None else tensor / divisor


def _array(tensor: Tensor) -> np.ndarray:
    """numpy has no bfloat16; every one of its values is a float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def _plain(alignment: Any) -> Any:
    return _array(alignment) if isinstance(alignment, Tensor) else alignment
