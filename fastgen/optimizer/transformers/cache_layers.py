"""The layers that fastgen puts into a transformers `DynamicCache` after a prefill with one row per input.

A layer is what the decoding loop and the models know, a `DynamicLayer`; its keys and values are a `SharedKeyValues`.
After `generate`, `restore` puts plain `DynamicLayer`s back, so that a returned cache is what the library returns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from fastgen.optimizer.decoding.kv_cache import SharedKeyValues, sharing_pays, writing_in_place_pays


class SharedLayer(DynamicLayer):
    """A `DynamicLayer` of `inputs * fan_out` rows whose first part is stored once per input.

    Reading `keys` or `values` gives tensors of the full shape `[rows, kv_heads, length, head_dim]`. Methods of
    `DynamicLayer` that are not overridden here read and assign them; an assignment makes the layer a plain one.
    """

    def __init__(self, layer: DynamicLayer, states: SharedKeyValues) -> None:
        self._states: SharedKeyValues | None = None
        super().__init__()
        self._states = states
        self.dtype, self.device = layer.keys.dtype, layer.keys.device
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:
        return self._plain_keys if self._states is None else self._states.states()[0]

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._become_plain()
        self._plain_keys = keys

    @property
    def values(self) -> Tensor | None:
        return self._plain_values if self._states is None else self._states.states()[1]

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._become_plain()
        self._plain_values = values

    def _become_plain(self) -> None:
        if self._states is not None:
            self._plain_keys, self._plain_values = self._states.whole()
            self._states = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self._states is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self._states.append(key_states, value_states)
        return self._states.states()

    def get_seq_length(self, *args, **kwargs) -> int:
        return super().get_seq_length(*args, **kwargs) if self._states is None else self._states.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._states is not None and not self._states.keeps_groups(beam_idx):
            self._become_plain()  # a decoding method of the caller, which moves rows from input to input
        if self._states is None:
            super().reorder_cache(beam_idx)
        else:
            self._states.reorder(beam_idx.to(self.device))

    def plain(self) -> DynamicLayer:
        """A `DynamicLayer` with the same content."""
        layer = DynamicLayer()
        self._become_plain()
        layer.lazy_initialization(self._plain_keys, self._plain_values)
        layer.keys, layer.values = self._plain_keys, self._plain_values
        return layer


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
        if any(type(layer).__module__ != DynamicLayer.__module__ for layer in part.layers):
            names = sorted({type(layer).__name__ for layer in part.layers})
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

    def repeated_descriptions(self) -> list[str]:
        repeated = [f"{number} {name} repeated for each row" for name, number in sorted(self.others.items())]
        if self.short:
            repeated.append(f"keys and values repeated for each row, too few to gain, {self.short} layers")
        return repeated


def share(cache: Cache, inputs: int, fan_out: int, limit: int) -> Sharing:
    """Makes a cache of `inputs` rows one of `inputs * fan_out` rows, in which what is equal is kept once.

    Layers other than `DynamicLayer` (sliding window, linear attention, …) are repeated row by row, as the library would
    have filled them. limit: the number of positions that can be added to each row.
    """
    sharing = Sharing()
    for part, is_cross in zip(parts(cache), (False, True)):
        for index, layer in enumerate(part.layers):
            if type(layer) is not DynamicLayer:
                rows = torch.arange(inputs, device=getattr(layer, "device", None))
                layer.reorder_cache(rows.repeat_interleave(fan_out))
                sharing.others[type(layer).__name__] += 1
            elif layer.is_initialized and layer.keys.numel():
                keep = sharing_pays(layer.keys, fan_out, is_cross)
                limit_of_rows = 0 if is_cross else limit
                if not keep and not writing_in_place_pays(layer.keys, fan_out, limit_of_rows):
                    layer.batch_repeat_interleave(fan_out)
                    sharing.short += 1
                    continue
                usage: Counter[str] = Counter()
                states = SharedKeyValues(layer.keys, layer.values, fan_out, limit_of_rows, keep, usage)
                part.layers[index] = SharedLayer(layer, states)
                sharing.usages.append(usage)
                sharing.cross += keep and is_cross
                sharing.prompt += keep and not is_cross
                sharing.short += not keep
    return sharing


def restore(cache: Cache) -> None:
    """Puts plain layers in the place of those that `share` has put in."""
    for part in parts(cache):
        for index, layer in enumerate(part.layers):
            if isinstance(layer, SharedLayer):
                part.layers[index] = layer.plain()


def parts(cache: object) -> list[Cache]:
    """The self-attention cache, and the cross-attention cache where there is one."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _is_filled(cache: object) -> bool:
    try:
        return cache.get_seq_length() > 0
    except ValueError:  # only linear attention layers, which have no length
        return cache.has_previous_state()
