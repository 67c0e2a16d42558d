"""A transformers cache of which the keys stay where they are: what a recorded step works on.

The layers follow the library's `StaticLayer`: the length is a tensor, and masks are made for the whole capacity. From
`is_compileable` the library knows that it has to make them before the step.
"""

from __future__ import annotations

import copy

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from fastgen.optimizer.decoding.decoding_cache import KeysAndValues
from fastgen.optimizer.decoding.static_cache import Content, StaticCache
from fastgen.optimizer.transformers.cache_layers import SHARED, SharedLayer, parts

_KINDS = (*SHARED.keys(), *SHARED.values())
_SUPPORTED = ", ".join(kind.__name__ for kind in SHARED)


class FixedLayer(DynamicLayer):
    """Layer `index` of `states` in the place of `layer`, one of those that `contents_or_reasons` allows.

    A sliding window, in which everything still fits, makes a difference for masks only, which the model's own are.
    """

    is_compileable = True

    def __init__(self, layer: DynamicLayer, states: StaticCache, index: int) -> None:
        own = ("keys", "values", "_states", "_own_code")
        self.__dict__ |= {name: value for name, value in vars(layer).items() if name not in own}
        self._fixed, self._index = states, index
        is_sliding = isinstance(layer, DynamicSlidingWindowLayer)
        self._plain = getattr(layer, "_plain", DynamicSlidingWindowLayer if is_sliding else DynamicLayer)

    @property
    def keys(self) -> Tensor:
        return self._fixed.states(self._index)[0]

    @property
    def values(self) -> Tensor:
        return self._fixed.states(self._index)[1]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> KeysAndValues:
        self._fixed.append(self._index, key_states, value_states)
        return self._fixed.states(self._index)

    def get_seq_length(self, *args, **kwargs) -> Tensor:
        return self._fixed.seq_lengths[self._index]

    def get_mask_sizes(self, *args, **kwargs) -> tuple[int, int]:
        return self._fixed.shared_length + self._fixed.limit, 0

    def plain(self) -> DynamicLayer:
        """The library's layer with the positions that are there, in memory of its own."""
        layer = self._plain.__new__(self._plain)
        own = ("_fixed", "_index", "_plain")
        layer.__dict__ |= {name: value for name, value in vars(self).items() if name not in own}
        layer.keys, layer.values = self._fixed.whole(self._index)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = layer.keys.shape[2]
        return layer


def layer_reasons(cache: Cache, most: int) -> list[str]:
    """Why layers of these classes cannot be kept in fixed places for `most` positions; empty if they can."""
    for layer in parts(cache)[0].layers:  # of the cross-attention, none slides
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window <= most:
            return [f"a sliding window of {layer.sliding_window} for up to {most} positions"]
    names = {type(layer).__name__ for part in parts(cache) for layer in part.layers if type(layer) not in _KINDS}
    return [f"a cache with layers of {', '.join(sorted(names))} (supported: {_SUPPORTED})"] if names else []


def contents_or_reasons(cache: Cache, most: int) -> tuple[list[Content], list[str]]:
    """What each part of the cache holds, as views; and why it cannot be kept in fixed places, empty if it can.

    most: how many positions there can be.
    """
    contents, reasons = [], layer_reasons(cache, most)
    if reasons:
        return [], reasons
    for part, is_cross in zip(parts(cache), (False, True)):
        if not part.layers or not all(layer.is_initialized for layer in part.layers):
            return [], ["a layer of the cache is empty"]
        if any(isinstance(layer, SharedLayer) and layer._states.was_read_whole for layer in part.layers):
            return [], ["the model reads its keys in one piece"]
        contents.append(_content_of(part, is_cross))
        if not contents[-1].is_alike():
            return [], ["the layers of the cache differ in shape, type or device"]
    return contents, []


def _content_of(part: Cache, is_cross: bool) -> Content:
    shared, own, fan_out, fixed = [], [], 1, 0
    for layer in part.layers:
        if isinstance(layer, SharedLayer):
            states = layer._states
            fan_out, fixed = states.cache.fan_out, states.cache.fixed
            if states.shared is not None:
                shared.append(states.shared)
            if states.cache.lengths[states.layer]:
                own.append(states.cache.own(states.layer))
        else:
            own.append((layer.keys, layer.values))
    if is_cross and own:  # kept for each row, and nothing is added to it
        return Content(own, [])
    return Content(shared, own, fan_out, fixed)


def with_fixed_layers(cache: Cache, states: list[StaticCache]) -> Cache:
    """A cache like this one whose parts are kept in `states`."""
    fixed = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        fixed.is_updated = dict(cache.is_updated)
        fixed.self_attention_cache = copy.copy(cache.self_attention_cache)
        fixed.cross_attention_cache = copy.copy(cache.cross_attention_cache)
    for part, one in zip(parts(fixed), states):
        part.layers = [FixedLayer(layer, one, index) for index, layer in enumerate(part.layers)]
    return fixed


def take_over(cache: Cache, fixed: Cache) -> None:
    """Gives a cache the layers of one that `with_fixed_layers` has made, and so lets go of its own memory."""
    for part, other in zip(parts(cache), parts(fixed)):
        part.layers = list(other.layers)


def make_plain(cache: Cache) -> None:
    """The opposite: gives it layers of the library's own with the same content."""
    for part in parts(cache):
        part.layers = [layer.plain() if isinstance(layer, FixedLayer) else layer for layer in part.layers]
