"""What a recording takes from a model without being told when it changes: addresses, numbers and switches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_VALUES = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})

# What describes one call of generate, and a mask that a prefill may make longer: no decode step reads them.
_NOT_OF_A_STEP = frozenset({"generation_config", "_future_mask"})


def fingerprint(model: nn.Module) -> list[Any]:
    """Of all modules: where their tensors are, their hooks, adapters, training flags and all other attributes.

    Equal as long as none was replaced. A weight that is written in place keeps its address, where recordings read it.
    What fastgen puts on modules for the time of a call is left out.
    """
    seen: set[int] = set()
    return [_of_items(vars(module), seen) for module in model.modules()]


def _of_items(items: dict[Any, Any], seen: set[int]) -> list[Any]:
    return [
        (_described(name, seen), _of_attribute(name, value, seen))
        for name, value in items.items()
        if name not in _NOT_OF_A_STEP and not type(value).__module__.startswith("fastgen.")
    ]


def _of_attribute(name: Any, value: Any, seen: set[int]) -> Any:
    """A configuration, which may be changed, is described by what it holds, once for all modules that have it."""
    if not hasattr(value, "__dict__") or not str(name).endswith("config") or id(value) in seen:
        return _described(value, seen)
    seen.add(id(value))
    return id(value), _of_items(vars(value), seen)


def _described(value: Any, seen: set[int]) -> Any:
    if type(value) in _VALUES:
        return value
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, dict):
        return _of_items(value, seen) if value else ()
    if isinstance(value, (list, tuple)):
        return [_described(item, seen) for item in value]
    return type(value), id(value)
