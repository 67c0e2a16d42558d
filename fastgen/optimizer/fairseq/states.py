"""What one model remembers while fastgen generates: the incremental state that fairseq hands from module to module.

To modules that fastgen does not know it is the dictionary that they expect. The attention of a standard Transformer
decoder finds a `KVCache` here instead: its generated keys written in place (FastSeq §2.2), those of the encoder's
output once per input (FastSeq §4.1.2).

Tests: tests/optimizer/fairseq/test_fairseq_caches.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from fairseq.modules.multihead_attention import MultiheadAttention
from torch import Tensor

from fastgen.optimizer.decoding.call import costs
from fastgen.optimizer.decoding.kv_cache import KV, KVCache
from fastgen.optimizer.fairseq.plan import ModelPlan
from fastgen.patching import SwitchedOff


class DecodingState(dict):
    """The incremental state of one model for `inputs * rows_per_input` rows, with the layers that its plan asks for.

    limit: the number of positions that a row can reach. layers: the number of each attention in `kv`. mask: of the
    cross-attention, `[inputs, 1, 1, source_length]`; None if everything may be attended to.

    In a captured step, beside these: own_mask, what self-attention may attend to. position: how many tokens each row
    has, with the one that is fed, int64 `[1, 1]`. encoded: what stands for the encoder's output, of which the layers
    have what they need.
    """

    own_mask: Tensor | None = None
    position: Tensor | None = None
    mask: Tensor | None = None
    encoded: Any = None

    def __init__(self, plan: ModelPlan, inputs: int, rows_per_input: int, limit: int) -> None:
        super().__init__()
        self.plan, self.rows_per_input, self.limit = plan, rows_per_input, limit
        self.kv = KVCache(inputs, rows_per_input)
        self.layers: dict[MultiheadAttention, int] = {}
        self._padding: Tensor | None = None
        for attentions in _by_shape(plan.self_attention):
            self.layers |= zip(attentions, self.kv.add_layers([()] * len(attentions), limit))
        self._own = set(self.layers)
        crosses = plan.cross_attention
        self.layers |= zip(crosses, self.kv.add_layers([()] * len(crosses), None))
        self._keys = {attention._get_full_incremental_state_key("attn_state") for attention in self.layers}

    def over(self, static: KVCache) -> DecodingState:
        """The state of a captured step, whose keys and values are in this static cache."""
        state = DecodingState(self.plan, static.rows // static.rows_per_input, self.rows_per_input, static.capacity)
        state.kv = static
        state.encoded = {"encoder_out": [torch.empty(0, device=static.tensors[0].device)], "encoder_padding_mask": []}
        return state

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._keys:
            raise SwitchedOff("fastgen was switched off while it generated, so that fairseq misses its caches")
        super().__setitem__(key, value)

    def has_self(self, attention: MultiheadAttention) -> bool:
        return attention in self._own

    def has_cross(self, attention: MultiheadAttention) -> bool:
        return attention in self.layers and attention not in self._own

    def append(self, attention: MultiheadAttention, keys: Tensor, values: Tensor) -> KV:
        """Adds what each row has computed, `[rows, heads, length, head_dim]`; returns all keys and values of it."""
        layer = self.layers[attention]
        self.kv.append(layer, keys, values)
        return self.kv.read(layer)

    def prompt(self, attention: MultiheadAttention) -> KV | None:
        """What is stored once per input, `[inputs, heads, length, head_dim]`; None if nothing is as yet.

        Of a self-attention those of the prompt, of a cross-attention those of the encoder's output.
        """
        return next(iter(self.kv.prompts[self.layers[attention]]), None)

    def set_prompt(self, attention: MultiheadAttention, keys: Tensor, values: Tensor) -> KV:
        """Takes keys and values `[inputs, heads, length, head_dim]`, see `prompt`."""
        pair = keys.contiguous(), values.contiguous()
        self.kv.prompts[self.layers[attention]] = (pair,)
        return pair

    @property
    def is_filled(self) -> bool:
        return all(self.prompt(attention) is not None for attention in self._own)

    def forget_prompt(self) -> None:
        for attention in self._own:
            self.kv.prompts[self.layers[attention]] = ()

    def start_rows(self) -> None:
        """Gives the prompt to all rows; where it is too short for sharing to pay, it becomes the rows' own."""
        for attention in self.plan.self_attention:
            if not costs().should_share(self.prompt(attention)[0], self.rows_per_input):
                self.kv.repeat_prompt(self.layers[attention])

    @property
    def source_length(self) -> int:
        """Of the encoder's output; 0 without one."""
        pair = self.prompt(self.plan.cross_attention[0]) if self.plan.cross_attention else None
        return 0 if pair is None else pair[0].shape[2]

    def mask_sync(self, padding: Tensor | None, inputs: int) -> Tensor | None:
        """Which positions of the source may be attended to, `[inputs, 1, 1, source_length]`; None if all.

        padding: `[inputs, source_length]` or the same for each row, nonzero where there is nothing. All layers give
        the same tensor, which is read once: attention is faster without a mask than with one that hides nothing.
        """
        if padding is not self._padding:
            by_input = padding[:: padding.shape[0] // inputs].bool()
            self._padding, self.mask = padding, ~by_input[:, None, None, :] if by_input.any() else None
        return self.mask

    def reorder(self, order: Tensor, kept: Tensor | None) -> None:
        """Row i becomes what row `order[i]` was; `kept` are the inputs that remain (int64), None if all do."""
        if kept is None:
            self.kv.reorder(order)
        elif not self.kv.is_static:  # otherwise another takes its place, see `DecodeStep.compact`
            self.kv.compact(kept, order)
        if kept is not None and self.mask is not None:
            self.mask = self.mask.index_select(0, kept)
        for module in self.plan.others:
            module.reorder_incremental_state(self, order)


# The state that takes the keys of a forward without one; of this thread, and only while that forward runs.
_filling: ContextVar[DecodingState | None] = ContextVar("fastgen_filling", default=None)


@contextmanager
def filling(state: DecodingState) -> Iterator[None]:
    """A forward of the decoder over whole prompts inside this context leaves its keys and values in `state`."""
    token = _filling.set(state)
    try:
        yield
    finally:
        _filling.reset(token)


def being_filled() -> DecodingState | None:
    return _filling.get()


def _by_shape(attentions: list[MultiheadAttention]) -> list[list[MultiheadAttention]]:
    """Pruned heads make layers of different shapes, which cannot lie in one buffer."""
    alike: dict[tuple[int, int], list[MultiheadAttention]] = {}
    for attention in attentions:
        alike.setdefault((attention.num_heads, attention.head_dim), []).append(attention)
    return list(alike.values())
