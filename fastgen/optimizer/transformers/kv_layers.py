"""`KVLayer`: a layer of a `KVCache` as transformers sees it, and the adoption of a transformers cache.

A cache that the library has filled is adopted into a `KVCache` once, after a prefill with one row per input or when a
step is captured, and given back once, when the call of `generate` ends: then its layers are the library's, with what
the library would have put into them. Until then a layer is what decoding loops and models know, a `DynamicLayer` or
`DynamicSlidingWindowLayer`. It becomes the library's earlier, in place, as soon as code asks for what segments or a
buffer with spare room cannot give. Caches that cannot be captured and have nothing to share are never touched.

Tests: tests/optimizer/transformers/test_returned_cache.py tests/optimizer/transformers/test_static_prefill.py
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.kv_cache import KV, KVCache
from fastgen.optimizer.decoding.report import CACHE_NOT_EMPTY, KV_CACHE, LAYER_EMPTY, Reason
from fastgen.optimizer.transformers.row_groups import RowGroups

# Under which of these a model has its cache.
NAMES = ("past_key_values", "cache_params")

PROMPT_ONCE = "the prompt's keys and values: once per input"


class KVLayer(DynamicLayer):
    """Layer `index` of `kv` in the place of `layer`.

    Reading `keys` or `values` gives tensors of the full shape `[rows, kv_heads, length, head_dim]`. Methods of
    `DynamicLayer` that are not overridden here read and assign them; an assignment makes the layer the library's.
    user_code: the attention is not the library's, and may expect of its keys all that holds for those of a plain layer.
    """

    library_class: type[DynamicLayer] = DynamicLayer

    def __init__(self, layer: DynamicLayer, kv: KVCache, index: int, user_code: bool = False) -> None:
        self.__dict__ |= {name: value for name, value in vars(layer).items() if name not in ("keys", "values")}
        self.kv, self.index, self.user_code = kv, index, user_code

    @property
    def keys(self) -> Tensor:
        return self._read("keys", 0)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self.to_dynamic_layer().keys = keys

    @property
    def values(self) -> Tensor:
        return self._read("values", 1)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self.to_dynamic_layer().values = values

    def _read(self, name: str, which: int) -> Tensor:
        if not self._must_be_dynamic():
            states = self.kv.read(self.index)[which]
            if self.kv.is_static or states.is_contiguous():  # a buffer with spare room is not, and the library's is
                return states
        return getattr(self.to_dynamic_layer(), name)

    @property
    def is_compileable(self) -> bool:
        """From this the library knows that masks have to be made before the step, for the whole capacity."""
        return self.kv.is_static

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        kv = self.kv
        if self.user_code and kv.was_materialized(self.index):
            return self.to_dynamic_layer().update(key_states, value_states, *args, **kwargs)
        kv.append(self.index, key_states, value_states)
        return kv.read(self.index)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int | Tensor:
        if self.kv.is_static and self.index < len(self.kv.seq_lengths):
            return self.kv.seq_lengths[self.index]
        return self.kv.length(self.index)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        if self.kv.is_static:
            return self.kv.prompt_length + self.kv.capacity, 0
        return super().get_mask_sizes(*args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        # A decoding method of the caller may move rows from input to input.
        if self._must_be_dynamic() or not _stay_in_inputs(beam_idx, self.kv.rows_per_input):
            self.to_dynamic_layer().reorder_cache(beam_idx)
        else:
            self.kv.reorder(beam_idx, self.index)

    def _must_be_dynamic(self) -> bool:
        return self.user_code and self.kv.was_materialized(self.index)

    def to_dynamic_layer(self) -> DynamicLayer:
        """Makes this layer the library's with the same content, in the memory of what was materialized of it."""
        keys, values = self.kv.copy(self.index)
        del self.kv, self.index, self.user_code
        self.__class__ = self.library_class
        self.keys, self.values = keys, values
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is copied or pickled is a layer of the library."""
        return self.to_dynamic_layer().__reduce_ex__(protocol)


class KVSlidingLayer(KVLayer, DynamicSlidingWindowLayer):
    """A `DynamicSlidingWindowLayer`: positions that no row sees any more are dropped for all rows at once.

    A static cache has one where everything still fits, see `static_reasons`; then it makes a difference for masks only.
    """

    library_class = DynamicSlidingWindowLayer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        if self.kv.is_static:
            return super().update(key_states, value_states, *args, **kwargs)
        unseen = self.kv.length(self.index) - (self.sliding_window - 1)
        if self._must_be_dynamic() or (unseen > 0 and not self.kv.drop(self.index, unseen)):
            return self.to_dynamic_layer().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int | Tensor:
        return super().get_seq_length() if self.kv.is_static else self.cumulative_length

    def _read(self, name: str, which: int) -> Tensor:
        # the library keeps one position less than the last update has returned
        return super()._read(name, which) if self.kv.is_static else getattr(self.to_dynamic_layer(), name)

    def to_dynamic_layer(self) -> DynamicLayer:
        if self.kv.is_static:
            self.cumulative_length = self.kv.length(self.index)
        super().to_dynamic_layer()
        self.keys = self.keys[:, :, 1 - self.sliding_window :]
        self.values = self.values[:, :, 1 - self.sliding_window :]
        return self


ADOPTED = {DynamicLayer: KVLayer, DynamicSlidingWindowLayer: KVSlidingLayer}
_KINDS = (*ADOPTED.keys(), *ADOPTED.values())
_SUPPORTED = ", ".join(kind.__name__ for kind in ADOPTED)


def _stay_in_inputs(beam_idx: Tensor, rows_per_input: int) -> bool:
    """Whether `beam_idx` takes for each row a row of the same input; indices on a device are trusted, not read."""
    if beam_idx.device.type != "cpu":
        return True
    rows = torch.arange(beam_idx.shape[0], dtype=beam_idx.dtype)
    return torch.equal(beam_idx // rows_per_input, rows // rows_per_input)


# Whether a cache can be adopted.


def unsupported_reasons(cache: object) -> list[Reason]:
    """Why the rows of this cache could not be expanded after a prefill that fills it; empty if they can."""
    reasons = unsupported_types(cache)
    if not reasons and parts(cache)[0].layers and _is_filled(cache):
        reasons.append(CACHE_NOT_EMPTY)
    return reasons


def unsupported_types(cache: object) -> list[Reason]:
    """Why a cache of these classes cannot be given more rows; empty if it can."""
    for part in parts(cache):
        if type(part) is not DynamicCache:
            text = f"past_key_values is a {type(part).__name__} (supported: DynamicCache, EncoderDecoderCache of two)"
            return [Reason("CACHE_TYPE", text)]
        if getattr(part, "offloading", False):
            return [Reason("CACHE_OFFLOADED", "past_key_values is offloaded to the CPU")]
        foreign = [layer for layer in part.layers if type(layer).__module__ not in (DynamicLayer.__module__, __name__)]
        if foreign:
            names = sorted({type(layer).__name__ for layer in foreign})
            return [
                Reason("CACHE_LAYERS", f"past_key_values has layers of the model's own classes ({', '.join(names)})")
            ]
    return []


def _is_filled(cache: Any) -> bool:
    try:
        return cache.get_seq_length() > 0
    except ValueError:  # only linear attention layers, which have no length
        return cache.has_previous_state()


# Adoption after a prefill, and the return.


def adopt(
    cache: Cache, inputs: int, rows_per_input: int, limit: int, call: GenerateCall, is_prefix: bool = False
) -> bool:
    """Makes a cache of `inputs` rows one of `inputs * rows_per_input` rows; whether it is in a `KVCache` now.

    What the rows of an input have in common is stored once where that pays. Where nothing gains by it, layers stay the
    library's; those of other classes (linear attention, …) are repeated row by row, as the library would have filled
    them. What is adopted already, behind a common prefix, goes on in its `KVCache`. limit: the number of positions that
    can be added to each row. is_prefix: the rows of an input are those of the batch. Tells the report.
    """
    share = False if rows_per_input == 1 else call.share
    others: Counter[str] = Counter()
    told: Counter[str] = Counter()
    kinds: dict[tuple, list[tuple[Cache, int]]] = {}
    adopted: dict[KVCache, Tensor] = {}
    in_place = False
    for part, is_cross in zip(parts(cache), (False, True)):
        for index, layer in enumerate(part.layers):
            if isinstance(layer, KVLayer):
                adopted.setdefault(layer.kv, layer.kv.segments(layer.index)[-1][0])
            elif not _can_adopt(layer):
                _take(layer, torch.arange(inputs).repeat_interleave(rows_per_input))
                others[type(layer).__name__] += 1
            elif layer.is_initialized and layer.keys.numel():
                shares = call.costs.should_share(layer.keys, rows_per_input, is_cross) if share is None else share
                told["cross" if is_cross else "prompt"] += shares
                told["short"] += not shares and share is None
                slides = getattr(layer, "sliding_window", None) is not None and not shares
                in_place |= not (is_cross or slides) and call.costs.should_write_in_place(
                    layer.keys, rows_per_input, limit
                )
                shapes = layer.keys.shape, layer.values.shape, layer.keys.dtype, layer.keys.device
                kind = (is_cross, shares, slides and layer.sliding_window <= layer.keys.shape[2] + limit, *shapes)
                kinds.setdefault(kind, []).append((part, index))
    gains = any(shares for _, shares, *_ in kinds) or (in_place and not call.user_code)
    kv = KVCache(inputs, rows_per_input)
    for (is_cross, shares, outgrows_window, *_), places in kinds.items():
        if shares or (gains and not call.user_code and not outgrows_window):
            _put_in(kv, places, shares, None if is_cross else limit, call.user_code)
        else:
            for part, index in places:
                part.layers[index].batch_repeat_interleave(rows_per_input)
    for known, keys in adopted.items():
        shares = call.costs.should_share(keys, rows_per_input) if share is None else share
        known.expand(rows_per_input, shares, limit)
        told["prompt"] += shares and len(known.prompts)
    _tell(call, told, others, is_prefix)
    if gains:
        call.report.usages.append(kv.usage)
        call.on_exit.callback(give_back, ref(cache))
    return gains or bool(adopted)


def _put_in(kv: KVCache, places: list[tuple[Cache, int]], shares: bool, limit: int | None, user_code: bool) -> None:
    """Puts `KVLayer`s in the place of these layers, all of one kind."""
    layers = [part.layers[index] for part, index in places]
    pairs = [(layer.keys, layer.values) for layer in layers]
    if user_code:  # which may have kept what it saw, and write into it
        pairs = [tuple(states.clone() for states in pair) for pair in pairs]
    if limit is not None and not shares:
        limit += pairs[0][0].shape[2]
    prompts = [(tuple(states.contiguous() for states in pair),) for pair in pairs]
    numbers = kv.add_layers(prompts, limit)
    for (part, index), layer, number in zip(places, layers, numbers):
        if not shares:
            kv.repeat_prompt(number)
        part.layers[index] = ADOPTED[type(layer)](layer, kv, number, user_code)


def _tell(call: GenerateCall, told: Counter[str], others: Counter[str], is_prefix: bool) -> None:
    if told["cross"]:
        call.report.shared.append(f"cross-attention keys and values: once per input, {told['cross']} layers")
    if told["prompt"]:
        what = "the prefix's keys and values: once for all rows" if is_prefix else PROMPT_ONCE
        call.report.shared.append(f"{what}, {told['prompt']} layers")
    reasons = [
        Reason("LAYER_TYPE", f"{number} layers of {name} stored for each row")
        for name, number in sorted(others.items())
    ]
    if told["short"]:
        reasons.append(Reason("FEW_KEYS", f"{told['short']} layers stored for each row: too few keys to gain"))
    call.report.add_reasons(KV_CACHE, reasons)


def give_back(known: ref[Cache]) -> None:
    """Makes the layers the library's again, in a cache that is returned or that somebody has kept."""
    cache = known()
    for part in () if cache is None else parts(cache):
        for layer in part.layers:
            if isinstance(layer, KVLayer):
                layer.to_dynamic_layer()


