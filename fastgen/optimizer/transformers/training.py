"""What training mode switches on that makes a row differ from an equal one, or depend on the others.

Reinforcement learning generates in training mode, with models that drop nothing. There a forward of fewer rows gives
what one of all rows gives.
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

# In the names of numbers that say how much is left out or added at random: dropout, layerdrop, router_jitter_noise.
_RANDOM = ("drop", "jitter")


def reasons(modules: dict[str, nn.Module]) -> list[str]:
    """Why rows differ in training mode, of the first module where they do; empty if none does."""
    training = ((name or "the model", module) for name, module in modules.items() if module.training)
    found = (f"{name} is in training mode with {what}" for name, module in training for what in _switched_on(module))
    return list(islice(found, 1))


def _switched_on(module: nn.Module) -> list[str]:
    if isinstance(module, _DropoutNd):
        return [f"p={module.p:g}, where rows differ"] if module.p else []
    if isinstance(module, _BatchNorm):
        return ["batch normalization, where rows depend on each other"]
    if isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return [f"random numbers in {type(module).__name__}"]
    if getattr(module, "gradient_checkpointing", False):
        return ["gradient checkpointing, where the library keeps no cache"]
    config = getattr(module, "config", None)
    read = {name: getattr(config, name, None) for name in _names_read(module.__class__)}
    numbers = {name: value for name, value in {**read, **vars(module)}.items() if _is_random(name, value)}
    return [f"{name}={value:g}, where rows differ" for name, value in numbers.items()]


def _is_random(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0 and any(part in name for part in _RANDOM)


@functools.cache
def _names_read(kind: type) -> frozenset[str]:
    """The names in the methods of a class, of what may be attributes of its configuration.

    Configurations hold more than is used: GPT-2's has dropouts of its heads for classification.
    """
    attributes = (item for base in kind.__mro__ for item in vars(base).items())
    functions = (value for name, value in attributes if name != "__init__" and hasattr(value, "__code__"))
    names = (name for function in functions for name in _names_in(function))
    return frozenset(name for name in names if any(part in name for part in _RANDOM))


def _names_in(function: Any) -> tuple[str, ...]:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__.co_names
