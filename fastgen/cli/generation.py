"""One batch through generate and back to text."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from fastgen.cli.errors import InputError
from fastgen.cli.inputs import Batch
from fastgen.cli.loading import LoadedModel

SEPARATOR = "####"


@dataclass(frozen=True)
class Output:
    """What was generated for one line of the input, best first; nothing for an empty line."""

    texts: tuple[str, ...] = ()
    scores: tuple[float, ...] | None = None

    @property
    def text(self) -> str:
        """All texts on one line, joined as FastSeq does."""
        return SEPARATOR.join(self.texts)

    def line(self, with_scores: bool) -> str:
        """A line of OUTPUT without its end; with scores it is SCORE<tab>TEXT, as FastSeq writes it."""
        if not with_scores:
            return self.text
        if self.scores is None:
            return SEPARATOR.join(["NA"] * max(1, len(self.texts))) + "\t" + self.text
        return SEPARATOR.join(f"{score:f}" for score in self.scores) + "\t" + self.text


class TextGenerator:
    """Calls generate with the settings of a run and counts the seconds spent in it."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: dict[str, Any],
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> None:
        self.loaded = loaded
        self.settings = settings
        self.decoding = {"skip_special_tokens": skip_special_tokens}
        if clean_up_tokenization_spaces is not None:
            self.decoding["clean_up_tokenization_spaces"] = clean_up_tokenization_spaces
        self.seconds = 0.0

    def __call__(self, batch: Batch) -> list[Output]:
        """The outputs of the batch's lines, in their order."""
        sequences, scores = self._timed_generate(batch)
        if self.loaded.causal_lm:
            sequences = sequences[:, batch.input_ids.shape[1] :]  # [B * R, N + T] -> [B * R, T]
        texts = self.loaded.tokenizer.batch_decode(sequences, **self.decoding)
        texts = [_on_one_line(text) for text in texts]
        each = len(texts) // len(batch)
        starts = range(0, len(texts), each)
        return [
            Output(tuple(texts[i : i + each]), None if scores is None else tuple(scores[i : i + each])) for i in starts
        ]

    def _timed_generate(self, batch: Batch) -> tuple[torch.Tensor, list[float] | None]:
        """Sequences on the host [B * R, T] and, where beams have them, their scores [B * R]."""
        start = time.perf_counter()
        try:
            generated = self.loaded.model.generate(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, **self.settings
            )
        except ValueError as error:
            first, last = batch.line_indices[0] + 1, batch.line_indices[-1] + 1
            raise InputError(f"MODEL cannot generate for lines {first} to {last}: {error}") from error
        sequences = generated if isinstance(generated, torch.Tensor) else generated.sequences
        # Copying to the host waits for the device, so the clock is read when the work is done.
        sequences = sequences.cpu()
        self.seconds += time.perf_counter() - start
        scores = getattr(generated, "sequences_scores", None)
        return sequences, None if scores is None else scores.tolist()


def _on_one_line(text: str) -> str:
    return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