def _can_adopt(layer: Any) -> bool:
    """Not where the library keeps what a sliding window has left behind, to go back to it."""
    return type(layer) in ADOPTED and not getattr(layer, "record_past", False)


def repeat(cache: Cache, rows: Tensor) -> None:
    """Row i becomes what row `rows[i]` (int64) was; there may be more than before."""
    for part in parts(cache):
        for layer in part.layers:
            _take(layer, rows)


def _take(layer: Any, rows: Tensor) -> None:
    device = getattr(layer, "device", None)
    layer.reorder_cache(rows if device is None else rows.to(device))


# Between two steps.


def reorder(cache: Cache, beam_idx: Tensor) -> None:
    """As `cache.reorder_cache`, for rows that stay with their inputs: one move for all layers that are alike."""
    if beam_idx.device.type == "cpu" and torch.equal(beam_idx, torch.arange(beam_idx.shape[0])):
        return
    for kv in _kv_caches(cache, beam_idx):
        kv.reorder(beam_idx)


def compact(cache: Cache, batch_index: Tensor, rows: Tensor) -> None:
    """Drops the inputs that are not at `batch_index` (int64) among those of the cache; `rows` are theirs."""
    for kv in _kv_caches(cache, rows):
        kv.compact(batch_index, rows)


def _kv_caches(cache: Cache, rows: Tensor) -> list[KVCache]:
    """Those behind the layers that are adopted; the rows of the others are moved here."""
    found = {}
    for part in parts(cache):
        for layer in part.layers:
            if isinstance(layer, KVLayer):
                found[id(layer.kv)] = layer.kv
            else:
                layer.reorder_cache(rows)
    return list(found.values())


