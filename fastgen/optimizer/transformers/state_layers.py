"""Layers of linear attention and state spaces: their states, and their views of a `StaticKVCache`.

The library stores the states of a row in two dictionaries of a layer, and overwrites the tensors in place. So the
library's own layers can be captured if they hold tensors at fixed addresses, those of a `StaticKVCache`:

    loop's cache    LinearAttentionLayer ──put──> with the cache's tensors ──own_states──> with copies
    graph's view    LinearAttentionLayer with the same tensors

Layers with keys *and* states are in kv_layers.py (`KVHybridLayer`), which calls these functions.

Tests: tests/optimizer/transformers/test_state_layers.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from fastgen.optimizer.decoding.call import Restore
from fastgen.optimizer.decoding.static_kv_cache import KVContent

# Older versions have no such layers: their models store states in caches of their own.
LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", DynamicLayer)
HybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", DynamicLayer)
DummyLayer: Any = getattr(cache_utils, "DummyLayer", None)

# The dictionaries of a layer with states, by the number of the state.
DICTIONARIES = ("conv_states", "recurrent_states")

Slot = tuple[dict[int, Any], int]  # a dictionary, and the number of a state in it


def has_only_states(layer: object) -> bool:
    """Whether this is the library's layer without keys."""
    return type(layer) is LinearAttentionLayer and type(layer) is not DynamicLayer


def is_without_keys(layer: object) -> bool:
    """Whether this layer has only states, or stores nothing: of a feed-forward block, or one that reads other keys."""
    return has_only_states(layer) or type(layer) is DummyLayer


def slots_of(layers: Iterable[Any]) -> list[Slot]:
    """Returns where the states of these layers are; layers without states have none."""
    slots: list[Slot] = []
    for layer in layers:
        for name in DICTIONARIES:
            states = getattr(layer, name, None)
            if isinstance(states, dict):
                slots += [(states, number) for number, state in states.items() if state is not None]
    return slots


def states_of(layers: Iterable[Any]) -> list[Tensor]:
    """Returns the states of these layers, `[rows, …]` each."""
    return [states[number] for states, number in slots_of(layers)]


def are_filled(layers: Sequence[Any], count: int) -> bool:
    """Whether a forward has filled all `count` states of these layers, and steps overwrite them in place."""
    with_states = [layer for layer in layers if isinstance(getattr(layer, "conv_states", None), dict)]
    if any(getattr(layer, "record_past", False) for layer in with_states):
        return False
    return all(all(layer.has_previous_state.values()) for layer in with_states) and len(slots_of(layers)) == count


def put(layers: Iterable[Any], tensors: Iterable[Tensor]) -> None:
    """Makes these tensors the states of the layers, in the order of `states_of`."""
    for (states, number), tensor in zip(slots_of(layers), tensors, strict=True):
        states[number] = tensor


def own_states(layer: Any) -> None:
    """Gives a layer copies of its states, in memory of their own."""
    put([layer], [state.clone() for state in states_of([layer])])


def move(layer: Any, rows: Tensor) -> None:
    """Makes row i of each state what its row `rows[i]` was (int64); there may be more rows than before."""
    put([layer], [state.index_select(0, rows.to(state.device)) for state in states_of([layer])])


def content_of(states: Sequence[Tensor]) -> KVContent:
    """Returns the content of a cache with these states and no keys.

    Its positions are counted by one layer of keys without numbers; the last position is that of the last forward.
    """
    keys = states[0].new_empty((len(states[0]), 1, 1, 0))
    return KVContent(len(keys), 1, [()], [(keys, keys)], states=states)


def view_of(layer: Any) -> Any:
    """Returns a copy of this layer of the library, which has no keys."""
    view = object.__new__(type(layer))
    vars(view).update(vars(layer))
    return view


def separate(layers: Iterable[Any]) -> None:
    """Gives layers, which are copies, dictionaries of their own."""
    for layer in layers:
        copies = {name: dict(value) for name, value in vars(layer).items() if type(value) is dict}
        vars(layer).update(copies)


def undo_of_writes(layers: Iterable[Any]) -> Restore:
    """Returns a function that restores what the layers' present states hold, which forwards overwrite in place."""
    states = states_of(layers)
    copies = [state.clone() for state in states]

    def restore() -> None:
        for state, old_state in zip(states, copies):
            state.copy_(old_state)

    return restore
