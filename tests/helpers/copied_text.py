"""User code around `generate`: a text that copies parts of the prompt, and notes of what the code is called with."""

from random import Random
from typing import Any

import torch
from architectures import VOCABULARY
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer


def copying(input_ids: torch.Tensor, length: int, seed: int = 3) -> list[list[int]]:
    """Returns a text for each row that copies runs of 4 to 12 tokens of its input, with a token between them."""
    rng, texts = Random(seed), []
    for row in input_ids.tolist():
        text: list[int] = []
        while len(text) < length:
            start, count = rng.randrange(max(1, len(row) - 4)), rng.randint(4, 12)
            text += [*row[start : start + count], rng.randrange(5, VOCABULARY)]
        texts.append(text[:length])
    return texts


class Forced(LogitsProcessor):
    """Makes each row generate a given text; start: the number of tokens before it; every: leaves this step free."""

    def __init__(self, texts: list[list[int]], start: int, every: int = 0) -> None:
        self.texts, self.start, self.every = texts, start, every

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.shape[1] - self.start
        if self.every and position % self.every == 0:
            return scores
        tokens = [text[position % len(text)] for text in self.texts]
        forced = scores.clone()
        forced[torch.arange(len(scores)), torch.tensor(tokens)] = 1e4
        return forced


class Noting(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Notes all that it is called with, as processor, criterion and streamer; stops rows at a length, if any."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.calls: list[Any] = []
        self.stops_at = stops_at

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.calls.append((input_ids.clone(), None if scores is None else scores.clone()))
        if scores is not None:
            return scores
        ends = torch.arange(len(input_ids)) * 3 + (self.stops_at or 1 << 20)
        return (input_ids.shape[1] >= ends).to(input_ids.device)

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((value.clone(), None))

    def end(self) -> None:
        self.calls.append((torch.zeros(0), None))


class Stops(StoppingCriteria):
    """Ends rows by their last tokens, and notes the tokens and the number of scores that it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, int | None]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((input_ids.clone(), None if scores is None else len(scores)))
        return input_ids[:, -3:].sum(dim=1) % 11 == 0
