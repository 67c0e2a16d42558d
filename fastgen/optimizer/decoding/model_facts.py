"""What must be known of a model: its size."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from fastgen.ops.cpu_linear import product


@dataclass(frozen=True)
class ModelSize:
    """modules: how many. weights: elements that a token of a prefill is multiplied with. step: those of a decode step,
    which has an output layer. large: elements of large weights that oneDNN may multiply with, on a CPU. bytes: of all
    weights.
    """

    modules: int
    weights: int
    step: int
    large: int
    bytes: int


@dataclass(frozen=True)
class _Known:
    """A model's size, its first parameter, and the type and device that this had when the size was found."""

    size: ModelSize
    first: ref[nn.Parameter]
    state: tuple[torch.dtype, torch.device]


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def size_of(model: nn.Module) -> ModelSize:
    """The size of the model, looked up again where its type or device has changed since the last call."""
    known = _known.get(model)
    if known is not None and (first := known.first()) is not None and (first.dtype, first.device) == known.state:
        return known.size
    size, first = _measured(model), next(model.parameters(), None)
    if first is not None:
        _known[model] = _Known(size, ref(first), (first.dtype, first.device))
    return size


def _measured(model: nn.Module) -> ModelSize:
    modules, weights = list(model.modules()), list(model.parameters())
    # Tokens look up one row of an embedding; the output layer, of the same shape, sees the last token only.
    looked_up = {module.weight.shape for module in modules if isinstance(module, nn.Embedding)}
    before = set(model.get_encoder().parameters()) if _has_encoder(model) else set()  # runs once per input anyway
    prefill = [weight for weight in weights if weight.dim() > 1 and weight not in before]
    used = [weight.numel() for weight in prefill if weight.shape not in looked_up]
    large = [weight.numel() for weight in weights if weight.is_cpu and weight.dtype in product.dtypes()]
    large = [elements for elements in large if elements >= product.MIN_ELEMENTS]
    output = max((shape.numel() for shape in looked_up), default=0)
    return ModelSize(len(modules), sum(used), sum(used) + output, sum(large), sum(weight.nbytes for weight in weights))


def _has_encoder(model: nn.Module) -> bool:
    """Whether the model's configuration says that its decoder gets the states of an encoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)) and hasattr(model, "get_encoder")
