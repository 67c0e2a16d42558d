"""The layers that fastgen puts into a transformers `DynamicCache` after a prefill with one row per input.

A layer is what the decoding loop and the models know, a `DynamicLayer` or `DynamicSlidingWindowLayer`; its keys and
values are a `LayerStates`. It becomes a plain layer of the library, with everything that the library does to those,
as soon as somebody asks for what two parts or the rows' buffer cannot give; and after `generate`, so that a returned
cache is what the library returns.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from fastgen.optimizer.decoding.decoding_cache import DecodingCache
from fastgen.optimizer.decoding.gain import sharing_pays, writing_in_place_pays
from fastgen.optimizer.decoding.layer_states import LayerStates
from fastgen.optimizer.decoding.reasons import Reason

# Under which of these a model has its cache.
NAMES = ("past_key_values", "cache_params")


class SharedLayer(DynamicLayer):
    """A `DynamicLayer` of `inputs * fan_out` rows whose first part is stored once per input.

    Reading `keys` or `values` gives tensors of the full shape `[rows, kv_heads, length, head_dim]`. Methods of
    `DynamicLayer` that are not overridden here read and assign them; an assignment makes the layer a plain one.
    own_code: the attention is not the library's, and may expect of its keys all that holds for those of a plain layer.
    """

    plain: type[DynamicLayer] = DynamicLayer

    def __init__(self, layer: DynamicLayer, states: LayerStates, own_code: bool) -> None:
        self.__dict__ |= {name: value for name, value in vars(layer).items() if name not in ("keys", "values")}
        self._states, self._own_code = states, own_code

    @property
    def keys(self) -> Tensor:
        return self._read("keys", 0)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self.become_plain()
        self.keys = keys

    @property
    def values(self) -> Tensor:
        return self._read("values", 1)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self.become_plain()
        self.values = values

    def _read(self, name: str, index: int) -> Tensor:
        if not self._plain_is_due():
            states = self._states.states()[index]
            if states.is_contiguous():  # not so those in a buffer with room for more, which the library has not
                return states
        self.become_plain()
        return getattr(self, name)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._plain_is_due():
            self.become_plain()
            return self.update(key_states, value_states, *args, **kwargs)
        self._states.append(key_states, value_states)
        return self._states.states()

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self._states.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        # A decoding method of the caller may move rows from input to input.
        if self._plain_is_due() or not self._states.keeps_groups(beam_idx):
            self.become_plain()
            self.reorder_cache(beam_idx)
        else:
            self._states.reorder(beam_idx)

    def take_back(self) -> DecodingCache:
        """Takes back what `update` has returned, for the rows of this cache to be moved."""
        self._states.take_back()
        return self._states.cache

    def _plain_is_due(self) -> bool:
        return self._own_code and self._states.was_read_whole

    def become_plain(self) -> None:
        """Makes this layer the library's with the same content, in the memory of what was read of it whole."""
        keys, values = self._states.whole()
        del self._states, self._own_code
        self.__class__ = self.plain
        self.keys, self.values = keys, values

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is copied or pickled is a plain layer."""
        self.become_plain()
        return self.__reduce_ex__(protocol)


class SharedSlidingLayer(SharedLayer, DynamicSlidingWindowLayer):
    """A `DynamicSlidingWindowLayer`: positions that no row sees any more are dropped for all rows at once."""

    plain = DynamicSlidingWindowLayer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        unseen = self._states.length - (self.sliding_window - 1)
        if self._plain_is_due() or (unseen > 0 and not self._states.drop(unseen)):
            self.become_plain()
            return self.update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.cumulative_length

    def _read(self, name: str, index: int) -> Tensor:
        self.become_plain()  # the library keeps one position less than the last update has returned
        return getattr(self, name)

    def become_plain(self) -> None:
        super().become_plain()
        self.keys = self.keys[:, :, 1 - self.sliding_window :]
        self.values = self.values[:, :, 1 - self.sliding_window :]


SHARED = {DynamicLayer: SharedLayer, DynamicSlidingWindowLayer: SharedSlidingLayer}


def unsupported_reasons(cache: object) -> list[str]:
    """Why the rows of this cache could not be expanded after a prefill that fills it; empty if they can."""
    reasons = unsupported_types(cache)
    if not reasons and parts(cache)[0].layers and _is_filled(cache):
        reasons.append("past_key_values was given with a content")
    return reasons


def unsupported_types(cache: object) -> list[str]:
    """Why a cache of these classes cannot be given more rows; empty if it can."""
    for part in parts(cache):
        if type(part) is not DynamicCache:
            return [f"past_key_values is a {type(part).__name__} (supported: DynamicCache, EncoderDecoderCache of two)"]
        if getattr(part, "offloading", False):
            return ["past_key_values is offloaded to the CPU"]
        foreign = [layer for layer in part.layers if type(layer).__module__ not in (DynamicLayer.__module__, __name__)]
        if foreign:
            names = sorted({type(layer).__name__ for layer in foreign})
            return [f"past_key_values has layers that a model defines for itself ({', '.join(names)})"]
    return []


@dataclass
class Sharing:
    """What `share` did: numbers of layers, and the counters of the operations on their states."""

    cross: int = 0
    prompt: int = 0
    short: int = 0
    others: Counter[str] = field(default_factory=Counter)
    usages: list[Counter[str]] = field(default_factory=list)

    def shared_descriptions(self) -> list[str]:
        shared = []
        if self.cross:
            shared.append(f"cross-attention keys and values: once per input, {self.cross} layers")
        if self.prompt:
            shared.append(f"the prompt's keys and values: once per input, {self.prompt} layers")
        return shared

    def repeated_reasons(self) -> list[Reason]:
        """Why layers hold what equal rows have in common for each row."""
        others = sorted(self.others.items())
        repeated = [Reason("LAYER_TYPE", f"{number} layers of {name} stored for each row") for name, number in others]
        if self.short:
            text = f"{self.short} layers stored for each row: too few keys to gain"
            repeated.append(Reason("FEW_KEYS", text))
        return repeated


def share(
    cache: Cache, inputs: int, fan_out: int, limit: int, own_code: bool = False, keep: bool | None = None
) -> Sharing:
    """Makes a cache of `inputs` rows one of `inputs * fan_out` rows, in which what is equal is kept once.

    Layers of other classes (linear attention, …) are repeated row by row, as the library would have filled them. limit:
    the number of positions that can be added to each row. own_code: code that is not the library's works with the
    cache; layers that keep nothing once are left plain. keep: keep what is equal once (True), or never (False), instead
    of where it pays.
    """
    sharing = Sharing()
    keep = False if fan_out == 1 else keep
    for part, is_cross in zip(parts(cache), (False, True)):
        alike: dict[tuple, list[int]] = {}
        for index, layer in enumerate(part.layers):
            if not _can_share(layer):
                _take(layer, torch.arange(inputs).repeat_interleave(fan_out))
                sharing.others[type(layer).__name__] += 1
            elif layer.is_initialized and layer.keys.numel():
                kept = sharing_pays(layer.keys, fan_out, is_cross) if keep is None else keep
                sharing.cross += kept and is_cross
                sharing.prompt += kept and not is_cross
                sharing.short += not kept and keep is None
                written = type(layer) is DynamicLayer and writing_in_place_pays(layer.keys, fan_out, limit)
                if not kept and (own_code or not written):
                    layer.batch_repeat_interleave(fan_out)
                    continue
                kind = (kept, layer.keys.shape, layer.values.shape, layer.keys.dtype, layer.keys.device)
                alike.setdefault(kind, []).append(index)
        for (kept, *_), indices in alike.items():
            limit_of_rows = 0 if is_cross else limit
            sharing.usages += _put_in(part.layers, indices, kept, inputs, fan_out, limit_of_rows, own_code)
    return sharing


def repeat(cache: Cache, rows: Tensor) -> None:
    """Row i becomes what row `rows[i]` (int64) was; there may be more than before."""
    for part in parts(cache):
        for layer in part.layers:
            _take(layer, rows)


def _take(layer: Any, rows: Tensor) -> None:
    device = getattr(layer, "device", None)
    layer.reorder_cache(rows if device is None else rows.to(device))


def _put_in(
    layers: list[Any], indices: list[int], kept: bool, inputs: int, fan_out: int, limit: int, own_code: bool
) -> list[Counter[str]]:
    """Puts shared layers in the place of these layers, all of one kind; returns what counts the use of their states."""
    group = torch.arange(inputs, device="cpu").repeat_interleave(fan_out)
    states = DecodingCache(len(indices), fan_out, limit if kept else limit + layers[indices[0]].keys.shape[2])
    usages: list[Counter[str]] = []
    for place, index in enumerate(indices):
        layer = layers[index]
        prompt = (layer.keys, layer.values)
        if own_code:  # which may have kept what it saw, and write into it
            prompt = tuple(part.clone() for part in prompt)
        states.shared[place] = tuple(part.contiguous() for part in prompt)
        if not kept:
            states.repeat_shared(place)
        usages.append(Counter())
        layers[index] = SHARED[type(layer)](layer, LayerStates(states, place, group, usages[-1]), own_code)
    return usages


def _can_share(layer: Any) -> bool:
    """Not where the library keeps what a sliding window has left behind, to go back to it."""
    return type(layer) in SHARED and not getattr(layer, "record_past", False)


def cache_of(arguments: dict[str, Any]) -> Cache | None:
    """The cache among the arguments or outputs of a forward."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def undo_of(cache: Cache) -> Callable[[], None]:
    """A function that makes this cache, which `unsupported_types` allows and which is empty, again what it is now."""
    before = [(part, [_copied(layer) for layer in part.layers]) for part in parts(cache)]
    is_updated = dict(getattr(cache, "is_updated", {}))

    def undo() -> None:
        for part, layers in before:
            part.layers = layers
        if isinstance(cache, EncoderDecoderCache):
            cache.is_updated = is_updated

    return undo


