"""A batch's sentences and hypotheses as plain numbers, small enough to be sent to another process.

What is printed of a tensor is computed here, on the tensor's device and in its dtype, as fairseq-generate does: a
division on a GPU may differ from the host's in the last bit.

Tests: tests/cli/fairseq/test_cli_fairseq_output.py
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LOG_2 = math.log(2)  # fairseq prints scores in base 2


@dataclass(frozen=True)
class Hypothesis:
    """What is printed of one hypothesis; None where nothing of it is printed."""

    tokens: np.ndarray
    score: float | str | None
    positional_scores: np.ndarray | None
    alignment: Any
    step: str | None
    history: list[np.ndarray] | None


@dataclass(frozen=True)
class Sentence:
    """A sentence of a batch."""

    id: int
    source: np.ndarray | None  # [S], padded
    target: np.ndarray | None  # [T], padded
    original: tuple[str, str] | None  # source and target as they were read, for --replace-unk
    hypotheses: list[Hypothesis]


def collect(hypos: list[list[dict[str, Any]]], generation: Namespace, printed: bool) -> list[list[Hypothesis]]:
    """The first --nbest hypotheses of each sentence, copied to the host in as few pieces as possible.

    generation: the flags that say what is `printed` of a hypothesis, if anything is.
    """
    chosen = [sentence[: generation.nbest] for sentence in hypos]
    flat = [hypo for sentence in chosen for hypo in sentence]
    nothing: list[Any] = [None] * len(flat)
    scores = positional = alignments = steps = histories = nothing
    tokens = _tokens([hypo["tokens"] for hypo in flat])
    if printed:
        scores = _scores([hypo["score"] for hypo in flat])
        positional = to_host([hypo["positional_scores"] for hypo in flat], _LOG_2)
    if (printed and generation.print_alignment is not None) or generation.replace_unk is not None:
        alignments = [hypo["alignment"] for hypo in flat]
        alignments = [_array(each) if isinstance(each, Tensor) else each for each in alignments]
    if printed and generation.print_step:
        steps = [str(hypo["steps"]) for hypo in flat]
    if printed and generation.retain_iter_history:
        histories = [_tokens([step["tokens"] for step in hypo["history"]]) for hypo in flat]
    made = map(Hypothesis, tokens, scores, positional, alignments, steps, histories)
    return [[next(made) for _ in sentence] for sentence in chosen]


def to_host(tensors: Sequence[Tensor], divisor: float = 1) -> list[np.ndarray]:
    """The values, divided, as arrays: one copy from the device where the tensors are rows of one kind."""
    first = tensors[0]
    if first.dim() == 1 and all(t.dim() == 1 and t.dtype == first.dtype and t.device == first.device for t in tensors):
        ends = list(accumulate(tensor.shape[0] for tensor in tensors))
        array = _array(torch.cat(list(tensors)), divisor)
        return [array[start:end] for start, end in zip([0, *ends], ends)]
    return [_array(tensor, divisor) for tensor in tensors]


def _tokens(rows: Sequence[Tensor]) -> list[np.ndarray]:
    """As 32-bit integers, which is what dictionaries and alignments take."""
    return [array.astype(np.int32) for array in to_host(rows)]


def _scores(scores: list[Any]) -> list[float | str]:
    """What is printed as the score of each hypothesis."""
    kinds = {(s.dim(), s.dtype, s.device) if isinstance(s, Tensor) else None for s in scores}
    if len(kinds) == 1 and None not in kinds and scores[0].dim() == 0:
        return (torch.stack(scores) / _LOG_2).tolist()
    return [format(score / _LOG_2) for score in scores]


def _array(tensor: Tensor, divisor: float = 1) -> np.ndarray:
    """The values, divided; numpy has no bfloat16, of which every value is a float32."""
    if divisor != 1:
        tensor = tensor / divisor
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
