"""Whether a model keeps states of its rows in its own modules, outside of the cache.

Some models do (RecurrentGemma's recurrent states, the rope_deltas of Qwen2-VL). A cache can be given more rows after a
prefill, what a module keeps cannot, so such models are left alone. The first prefill of each model is watched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

_NOT_STATE = ("_parameters", "_buffers", "_modules")

# For each model that was watched, why its prefill has to run with all rows; empty if nothing was found.
_known: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


def known_reasons(model: nn.Module) -> list[str] | None:
    """Why this model's rows cannot be expanded after a prefill; None if no prefill of it was watched yet."""
    return _known.get(model)


def tensors(model: nn.Module) -> dict[tuple[int, str], Tensor]:
    """The tensors that the model's modules hold as plain attributes."""
    return {
        (id(module), f"{type(module).__name__}.{name}.{part}"): value
        for module in model.modules()
        for name, attribute in vars(module).items()
        if name not in _NOT_STATE
        for part, value in _tensors_in(attribute)
    }


def learn(model: nn.Module, before: dict[tuple[int, str], Tensor], inputs: int) -> list[str]:
    """Notes what a prefill of `inputs` rows has left in the model; returns the reasons, as `known_reasons` will."""
    names = {
        name.rstrip(".")
        for (module, name), value in tensors(model).items()
        if before.get((module, name)) is not value and inputs in value.shape[:2]
    }
    return refuse(model, [f"the model keeps states of its rows in {name}" for name in sorted(names)])


def refuse(model: nn.Module, reasons: list[str]) -> list[str]:
    """Notes why this model is to be left alone from now on, if there are reasons; returns them."""
    _known[model] = reasons
    return reasons


def rows_reasons(model: nn.Module, sizes: set[int]) -> list[str]:
    """What the model's modules hold that may be of the rows: tensors that are as long as one of `sizes`."""
    names = {name.rstrip(".") for (_, name), value in tensors(model).items() if sizes.intersection(value.shape[:2])}
    return [f"the model keeps states of its rows in {name}" for name in sorted(names)]


def _tensors_in(attribute: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(attribute, Tensor):
        yield "", attribute
    elif isinstance(attribute, (list, tuple)):
        yield from ((str(index), value) for index, value in enumerate(attribute) if isinstance(value, Tensor))
    elif isinstance(attribute, dict):
        yield from ((str(key), value) for key, value in attribute.items() if isinstance(value, Tensor))
