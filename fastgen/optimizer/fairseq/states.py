"""What one model remembers while fastgen generates: the incremental state that fairseq hands from module to module.

To modules that fastgen does not know it is the dictionary that they expect. The attention of a standard Transformer
decoder finds its caches here instead: its own keys written in place (FastSeq §2.2), those of the encoder's output once
per input (FastSeq §4.1.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fairseq.modules.multihead_attention import MultiheadAttention
from torch import Tensor

from fastgen.optimizer.decoding.decoding_cache import DecodingCache, KeysAndValues
from fastgen.optimizer.decoding.gain import sharing_pays
from fastgen.optimizer.decoding.static_cache import Content, StaticCache
from fastgen.optimizer.fairseq.plan import ModelPlan
from fastgen.patching import SwitchedOff


class DecodingState(dict):
    """The incremental state of one model for `inputs * fan_out` rows, with the caches that its plan asks for.

    limit: the number of positions that a row can reach. own_mask: what a step may attend to in self-attention; None if
    all that there is. mask: in cross-attention, `[inputs, 1, 1, source_length]`; None if all.
    """

    own_mask: Tensor | None = None

    def __init__(self, plan: ModelPlan, fan_out: int, limit: int) -> None:
        super().__init__()
        self.plan, self.fan_out, self.limit = plan, fan_out, limit
        self._caches: list[DecodingCache] = []
        self._slots: dict[MultiheadAttention, tuple[DecodingCache, int]] = {}
        self._crosses: dict[MultiheadAttention, KeysAndValues | None] = dict.fromkeys(plan.cross_attention)
        self._padding: Tensor | None = None
        self.mask: Tensor | None = None
        for attentions in _by_shape(plan.self_attention):
            cache = DecodingCache(len(attentions), fan_out, limit)
            self._caches.append(cache)
            self._slots |= {attention: (cache, layer) for layer, attention in enumerate(attentions)}
        self._keys = {
            attention._get_full_incremental_state_key("attn_state") for attention in (*self._slots, *self._crosses)
        }

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._keys:
            raise SwitchedOff("fastgen was switched off while it generated, so that fairseq misses its caches")
        super().__setitem__(key, value)

    def has_self(self, attention: MultiheadAttention) -> bool:
        return attention in self._slots

    def has_cross(self, attention: MultiheadAttention) -> bool:
        return attention in self._crosses

    def append(self, attention: MultiheadAttention, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds what each row has computed, `[rows, heads, length, head_dim]`; returns what it attends to of its own."""
        cache, layer = self._slots[attention]
        cache.append(layer, keys, values)
        return cache.attended(layer)

    def prompt(self, attention: MultiheadAttention) -> tuple[Tensor, Tensor] | None:
        """Keys and values before the rows' own, `[inputs, heads, length, head_dim]`; None if there are none."""
        cache, layer = self._slots[attention]
        return cache.shared[layer]

    def set_prompt(self, attention: MultiheadAttention, keys: Tensor, values: Tensor) -> None:
        """Takes keys and values of a prompt, `[inputs, heads, length, head_dim]`."""
        cache, layer = self._slots[attention]
        cache.shared[layer] = (keys.contiguous(), values.contiguous())

    @property
    def is_filled(self) -> bool:
        return all(shared is not None for cache in self._caches for shared in cache.shared)

    def forget_prompt(self) -> None:
        for cache in self._caches:
            cache.shared = [None] * len(cache.shared)

    def start_rows(self) -> None:
        """Gives the prompt to all rows; where it is too short for sharing to pay, it becomes the rows' own."""
        for cache, layer in self._slots.values():
            if not sharing_pays(cache.shared[layer][0], self.fan_out):
                cache.repeat_shared(layer)

    def cross(self, attention: MultiheadAttention) -> KeysAndValues | None:
        """What was kept of the encoder's output for this layer, None before its first step."""
        return self._crosses[attention]

    def set_cross(self, attention: MultiheadAttention, keys: Tensor, values: Tensor) -> KeysAndValues:
        """Keeps keys and values `[inputs, heads, source_length, head_dim]`."""
        self._crosses[attention] = keys, values
        return keys, values

    @property
    def sources(self) -> tuple[int, int]:
        """How many inputs the encoder's output has, and how long they are; zeros without one."""
        states = next(iter(self._crosses.values()), None)
        return (0, 0) if states is None else (states[0].shape[0], states[0].shape[2])

    def contents_or_reasons(self) -> tuple[list[Content], list[str]]:
        """Keys and values as views: of the self-attention, and of the cross-attention if there is one; or why not."""
        crosses = list(self._crosses.values())
        if len(self._caches) > 1:
            return [], ["the layers of the decoder differ in shape"]
        cache = self._caches[0]
        shared = [states for states in cache.shared if states is not None]
        own = [cache.own(layer) for layer in range(len(cache.lengths))]
        contents = [Content(shared, own, self.fan_out, cache.fixed)]
        if crosses:
            contents.append(Content(crosses, [], self.fan_out))
        if not all(content.is_alike() for content in contents):
            return [], ["the layers of the decoder differ in shape, type or device"]
        return contents, []

    def take(self, contents: list[Content], mask: Tensor | None) -> None:
        """The opposite: goes on with copies of these."""
        cache, self.mask = self._caches[0], mask
        if contents[0].shared:
            cache.shared = [_copied(pair) for pair in contents[0].shared]
        for layer, states in enumerate(contents[0].own):
            cache.append(layer, *states)
        cache.fixed = contents[0].fixed
        if self._crosses:
            self._crosses = dict(zip(self._crosses, map(_copied, contents[1].shared)))

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
        for cache in self._caches:
            if kept is None:
                cache.reorder(order)
            else:
                cache.keep(kept, order)
        if kept is not None:
            self.mask = None if self.mask is None else self.mask.index_select(0, kept)
            for attention, pair in self._crosses.items():
                if pair is not None:
                    self._crosses[attention] = tuple(states.index_select(0, kept) for states in pair)
        for module in self.plan.others:
            module.reorder_incremental_state(self, order)


class StaticState(DecodingState):
    """The state of a decoder whose keys and values lie at fixed addresses; the masks and the position are a step's own.

    position: how many tokens each row has, with the one that is fed, int64 `[1, 1]`. encoded: what stands for the
    encoder's output, of which the layers have what they need.
    """

    def __init__(self, plan: ModelPlan, fan_out: int, states: list[StaticCache]) -> None:
        super().__init__(plan, fan_out, states[0].limit)
        self._caches = [states[0]]
        self._slots = {attention: (states[0], layer) for layer, attention in enumerate(plan.self_attention)}
        if plan.cross_attention:
            self._crosses = dict(zip(self._crosses, states[1].shared))
        self.position: Tensor | None = None
        self.encoded = {"encoder_out": [states[0].buffers[0].new_empty(0)], "encoder_padding_mask": []}


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


def _copied(pair: KeysAndValues) -> KeysAndValues:
    keys, values = pair
    return keys.clone(), values.clone()


def _by_shape(attentions: list[MultiheadAttention]) -> list[list[MultiheadAttention]]:
    """Pruned heads make layers of different shapes, which cannot lie in one buffer."""
    alike: dict[tuple[int, int], list[MultiheadAttention]] = {}
    for attention in attentions:
        alike.setdefault((attention.num_heads, attention.head_dim), []).append(attention)
    return list(alike.values())
