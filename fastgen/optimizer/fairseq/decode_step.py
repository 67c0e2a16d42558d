"""The forwards of fairseq's loop, and the state of each model between steps.

    FairseqDecodeStep ──> EnsembleModel.forward_decoder ──> the models' decoders
          │                                                      │ incremental_state
          └────> DecodingState, one for each model  <────────────┘
                     └──> KVCache: generated keys and values written in place (FastSeq §2.2); the prompt's or the
                          encoder output's stored once per input (FastSeq §4.1.2)

Tests: tests/optimizer/fairseq/test_fairseq_loop.py, tests/optimizer/fairseq/test_fairseq_captured_steps.py
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import Any

import torch
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.sequence_generator import EnsembleModel
from torch import Tensor
from torch.nn import functional

from fastgen.optimizer.decoding.call import GenerateCall, setting
from fastgen.optimizer.decoding.decode_step import DecodeStep
from fastgen.optimizer.decoding.graphs import CapturedGraph
from fastgen.optimizer.decoding.guards import is_user_code
from fastgen.optimizer.decoding.kv_cache import KVCache, should_share
from fastgen.optimizer.decoding.segmented_kv import KV
from fastgen.optimizer.decoding.static_kv_cache import KVContent, StaticKVCache, rounded
from fastgen.optimizer.fairseq.checks import KNOWN, CallChecks, ModelPlan
from fastgen.patching import SwitchedOff

# A model's outputs of a step: log-probabilities `[rows, vocabulary]`, and weights `[rows, source_length]` or None.
Outputs = tuple[Tensor, Tensor | None]


class DecodingState(dict):
    """The incremental state of one model for `inputs * rows_per_input` rows, with the layers in its plan.

    For modules that fastgen does not support, it is the dictionary that they expect. limit: the most positions of a
    row. kv: a `KVCache`; while steps are captured, a `StaticKVCache`. layers: the layer number of each attention in kv.
    mask: of cross-attention, `[inputs, 1, 1, source_length]`; None if nothing is hidden. encoder_out: the decoder's
    view of the encoder's output.

    In a captured step also: self_mask: the mask of self-attention. position: the number of tokens of each row,
    including the one that is fed, int64 `[1, 1]`.
    """

    self_mask: Tensor | None = None
    position: Tensor | None = None
    mask: Tensor | None = None
    encoder_out: Any = None

    def __init__(self, plan: ModelPlan, inputs: int, rows_per_input: int, limit: int) -> None:
        super().__init__()
        self.plan, self.rows_per_input, self.limit = plan, rows_per_input, limit
        self.kv: Any = KVCache(inputs, rows_per_input)
        self.layers: dict[MultiheadAttention, int] = {}
        self._repeating_encoder: Any = None  # the encoder, if its output has all rows
        self._padding: Tensor | None = None
        shapes = [(attention.num_heads, attention.head_dim) for attention in plan.self_attention]
        for shape in dict.fromkeys(shapes):  # heads may be pruned, and layers of different shapes cannot share a buffer
            alike = [attention for attention, other in zip(plan.self_attention, shapes) if other == shape]
            self.layers |= zip(alike, self.kv.add_layers([()] * len(alike), limit))
        self._crosses = set(plan.cross_attention)
        self.layers |= zip(plan.cross_attention, self.kv.add_layers([()] * len(plan.cross_attention), None))
        self._keys = {attention._get_full_incremental_state_key("attn_state") for attention in self.layers}

    def over(self, static: StaticKVCache) -> DecodingState:
        """Returns the state of a captured step, whose keys and values are in this static cache."""
        state = DecodingState(self.plan, static.rows // static.rows_per_input, self.rows_per_input, static.capacity)
        state.kv = static
        # The layers already hold what they need of it.
        state.encoder_out = {
            "encoder_out": [torch.empty(0, device=static.write_position.device)],
            "encoder_padding_mask": [],
        }
        return state

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._keys:
            raise SwitchedOff("fastgen was switched off while it generated, so that fairseq misses its caches")
        super().__setitem__(key, value)

    def has_self(self, attention: MultiheadAttention) -> bool:
        return attention in self.layers and attention not in self._crosses

    def has_cross(self, attention: MultiheadAttention) -> bool:
        return attention in self._crosses

    def append(self, attention: MultiheadAttention, keys: Tensor, values: Tensor) -> KV:
        """Appends keys and values of each row, `[rows, heads, length, head_dim]`; returns all of the attention's."""
        layer = self.layers[attention]
        self.kv.append(layer, keys, values)
        return self.kv.read(layer)

    def prompt(self, attention: MultiheadAttention) -> KV | None:
        """Returns keys and values stored once per input, `[inputs, heads, length, head_dim]`; None before `set_prompt`.

        In self-attention they belong to the prompt, in cross-attention to the encoder's output.
        """
        return next(iter(self.kv.prompts[self.layers[attention]]), None)

    def set_prompt(self, attention: MultiheadAttention, keys: Tensor, values: Tensor) -> KV:
        """Stores keys and values `[inputs, heads, length, head_dim]`, see `prompt`, and returns them."""
        pair = keys.contiguous(), values.contiguous()
        self.kv.prompts[self.layers[attention]] = (pair,)
        return pair

    def prefill(self, call: GenerateCall, decoder: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Returns the features of prompts, tokens `[inputs, length]`, and stores their keys and values for all rows.

        A forward of several positions has no incremental state: `whole_attention` gets this one as a setting. A prompt
        that is too short to gain from sharing is stored once per row.
        """
        with setting(self):
            outputs = decoder.forward(tokens, features_only=True)
        for attention in self.plan.self_attention:
            if (pair := self.prompt(attention)) is None:
                raise RuntimeError("the forward over the prompt left no keys in a layer")
            if not should_share(call.costs, pair[0], self.rows_per_input, is_captured=call.will_capture):
                self.kv.repeat_prompt(self.layers[attention])
        return outputs

    def mask_sync(self, padding: Tensor, inputs: int) -> Tensor | None:
        """Returns the mask of the source, `[inputs, 1, 1, source_length]`; None if nothing is hidden.

        padding: `[inputs, source_length]` or the same for each row, nonzero for padding. All layers pass the same
        tensor, which is read once: attention is faster without a mask than with one that hides nothing.
        """
        if padding is not self._padding:
            by_input = padding[:: padding.shape[0] // inputs].bool()
            self._padding, self.mask = padding, ~by_input[:, None, None, :] if by_input.any() else None
        return self.mask

    def set_encoder_out(self, encoder: Any, output: Any, row_inputs: Tensor) -> None:
        """Stores the encoder's output: one row per input if the decoder's attention is fastgen's, otherwise all rows.

        row_inputs: the input of each row, int64.
        """
        states = output.get("encoder_out") if isinstance(output, dict) else None
        if self.plan.by_input and isinstance(states, list) and len(states) == 1 and states[0].dim() == 3:
            self.encoder_out = output  # the layers store what they need of it
        else:
            self._repeating_encoder, self.encoder_out = encoder, encoder.reorder_encoder_out(output, row_inputs)

    def reorder(self, order: Tensor, batch_index: Tensor | None) -> None:
        """Overwrites row i with row `order[i]`; batch_index: the inputs that remain (int64), None if all do.

        If some leave, `DecodeStep.compact` handles the keys and values.
        """
        if batch_index is None:
            self.kv.reorder(order)
        elif self.mask is not None:
            self.mask = self.mask.index_select(0, batch_index)
        for module in self.plan.stateful:
            module.reorder_incremental_state(self, order)
        if self._repeating_encoder is not None:
            self.encoder_out = self._repeating_encoder.reorder_encoder_out(self.encoder_out, order)


class FairseqDecodeStep(DecodeStep):
    """Runs all models of a generator; the rows of a sentence are adjacent.

    may_capture: only with one model. mask: of the source in captured steps, `[inputs, 1, 1, source_length]`; None if
    nothing is hidden. After an error of fastgen nothing is rolled back here: fairseq creates new states, and `generate`
    restores random numbers.
    """

    host = "fairseq"

    def __init__(self, checks: CallChecks, states: list[DecodingState], may_capture: bool) -> None:
        max_length = checks.max_len + 2  # with the first token and the end
        super().__init__(checks, states[0].kv.rows, states[0].rows_per_input, max_length, may_capture)
        self.generator, self.states = checks.generator, states
        self.mask: Tensor | None = None

    def log_probs(self, tokens: Tensor) -> Outputs:
        """Returns the models' outputs for the token after tokens `[rows, length]`; the loop may overwrite them."""
        if self.runs_user_code:
            self._find_changes()
        old_cache = self.mode.cache  # if steps become static now, the outputs are still those of an eager one
        log_probs, weights = self.run(tokens)
        if old_cache is None or (cache := self.mode.cache) is None:
            return log_probs, weights
        return log_probs.clone(), None if weights is None else weights[:, cache.padding :]

    def inputs(self, tokens: Tensor, graph: CapturedGraph | None, size: int = 1) -> dict[str, Any]:
        temperature = self.generator.temperature
        if graph is None:
            models = {"ensemble": self.generator.model, "states": self.states}
            return {"tokens": tokens, "temperature": temperature, **models}
        cache = graph.cache
        position = torch.full((1, 1), tokens.shape[1], device=tokens.device)
        # Without a source, the prompt is padded, and the cache's own mask hides the padding.
        mask = None if self.mask is None else functional.pad(self.mask, (cache.padding, 0))
        masks = {"self_mask": cache.mask(), "mask": mask}
        return {"tokens": tokens[:, -1:], "position": position, "temperature": temperature, **masks}

    @staticmethod
    def forward(model: Any, inputs: dict[str, Any], view: DecodingState | None) -> Outputs:
        if view is None:
            ensemble, states = inputs["ensemble"], inputs["states"]
        else:
            ensemble = EnsembleModel([model])
            states = [view]
            view.position, view.self_mask, view.mask = inputs["position"], inputs["self_mask"], inputs["mask"]
        encoder_outs = [state.encoder_out for state in states]
        return ensemble.forward_decoder(inputs["tokens"], encoder_outs, states, inputs["temperature"])

    @staticmethod
    def logits_of(outputs: Outputs) -> Tensor:
        return outputs[0]

    def content(self, left: int) -> tuple[KVContent, Hashable]:
        state = self.states[0]
        content = state.kv.content()
        crosses = state.plan.cross_attention
        pair = state.prompt(crosses[0]) if crosses else None
        self.mask = state.mask
        length = 0 if pair is None else pair[0].shape[2]
        if self.mask is None and rounded(length) > length:  # without a mask, but with padding
            inputs = self.rows // self.rows_per_input
            device = content.generated[0][0].device
            self.mask = torch.ones((inputs, 1, 1, length), dtype=torch.bool, device=device)
        return content, (self.generator.temperature, self.mask is not None)

    def view_of(self, static: StaticKVCache) -> DecodingState:
        return self.states[0].over(static)

    def use(self, static: StaticKVCache) -> None:
        self.states[0].kv = static

    def leave(self, static: StaticKVCache) -> None:
        self.states[0].kv = KVCache.of(static.content(), self.states[0].limit)

    @cached_property
    def runs_user_code(self) -> bool:
        generator = self.generator
        if is_user_code([generator, generator.search, generator.repeat_ngram_blocker], KNOWN.packages):
            return True
        if generator.lm_model is None:
            return False
        facts = self.call.facts_of(generator.lm_model, KNOWN)
        return bool(facts.hooks or facts.user_code)

    def _find_changes(self) -> None:
        """Ends captured steps if user code has changed a model; modules that it has added may store states."""
        for model, state in zip(self.generator.model.models, self.states):
            if self.call.change_of(model, between_steps=True) is not None:
                if self.captures is not None:
                    self.leave_captures()
                state.plan.watched = True
                state.plan.find_stateful(model.decoder)

    def reorder(self, order: Tensor, batch_index: Tensor | None = None) -> None:
        """Overwrites row i with row `order[i]`; batch_index: the sentences that remain (int64), None if all do."""
        for state in self.states:
            state.reorder(order, batch_index)
        if batch_index is not None:
            self.mask = None if self.mask is None else self.mask.index_select(0, batch_index)
            self.compact(batch_index, order)

    def compact_cache(self, batch_index: Tensor, rows: Tensor) -> None:
        for state in self.states:
            state.kv.compact(batch_index, rows)
