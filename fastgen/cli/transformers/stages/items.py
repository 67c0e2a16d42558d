"""What the stages of the command hand to each other, in the order in which a line of INPUT goes through them.

Line → Prepared (preprocess.py) → Batch (batches.py) → Generated (generation.py) → Finished (postprocess.py)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # lines are read before torch is imported
    import numpy as np
    import torch


@dataclass(slots=True)
class Line:
    """One input as it stands in INPUT."""

    number: int  # counted from 1 over all lines of INPUT
    raw: bytes  # without its line end
    cut: bool = False  # whether `raw` is only what the line begins with


@dataclass(slots=True)
class Prepared:
    """What the model takes of one line; neither arrays nor an error for a line with nothing in it.

    arrays: {"input_ids": int64 [N]} of text, or the outputs of a feature extractor without their batch dimension.
    error: why nothing can be generated for this line, in one line.
    is_long: a recording that the model hears in several windows, which shares no batch with shorter ones.
    """

    arrays: dict[str, np.ndarray] | None = None
    error: str | None = None
    is_long: bool = False


@dataclass(slots=True)
class NotGenerated:
    """A line that the model never sees: there is nothing in it, or `error` says why."""

    line: Line
    error: str | None = None


@dataclass(slots=True)
class Batch:
    """Some lines for one call of generate, and lines that need none but are to be written with them."""

    lines: list[Line]  # B
    lengths: list[int]  # B: tokens or frames of each line
    inputs: dict[str, torch.Tensor]  # [B, N, …], padded, with an attention_mask where anything is; empty where B is 0
    not_generated: list[NotGenerated] = field(default_factory=list)
    ends_window: bool = True  # of lines that were sorted by length, longest first
    is_long: bool = False  # recordings of several windows

    def __len__(self) -> int:
        return len(self.lines)


@dataclass(slots=True)
class Segment:
    """A part of a recording, and the tokens of its text."""

    start: float  # seconds
    end: float
    tokens: list[int]  # timestamps among them


@dataclass(slots=True)
class Generated:
    """What came of a batch. R outputs per line stand in a row, best first."""

    lines: list[Line]  # B
    lengths: list[int]  # B: tokens or frames of each input
    sequences: np.ndarray  # int64 [B * R, T]: what was generated, without the prompt of a causal LM
    scores: list[float] | None  # [B * R], of beam search where they were asked for
    not_generated: list[NotGenerated]
    sounds: list[np.ndarray] | None = None  # B times float32 [S] where the model speaks, which has no sequences then
    segments: list[list[Segment]] | None = None  # [B * R] of recordings, where timestamps were generated


@dataclass(slots=True)
class Finished:
    """Records for OUTPUT, whole lines of UTF-8 with their ends, in no particular order."""

    records: list[tuple[int, bytes]]  # line number, record
    amount: float  # how much was generated: tokens, or seconds of sound
    failures: list[tuple[int, str]]  # line number, why