# Static caches, for captured steps.


def layer_reasons(cache: Cache, most: int) -> list[Reason]:
    """Why layers of these classes cannot be static for `most` positions; empty if they can."""
    for layer in parts(cache)[0].layers:  # of the cross-attention, none slides
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window <= most:
            text = f"a sliding window of {layer.sliding_window} for up to {most} positions"
            return [Reason("SLIDING_WINDOW", text)]
    names = {type(layer).__name__ for part in parts(cache) for layer in part.layers if type(layer) not in _KINDS}
    text = f"a cache with layers of {', '.join(sorted(names))} (supported: {_SUPPORTED})"
    return [Reason("CACHE_LAYERS", text)] if names else []


def kv_cache_of(cache: Cache, most: int) -> tuple[KVCache | None, list[Reason]]:
    """What the cache holds, as views where it is not adopted; or why it cannot be static for `most` positions."""
    if reasons := layer_reasons(cache, most):
        return None, reasons
    layers = [part.layers for part in parts(cache)]
    if not all(layers) or not all(layer.is_initialized for part in layers for layer in part):
        return None, [LAYER_EMPTY]
    adopted = {id(layer.kv): layer.kv for part in layers for layer in part if isinstance(layer, KVLayer)}
    kv = adopted.popitem()[1] if adopted else _views_of(*layers)
    if adopted or len(kv.prompts) != sum(map(len, layers)):
        return None, [Reason("LAYERS_DIFFER", "the layers of the cache differ in kind")]
    reasons = kv.static_reasons()
    return (None, reasons) if reasons else (kv, [])


