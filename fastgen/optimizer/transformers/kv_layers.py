"""`KVLayer`: a layer of a `KVCache` or of a `StaticKVCache` as transformers sees it.

A cache that the library has filled is adopted once, after a prefill with one row per input (adoption.py) or when a step
is captured, and given back when its steps become eager again, at the latest when the call of `generate` ends: then its
layers are the library's, with the content that the library would have stored. Until then each layer is a subclass of
the layers that decoding loops and models know, `DynamicLayer` or `DynamicSlidingWindowLayer`. It becomes the library's
earlier, in place, if code needs something that segments or a buffer with spare capacity cannot provide. Caches that
cannot be captured and have nothing to share are never touched.

Tests: tests/optimizer/transformers/test_returned_cache.py tests/optimizer/transformers/test_static_prefill.py
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticCache,
)

from fastgen.models.cache_names import CACHE_NAMES
from fastgen.optimizer.decoding import report
from fastgen.optimizer.decoding.call import Restore, Rollback, all_of, undo_of_attributes, undo_of_tensors
from fastgen.optimizer.decoding.kv_cache import KVCache
from fastgen.optimizer.decoding.report import LAYER_EMPTY, NOT_EMPTY, STEPS, LeaveAlone, Reason, check, leave_alone_for
from fastgen.optimizer.decoding.segmented_kv import KV, cut
from fastgen.optimizer.decoding.static_kv_cache import KVContent, StaticKVCache
from fastgen.optimizer.transformers import state_layers
from fastgen.optimizer.transformers.state_layers import HybridLayer


class KVLayer(DynamicLayer):
    """Layer `index` of `kv` in place of `layer`.

    Reading `keys` or `values` gives tensors of the full shape `[rows, kv_heads, length, head_dim]`. Methods of
    `DynamicLayer` that are not overridden here read and assign them; an assignment makes the layer the library's. In a
    `StaticKVCache`, a sliding window drops no further positions: the library's mask hides them. user_code: whether the
    attention is not the library's, and may rely on any property of a plain layer's keys.
    """

    def __init__(self, layer: DynamicLayer, kv: KVCache | StaticKVCache, index: int, user_code: bool = False) -> None:
        self.__dict__ |= vars(layer)
        for name in ("keys", "values"):
            self.__dict__.pop(name, None)
        self.library_class = getattr(layer, "library_class", type(layer))
        self.kv: Any = kv
        self.index, self.user_code = index, user_code
        self.is_compileable = isinstance(kv, StaticKVCache)  # then the library creates masks before the step
        self.is_sliding = issubclass(self.library_class, DynamicSlidingWindowLayer)

    keys: Any = property(
        lambda self: self._read("keys", 0), lambda self, keys: setattr(self.to_dynamic_layer(), "keys", keys)
    )
    values: Any = property(
        lambda self: self._read("values", 1), lambda self, values: setattr(self.to_dynamic_layer(), "values", values)
    )

    def must_be_dynamic(self) -> bool:
        """Whether user code may hold the materialized content, and write into it."""
        return self.user_code and self.kv.was_materialized(self.index)

    def _read(self, name: str, which: int) -> Tensor:
        if not self.must_be_dynamic():
            states = self.kv.read(self.index)[which]
            if states.is_contiguous():  # as the library's are; views of a buffer with spare capacity are not
                return states
        return getattr(self.to_dynamic_layer(), name)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        if self.must_be_dynamic():
            return self.to_dynamic_layer().update(key_states, value_states, *args, **kwargs)
        self.kv.append(self.index, key_states, value_states)
        if self.is_compileable:
            return self.kv.read(self.index, key_states.shape[2])
        return self.kv.read(self.index)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int | Tensor:
        if self.is_compileable and self.index < self.kv.growing:
            return self.kv.seq_lengths[self.index]
        return self.kv.length(self.index)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        if self.is_compileable:
            dropped = self.kv.dropped[self.index] if self.index < self.kv.growing else 0
            return self.kv.prompt_lengths[self.index] + self.kv.capacity, dropped
        return super().get_mask_sizes(*args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        count = -tokens_to_remove
        if count < 0 or self.is_compileable or self.must_be_dynamic() or not self.kv.crop(self.index, count):
            self.to_dynamic_layer().crop(tokens_to_remove)
        elif self.is_sliding:
            self.cumulative_length -= count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        stays = True  # indices on a GPU are trusted, because reading them would wait
        if beam_idx.device.type == "cpu":  # a user's decoding method may move rows between inputs
            inputs = torch.arange(len(beam_idx), dtype=beam_idx.dtype, device="cpu") // self.kv.rows_per_input
            stays = torch.equal(beam_idx // self.kv.rows_per_input, inputs)
        if stays and not self.must_be_dynamic():
            self.kv.reorder(beam_idx, self.index)
        else:
            self.to_dynamic_layer().reorder_cache(beam_idx)

    def to_dynamic_layer(self) -> DynamicLayer:
        """Makes this layer the library's, with the same content, in the memory of materialized parts."""
        keys, values = self.kv.copy(self.index)
        if self.is_sliding:  # it stores one position less than it returns
            if self.is_compileable:
                self.cumulative_length = self.kv.dropped[self.index] + keys.shape[2]
            keys, values = cut((keys, values), 1 - self.sliding_window, None)
        self.__class__ = self.library_class
        del self.kv, self.index, self.user_code, self.library_class, self.is_compileable, self.is_sliding
        self.keys, self.values = keys, values
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Makes copies and pickles layers of the library."""
        return self.to_dynamic_layer().__reduce_ex__(protocol)


class KVSlidingLayer(KVLayer, DynamicSlidingWindowLayer):
    """A `DynamicSlidingWindowLayer`, which drops positions that no row sees any more for all rows together."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        unseen = self.kv.length(self.index) - (self.sliding_window - 1)
        if self.must_be_dynamic() or (unseen > 0 and not self.kv.drop(self.index, unseen)):
            return self.to_dynamic_layer().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int | Tensor:
        return self.cumulative_length

    def _read(self, name: str, which: int) -> Tensor:
        return getattr(self.to_dynamic_layer(), name)  # without the first position that the last update returned


