"""What fairseq's loop asks the models in each step, and what goes from one step to the next."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastgen.optimizer.decoding import recordable
from fastgen.optimizer.fairseq.encoding import EncoderOutputs
from fastgen.optimizer.fairseq.recorded_steps import Outputs, RecordedDecoder
from fastgen.optimizer.fairseq.states import DecodingState


class DecodeStep:
    """The step of all models of a generator; rows of a sentence stand next to each other.

    max_len: the number of steps after the first. records: steps are recorded if they turn out to be fit. since: how
    many there were since the beginning, or since sentences left the batch.
    """

    def __init__(
        self, generator: Any, outputs: EncoderOutputs, states: list[DecodingState], max_len: int, records: bool
    ) -> None:
        self.generator, self.outputs, self.states = generator, outputs, states
        self.max_len, self.records, self.since = max_len, records, 0
        self.recorded: RecordedDecoder | None = None

    def log_probs(self, tokens: Tensor) -> Outputs:
        """What the models give for the token after tokens `[rows, length]`, which the loop may overwrite."""
        if self.recorded is not None and self.recorded.temperature != self.generator.temperature:
            self._end_recording()
        if self.recorded is not None:
            return self.recorded.log_probs(tokens)
        found = self.generator.model.forward_decoder(
            tokens, self.outputs.by_model, self.states, self.generator.temperature
        )
        self.since += 1
        if self.records and self.since in (1, recordable.STEPS_BEFORE):
            recorded = RecordedDecoder(self.generator, self.states[0])
            rows, length = tokens.shape
            if recorded.start(rows, self.since, self.max_len + 1 - length, lambda _: {"tokens": tokens}, found[0]):
                self.recorded, self.states = recorded, []
        return found

    def reorder(self, order: Tensor, kept: Tensor | None) -> None:
        """Row i becomes what row `order[i]` was; `kept` are the sentences that remain (int64), None if all do."""
        if kept is not None:
            self.since = 0
            if self.recorded is not None:
                self._end_recording()
        if self.recorded is not None:
            self.recorded.reorder(order)
        for state in self.states:
            state.reorder(order, kept)
        self.outputs.reorder(order)

    def _end_recording(self) -> None:
        self.states = [self.recorded.plain_state()]
        self.recorded.end()
        self.recorded = None
