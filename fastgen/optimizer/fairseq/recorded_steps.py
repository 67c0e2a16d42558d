"""The steps of fairseq's decoder as replays of a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from fairseq.sequence_generator import EnsembleModel
from torch import Tensor
from torch.nn import functional

from fastgen.optimizer.decoding.recorded_steps import RecordedSteps
from fastgen.optimizer.decoding.static_cache import Content, StaticCache, rounded
from fastgen.optimizer.fairseq.states import DecodingState, StaticState

# What a model gives for a step: log-probabilities `[rows, vocabulary]`, and weights `[rows, source_length]` or None.
Outputs = tuple[Tensor, Tensor | None]


class RecordedDecoder(RecordedSteps):
    """The steps of the decoder of an ensemble of one model, which go on from this state, for `fan_out * inputs` rows.

    mask: which positions of the source, padded, may be attended to, `[inputs, 1, 1, length]`; None if all.
    """

    def __init__(self, generator: Any, state: DecodingState) -> None:
        model, self.temperature = generator.model.single_model, generator.temperature
        self.plan, self.fan_out, self.limit = state.plan, state.fan_out, state.limit
        self.before: DecodingState | None = state
        inputs, length = state.sources
        self.mask, padding = state.mask, rounded(length) - length
        super().__init__(model, model.decoder, (self.temperature, self.mask is not None or padding > 0))
        if padding:
            if self.mask is None:
                self.mask = torch.ones((inputs, 1, 1, length), dtype=torch.bool, device=self.recordings.device)
            self.mask = functional.pad(self.mask, (padding, 0))

    def contents_or_reasons(self, left: int) -> tuple[list[Content], list[str]]:
        return self.before.contents_or_reasons()

    def function_of(self, states: list[StaticCache]) -> tuple[Callable[[dict[str, Any]], Outputs], StaticState]:
        state, model, temperature = StaticState(self.plan, self.fan_out, states), ref(self.model), self.temperature

        def forward(inputs: dict[str, Any]) -> Outputs:
            state.position, state.own_mask, state.mask = inputs["position"], inputs["own_mask"], inputs["mask"]
            return EnsembleModel([model()]).forward_decoder(inputs["tokens"], [state.encoded], [state], temperature)

        return forward, state

    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """inputs: tokens `[rows, length]`, of which the last is fed."""
        tokens = inputs["tokens"]
        position = torch.full((1, 1), tokens.shape[1], device=tokens.device)
        own_mask = self.recording.caches[0].mask_of_next()
        return {"tokens": tokens[:, -1:], "position": position, "own_mask": own_mask, "mask": self.mask}

    def scores(self, outputs: Outputs) -> Tensor:
        return outputs[0]

    def moved(self) -> None:
        self.before = None

    def ended(self) -> None:
        """Nobody else has seen the state."""

    def log_probs(self, tokens: Tensor) -> Outputs:
        """What the next step gives for tokens `[rows, length]`; weights hold until the next one."""
        self.cache_with_room()
        log_probs, weights = self.run({"tokens": tokens})
        return log_probs.clone(), None if weights is None else weights[:, self.padded_part.padding :]

    def plain_state(self) -> DecodingState:
        """The state with which the call goes on without recordings."""
        state = DecodingState(self.plan, self.fan_out, self.limit)
        state.take(self.contents(), None if self.mask is None else self.mask[..., self.padded_part.padding :])
        return state
