"""What fairseq's loop asks the models in each step, and what goes from one step to the next.

Tests: tests/optimizer/fairseq/test_fairseq_recorded_steps.py
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from fairseq.sequence_generator import EnsembleModel
from torch import Tensor
from torch.nn import functional

from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.decode_step import DecodeStep
from fastgen.optimizer.decoding.kv_cache import KVCache, rounded
from fastgen.optimizer.decoding.reasons import Reason
from fastgen.optimizer.decoding.user_code import is_user_code
from fastgen.optimizer.fairseq.encoding import EncoderOutputs
from fastgen.optimizer.fairseq.plan import KNOWN
from fastgen.optimizer.fairseq.states import DecodingState

# What a model gives for a step: log-probabilities `[rows, vocabulary]`, and weights `[rows, source_length]` or None.
Outputs = tuple[Tensor, Tensor | None]


class FairseqDecodeStep(DecodeStep):
    """The step of all models of a generator; rows of a sentence stand next to each other.

    max_len: the number of steps after the first. captures: of an ensemble of one model only. mask: of the source in
    captured steps, `[inputs, 1, 1, source_length]`; None where nothing has to be hidden.
    """

    prefill_is_a_step = True  # a prompt is computed before the loop begins, see prompt.py

    def __init__(
        self,
        call: GenerateCall,
        generator: Any,
        outputs: EncoderOutputs,
        states: list[DecodingState],
        max_len: int,
        captures: bool,
    ) -> None:
        model, rows = generator.model.single_model, states[0].kv.rows
        decoder = getattr(model, "decoder", model)
        super().__init__(call, model, decoder, rows, states[0].rows_per_input, max_len + 1, captures, KNOWN)
        self.generator, self.outputs, self.states = generator, outputs, states
        self.mask: Tensor | None = None
        self._padded_mask: tuple[int, int, Tensor] | None = None

    def log_probs(self, tokens: Tensor) -> Outputs:
        """What the models give for the token after tokens `[rows, length]`, which the loop may overwrite."""
        if self.runs_user_code:
            self._look_again()
        if self.graph is not None and self.variant != self._variant():
            self.leave_captures(Reason("TEMPERATURE_CHANGED", "the search has changed the temperature within the call"))
        if self.graph is None:
            return self.run(tokens)
        log_probs, weights = self.run(tokens)
        return log_probs.clone(), None if weights is None else weights[:, self.graph.cache.padding :]

    def prefill(self, tokens: Tensor) -> Outputs:
        return self.forward(self.model, self.inputs(tokens, None), None)

    def inputs(self, tokens: Tensor, view: DecodingState | None) -> dict[str, Any]:
        temperature = self.generator.temperature
        if view is None:
            own = {"ensemble": self.generator.model, "encoded": self.outputs.by_model, "states": self.states}
            return {"tokens": tokens, "temperature": temperature, **own}
        cache = self.graph.cache
        position = torch.full((1, 1), tokens.shape[1], device=tokens.device)
        # Without a source it is the prompt that is padded, which the cache's own mask hides.
        masks = {"own_mask": cache.mask(), "mask": None if self.mask is None else self._padded(cache.padding)}
        return {"tokens": tokens[:, -1:], "position": position, "temperature": temperature, **masks}

    @staticmethod
    def forward(model: Any, inputs: dict[str, Any], view: DecodingState | None) -> Outputs:
        tokens, temperature = inputs["tokens"], inputs["temperature"]
        if view is None:
            return inputs["ensemble"].forward_decoder(tokens, inputs["encoded"], inputs["states"], temperature)
        view.position, view.own_mask, view.mask = inputs["position"], inputs["own_mask"], inputs["mask"]
        return EnsembleModel([model]).forward_decoder(tokens, [view.encoded], [view], temperature)

    @staticmethod
    def logits_of(outputs: Outputs) -> Tensor:
        return outputs[0]

    def kv_cache(self, left: int) -> tuple[KVCache | None, Sequence[Reason]]:
        state = self.states[0]
        if reasons := state.kv.static_reasons():
            return None, reasons
        self.mask, length = state.mask, state.source_length
        if self.mask is None and rounded(length) > length:  # which hides nothing but padding
            inputs = self.rows // self.rows_per_input
            self.mask = torch.ones((inputs, 1, 1, length), dtype=torch.bool, device=state.kv.tensors[0].device)
        self.variant = self._variant()
        return state.kv, []

    def view_of(self, static: KVCache) -> DecodingState:
        return self.states[0].over(static)

    def use(self, static: KVCache) -> None:
        self.states[0].kv = static

    def leave(self, static: KVCache) -> None:
        self.states[0].kv = static.to_growable(self.most)

    @cached_property
    def runs_user_code(self) -> bool:
        generator = self.generator
        called = (generator, generator.search, generator.repeat_ngram_blocker)
        if any(is_user_code(one, KNOWN.packages) for one in called):
            return True
        if generator.lm_model is None:
            return False
        facts = self.call.facts_of(generator.lm_model, KNOWN)
        return bool(facts.hooks or facts.foreign_classes or facts.replaced or facts.code.foreign)

    def _look_again(self) -> None:
        """Code of the program has run: modules that it has put into a model have states, and it may look at weights."""
        changed = [index for index, model in enumerate(self.generator.model.models) if self.call.has_changed(model)]
        if not changed:
            return
        self.captures = False
        if self.graph is not None:
            self.leave_captures()
        for index in changed:
            self.states[index].plan.look_again(self.generator.model.models[index])

    def reorder(self, order: Tensor, kept: Tensor | None = None) -> None:
        """Row i becomes what row `order[i]` was; `kept` are the sentences that remain (int64), None if all do."""
        for state in self.states:
            state.reorder(order, kept)
        if kept is not None:
            self.mask = None if self.mask is None else self.mask.index_select(0, kept)
            self.compact(kept, order)
        self.outputs.reorder(order)

    def _variant(self) -> tuple[float, bool]:
        return self.generator.temperature, self.mask is not None

    def _padded(self, padding: int) -> Tensor | None:
        """The mask of a step, with so many hidden positions before the first one; made once for each mask."""
        if padding and (self._padded_mask is None or self._padded_mask[:2] != (id(self.mask), padding)):
            self._padded_mask = id(self.mask), padding, functional.pad(self.mask, (padding, 0))
        return self._padded_mask[2] if padding else self.mask