def _views_of(layers: list[DynamicLayer], cross: list[DynamicLayer] | None = None) -> KVCache:
    """What the library's layers hold, as views, to be loaded into a static cache."""
    kv = KVCache(layers[0].keys.shape[0], 1)
    kv.add_layers([()] * len(layers), 0)
    generated = kv.generated[0]
    generated.by_layer = [(layer.keys, layer.values) for layer in layers]
    generated.lengths = [layer.keys.shape[2] for layer in layers]
    kv.add_layers([((layer.keys, layer.values),) for layer in cross or ()], None)
    return kv


def view_of(cache: Cache, static: KVCache) -> Cache:
    """A cache like this one whose layers are those of a static `KVCache`."""
    view = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        view.is_updated = dict(cache.is_updated)
        view.self_attention_cache = copy.copy(cache.self_attention_cache)
        view.cross_attention_cache = copy.copy(cache.cross_attention_cache)
    _put_static(view, static)
    return view


def use(cache: Cache, static: KVCache, call: GenerateCall) -> None:
    """Lets the layers of this cache be those of a static `KVCache`, and so lets go of their own memory."""
    if not any(isinstance(layer, KVLayer) for layer in parts(cache)[0].layers):
        call.on_exit.callback(give_back, ref(cache))
    _put_static(cache, static)