def _copied(layer: Any) -> Any:
    """A copy that shares no list or dictionary with the layer."""
    copied = copy.copy(layer)
    containers = {name: copy.copy(value) for name, value in vars(layer).items() if isinstance(value, (dict, list))}
    vars(copied).update(containers)
    return copied


def reorder(cache: Cache, beam_idx: Tensor) -> None:
    """As `cache.reorder_cache`, for rows that stay with their inputs: one move for all layers that are alike."""
    if beam_idx.device.type == "cpu" and torch.equal(beam_idx, torch.arange(beam_idx.shape[0])):
        return
    for states in _decoding_caches(cache, beam_idx):
        states.reorder(beam_idx)


def keep_inputs(cache: Cache, places: Tensor, rows: Tensor) -> None:
    """Drops the inputs that are not at `places` (int64) among those of the cache; `rows` are theirs."""
    for states in _decoding_caches(cache, rows):
        states.keep(places, rows)


def _decoding_caches(cache: Cache, rows: Tensor) -> list[DecodingCache]:
    """The caches behind the shared layers; the rows of the other layers are moved here."""
    found = {}
    for part in parts(cache):
        for layer in part.layers:
            if isinstance(layer, SharedLayer):
                states = layer.take_back()
                found[id(states)] = states
            else:
                layer.reorder_cache(rows)
    return list(found.values())


def restore(cache: Cache) -> None:
    """Makes plain the layers that `share` has put in."""
    for part in parts(cache):
        for layer in part.layers:
            if isinstance(layer, SharedLayer):
                layer.become_plain()


def parts(cache: object) -> list[Cache]:
    """The self-attention cache, and the cross-attention cache where there is one."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _is_filled(cache: Any) -> bool:
    try:
        return cache.get_seq_length() > 0
    except ValueError:  # only linear attention layers, which have no length
        return cache.has_previous_state()