class KVHybridLayer(KVLayer, HybridLayer):
    """A layer with keys, which are in a `KVCache`, and states, which are the layer's own or a `StaticKVCache`'s."""

    is_compileable: Any = False  # in place of a property of newer versions

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if isinstance(self, KVLayer):  # otherwise it is the library's now, which has moved its states
            state_layers.move(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        self.to_dynamic_layer().crop(tokens_to_remove)

    def to_dynamic_layer(self) -> DynamicLayer:
        if self.is_compileable:
            state_layers.own_states(self)
        return super().to_dynamic_layer()


ADOPTED = {DynamicLayer: KVLayer, DynamicSlidingWindowLayer: KVSlidingLayer}
WITH_STATES = {HybridLayer: KVHybridLayer} | ADOPTED  # older versions have no such layers


def turn_into(kind: type[KVLayer], layer: Any, kv: Any, index: int, user_code: bool = False) -> None:
    """Makes this object a layer of `kv`; it stays the same object, because a program may hold it."""
    attributes = vars(kind(layer, kv, index, user_code))
    vars(layer).clear()
    vars(layer).update(attributes)
    layer.__class__ = kind


def is_filled(cache: Any) -> bool:
    """Whether an earlier call has left positions or states in a cache whose rows can be expanded."""
    if cache is None or unsupported_types(cache):
        return False
    lengths = [(part, length_of(part)) for part in parts(cache) if part.layers]
    return any(part.has_previous_state() if length is None else length > 0 for part, length in lengths)


@check(report.PREFILL)
def unsupported_contents(cache: Any, rows: int) -> list[Reason]:
    """Returns why a prefill of fewer rows cannot continue from what is in this cache; empty if it can."""
    if reasons := unsupported_types(cache):
        return reasons
    for layer in layers_of(cache):
        if not is_plain(layer):
            return [Reason("CACHE_NOT_EMPTY", f"{NOT_EMPTY}, and has layers of {type(layer).__name__}")]
        if layer.is_initialized and layer.keys.numel() and {len(layer.keys), len(layer.values)} != {rows}:
            return [Reason("CACHE_NOT_EMPTY", f"{NOT_EMPTY}, and does not have {rows} rows")]
    return []


def rows_are_equal_sync(cache: Cache, firsts: Tensor, group_of_row: Tensor) -> bool:
    """Whether all rows of each group have the keys and values of its first row; see `RowGroups`. Reads the device."""
    for layer in layers_of(cache):
        for states in (layer.keys, layer.values) if layer.is_initialized and layer.keys.numel() else ():
            first_rows = firsts[group_of_row].to(states.device)
            if not torch.equal(states, states.index_select(0, first_rows)):
                return False
    return True


def length_of(cache: Any) -> int | None:
    """Returns the number of positions in the cache; None if all its layers are of linear attention, which have none."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None


@check(report.PREFILL, report.LOOP, report.COMPACTION, report.DRAFTS)
def unsupported_types(cache: object) -> list[Reason]:
    """Returns why a cache of these classes cannot be expanded to more rows; empty if it can."""
    for part in parts(cache):
        if type(part) is not DynamicCache:
            text = f"the cache is a {type(part).__name__} (supported: DynamicCache, EncoderDecoderCache of two)"
            return [Reason("CACHE_TYPE", text)]
        if getattr(part, "offloading", False):
            return [Reason("CACHE_OFFLOADED", "the cache is offloaded to the CPU")]
        kinds = set(map(type, part.layers))
        modules = {DynamicLayer.__module__, KVLayer.__module__}
        if not modules.issuperset(map(attrgetter("__module__"), kinds)):
            foreign = sorted(kind.__name__ for kind in kinds if kind.__module__ not in modules)
            text = f"the cache has layers of the model's own classes ({', '.join(foreign)})"
            return [Reason("CACHE_LAYERS", text)]
    return []


def is_plain(layer: Any, adopted: dict[Any, type[KVLayer]] = ADOPTED) -> bool:
    """Whether a `KVLayer` can do all that this layer does. adopted: the classes of layers that may have one."""
    return type(layer) in adopted and not getattr(layer, "record_past", False)  # used to roll back a window


def give_back(cache_ref: ref[Cache], from_static: bool = False) -> None:
    """Makes the layers of a cache the library's again, if the caller or user code still holds it.

    from_static: whether they may be a `StaticKVCache`'s: then layers without keys get copies of their states.
    """
    cache = cache_ref()
    for layer in () if cache is None else layers_of(cache):
        if isinstance(layer, KVLayer):
            layer.to_dynamic_layer()
        elif from_static:
            state_layers.own_states(layer)


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Overwrites row i with row `rows[i]` (int64); there may be more rows than before."""
    for layer in layers_of(cache):
        select_rows_of(layer.to_dynamic_layer() if isinstance(layer, KVLayer) else layer, rows)


def select_rows_of(layer: Any, rows: Tensor) -> None:
    """Overwrites rows of one layer of the library, as `select_rows` does."""
    device = getattr(layer, "device", None)
    layer.reorder_cache(rows if device is None else rows.to(device))


def reorder(cache: Cache, beam_idx: Tensor) -> None:
    """Reorders rows like `cache.reorder_cache`, but with one move for all layers; rows must stay with their inputs."""
    if beam_idx.device.type == "cpu" and torch.equal(beam_idx, torch.arange(len(beam_idx), device="cpu")):
        return
    _move_librarys_rows(cache, beam_idx)
    for kv in adopted_by(cache):
        kv.reorder(beam_idx)


def compact(cache: Cache, batch_index: Tensor, rows: Tensor) -> None:
    """Drops the inputs that are not at `batch_index`; row i becomes what row `rows[i]` was (int64 both)."""
    _move_librarys_rows(cache, rows)
    for kv in adopted_by(cache):
        kv.compact(batch_index, rows)


def _move_librarys_rows(cache: Cache, rows: Tensor) -> None:
    """Selects these rows in layers that are the library's; a `KVLayer` that user code may have written becomes one."""
    for layer in layers_of(cache):
        if isinstance(layer, KVLayer) and layer.must_be_dynamic():
            layer.to_dynamic_layer()
        if not isinstance(layer, KVLayer):
            layer.reorder_cache(rows)
        elif isinstance(layer, KVHybridLayer):
            state_layers.move(layer, rows)


def adopted_by(cache: Cache) -> list[Any]:
    """Returns each `KVCache` or `StaticKVCache` that holds layers of this cache."""
    return list({id(layer.kv): layer.kv for layer in layers_of(cache) if isinstance(layer, KVLayer)}.values())


def crop(cache: Cache, count: int) -> None:
    """Drops the last `count` positions of self-attention."""
    for layer in parts(cache)[0].layers:
        if layer.get_seq_length() > 0:  # layers that read another one's keys have none
            layer.crop(-count)


def make_contiguous(cache: object) -> None:
    """Copies keys and values that are views of longer ones, because positions were dropped."""
    for layer in layers_of(cache) if isinstance(cache, Cache) else ():
        if type(layer) in ADOPTED and layer.is_initialized:
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()


@check(report.PREFIX, report.STEPS, report.DRAFTS)
def window_reasons(cache: Cache, most: int, positions: str = "positions") -> list[Reason]:
    """Returns why layers with a window do not see `most` positions at once; empty if they do."""
    for layer in parts(cache)[0].layers:  # layers of cross-attention never slide
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window <= most:
            text = f"a sliding window of {layer.sliding_window} for up to {most} {positions}"
            return [Reason("SLIDING_WINDOW", text)]
    return []


@check(report.PREFIX, report.STEPS, report.DRAFTS)
def layer_reasons(cache: Cache, with_states: bool = False) -> list[Reason]:
    """Returns why layers of these classes cannot be static; empty if they can.

    with_states: whether layers may have states, to which a forward of one token can be added, but none taken back.
    """
    layers, classes = (layers_with_keys(cache), WITH_STATES) if with_states else (layers_of(cache), ADOPTED)
    if foreign := {*map(type, layers)} - {*classes, *classes.values()}:
        names = sorted(kind.__name__ for kind in foreign)
        supported = ", ".join(kind.__name__ for kind in ADOPTED)
        return [Reason("CACHE_LAYERS", f"a cache with layers of {', '.join(names)} (supported: {supported})")]
    return []


def static_reasons(cache: Cache, left: int) -> list[Reason]:
    """Returns why the cache cannot be static for `left` more positions; empty if it can.

    A static cache stores them after those that a layer with a window holds, so at most twice its window.
    """
    return layer_reasons(cache, with_states=True) or window_reasons(cache, left, "more positions")


def content_of(cache: Cache, left: int, states: Sequence[Tensor] = ()) -> KVContent:
    """Returns the content of the cache as views. Raises LeaveAlone if it cannot be static for `left` more positions.

    states: those of its layers, see `state_layers.states_of`.
    """
    leave_alone_for(static_reasons(cache, left))
    if not state_layers.are_filled(layers_of(cache), len(states)):
        raise LeaveAlone([LAYER_EMPTY])
    if states and not layers_with_keys(cache):
        return state_layers.content_of(states)
    return replace(_keys_of(cache), states=states)


@check(STEPS)
def _keys_of(cache: Cache) -> KVContent:
    """Returns the keys and values of the cache as views."""
    layers = layers_with_keys(cache)
    growing = sum(not state_layers.is_without_keys(layer) for layer in parts(cache)[0].layers)
    if not growing or not parts(cache)[-1].layers or not all(map(attrgetter("is_initialized"), layers)):
        raise LeaveAlone([LAYER_EMPTY])
    length = int(cache.get_seq_length())
    adopted = {getattr(layer, "kv", None) for layer in layers}
    if adopted == {None}:
        pairs = list(map(attrgetter("keys", "values"), layers))
        if any(keys.shape[2] < length for keys, _ in pairs[:growing]):  # the last forward cannot be repeated
            raise LeaveAlone([Reason("SLIDING_WINDOW", "a window has dropped positions that are stored for each row")])
        prompts = [() if index < growing else (pair,) for index, pair in enumerate(pairs)]
        content: KVContent = KVContent(len(pairs[0][0]), 1, prompts, pairs[:growing])
        content.require_alike()
        return content
    kv = adopted.pop()
    if adopted or kv is None or len(kv.prompts) != len(layers):
        raise LeaveAlone([Reason("LAYERS_DIFFER", "the layers of the cache differ in kind")])
    content = kv.content([layer.index for layer in layers])
    return replace(content, dropped=[length - layer.kv.length(layer.index) for layer in layers[:growing]])


def view_of(cache: Cache, static: StaticKVCache) -> Cache:
    """Returns a cache like this one with the layers of a `StaticKVCache`."""
    view = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        view.is_updated = dict(cache.is_updated)
        view.self_attention_cache = copy.copy(cache.self_attention_cache)
        view.cross_attention_cache = copy.copy(cache.cross_attention_cache)
    indices = itertools.count()
    for part in parts(view):
        part.layers = [
            state_layers.view_of(layer)
            if state_layers.is_without_keys(layer)
            else _static_class(layer)(layer, static, next(indices))
            for layer in part.layers
        ]
    state_layers.separate(layers_of(view))
    state_layers.put(layers_of(view), static.states)
    return view


def use(cache: Cache, static: StaticKVCache) -> None:
    """Makes all layers of this cache those of a `StaticKVCache`, which releases their own memory."""
    for index, layer in enumerate(layers_with_keys(cache)):
        turn_into(_static_class(layer), layer, static, index)
    state_layers.put(layers_of(cache), static.states)


def _static_class(layer: Any) -> type[KVLayer]:
    """Returns the class of a layer with keys like this one in a `StaticKVCache`, where no window drops positions."""
    return KVHybridLayer if type(layer) in (HybridLayer, KVHybridLayer) else KVLayer


def parts(cache: object) -> list[Cache]:
    """Returns the self-attention cache, and the cross-attention cache if there is one."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def layers_of(cache: object) -> list[Any]:
    """Returns the layers of all `parts`."""
    layers = []
    for part in parts(cache):
        layers += part.layers
    return layers


def layers_with_keys(cache: object) -> list[Any]:
    """Returns the layers of all `parts` that store keys."""
    return [layer for layer in layers_of(cache) if not state_layers.is_without_keys(layer)]


def is_static(cache: object) -> bool:
    """Whether the cache is the library's `StaticCache`, in all `parts`."""
    return set(map(type, parts(cache))) == {StaticCache}


def cache_of(arguments: dict[str, Any]) -> Cache | None:
    """Returns the cache among the arguments of `generate`, or the arguments or outputs of a forward."""
    for name in CACHE_NAMES:
        if (cache := dict.get(arguments, name)) is not None:  # a newer `ModelOutput.get` warns of the older names
            return cache
    return None


def rollback_of(cache: Cache | None, modules: Iterable[nn.Module] = ()) -> Rollback:
    """Returns a context that restores a cache, see `undo_of`, and modules' tensors, unless `keep` was called."""
    rollback = Rollback()
    rollback.callback(undo_of_tensors(modules))
    if cache is not None:
        rollback.callback(undo_of(cache))
    return rollback


def undo_of(cache: Cache) -> Restore:
    """Returns a function that restores this cache to its present state; a `StaticCache` must be empty.

    Positions that were added are dropped, even if a forward ended in some layer. Stored positions are never
    written in place, except by `reorder`, which is not undone; states are, and copied before.
    """
    if is_static(cache):
        return cache.reset
    stores = [store for kv in adopted_by(cache) for store in (kv, *kv.generated)]
    undo = undo_of_attributes([cache, *parts(cache), *layers_of(cache), *stores])
    return all_of(undo, state_layers.undo_of_writes(layers_of(cache)))
