"""Static caches that the library makes by name ("static", …): the prefill with one row per group fills all their rows.

Their layers stay the library's own, for which it compiles its steps: keys and values are written for each row, by the
library's `update`, to where a prefill with all rows writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer, StaticSlidingWindowLayer

from fastgen.optimizer.decoding.reasons import Reason
from fastgen.optimizer.transformers.cache_layers import parts
from fastgen.optimizer.transformers.rows import Groups


def is_static(cache: object) -> bool:
    return all(type(part) is StaticCache for part in parts(cache))


def unsupported_reasons(cache: Cache, generation_config: Any) -> list[Reason]:
    """Why a prefill with one row per input cannot fill this static cache; empty if it can."""
    if generation_config.prefill_chunk_size is not None:
        text = "past_key_values is a StaticCache, for which the library may compile a prefill in chunks"
        return [Reason("CHUNKED_PREFILL", text)]
    layers = {type(layer) for part in parts(cache) for layer in part.layers}
    if foreign := sorted(layer.__name__ for layer in layers - {StaticLayer, StaticSlidingWindowLayer}):
        text = f"past_key_values is a StaticCache with layers of other kinds ({', '.join(foreign)})"
        return [Reason("CACHE_LAYERS", text)]
    return [Reason("CACHE_NOT_EMPTY", "past_key_values is not empty")] if cache.get_seq_length() > 0 else []


@contextmanager
def filling_all_rows(cache: object, groups: Groups) -> Iterator[None]:
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
    update: Callable[..., tuple[Tensor, Tensor]],
    groups: Groups,
    keys: Tensor,
    values: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """What `update` returns, `[rows, …]`, of the first row of each group."""
    of_rows, firsts = groups.of_rows.to(keys.device), groups.firsts.to(keys.device)
    filled = update(keys.index_select(0, of_rows), values.index_select(0, of_rows), *args, **kwargs)
    return tuple(states.index_select(0, firsts) for states in filled)