def _put_static(cache: Cache, static: KVCache) -> None:
    index = 0
    for part in parts(cache):
        layers = []
        for layer in part.layers:
            kind = type(layer) if isinstance(layer, KVLayer) else ADOPTED[type(layer)]
            layers.append(kind(layer, static, index))
            index += 1
        part.layers = layers


# The library's own static caches, which a prefill with one row per group fills for all rows. Their layers stay the
# library's, for which it compiles its steps: keys and values are written by its `update` to where a prefill with all
# rows writes them.


def is_static(cache: object) -> bool:
    return all(type(part) is StaticCache for part in parts(cache))


def static_prefill_reasons(cache: Cache, generation_config: Any) -> list[Reason]:
    """Why a prefill with one row per input cannot fill this static cache; empty if it can."""
    if generation_config.prefill_chunk_size is not None:
        text = "past_key_values is a StaticCache, for which the library may compile a prefill in chunks"
        return [Reason("CHUNKED_PREFILL", text)]
    layers = {type(layer) for part in parts(cache) for layer in part.layers}
    if foreign := sorted(layer.__name__ for layer in layers - {StaticLayer, StaticSlidingWindowLayer}):
        text = f"past_key_values is a StaticCache with layers of other kinds ({', '.join(foreign)})"
        return [Reason("CACHE_LAYERS", text)]
    return [CACHE_NOT_EMPTY] if cache.get_seq_length() > 0 else []


@contextmanager
def filling_all_rows(cache: object, groups: RowGroups) -> Iterator[None]:
    """Inside this context a static cache takes one row per group, and keeps it for all rows of the group."""
    layers = [layer for part in parts(cache) for layer in part.layers] if is_static(cache) else []
    for layer in layers:
        layer.update = partial(_fill_all_rows, layer.update, groups)
    try:
        yield
    finally:
        for layer in layers:
            del layer.update


def _fill_all_rows(
    update: Callable[..., KV], groups: RowGroups, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
) -> KV:
    """What `update` returns, `[rows, …]`, of the first row of each group."""
    of_rows, firsts = groups.of_rows.to(keys.device), groups.firsts.to(keys.device)
    filled = update(keys.index_select(0, of_rows), values.index_select(0, of_rows), *args, **kwargs)
    return tuple(states.index_select(0, firsts) for states in filled)


# Caches as such.


def parts(cache: object) -> list[Cache]:
    """The self-attention cache, and the cross-attention cache where there is one."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def cache_of(arguments: dict[str, Any]) -> Cache | None:
    """The cache among the arguments or outputs of a forward."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def undo_of(cache: Cache) -> Callable[[], None]:
    """A function that makes this cache, which is empty, again what it is now."""
    if is_static(cache):
        return cache.reset
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
