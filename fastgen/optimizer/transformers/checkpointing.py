"""Gradient checkpointing of layers that continue from a cache.

The library drops the cache of a layer that it checkpoints, because the layer would write into it a second time when the
backward computes it again. The caches of `token_log_probs` are not written into, so that its forwards checkpoint the
same layers by the same function, with their cache.

Tests: tests/optimizer/transformers/test_token_log_probs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgen.optimizer.decoding.guards import OfCall
from fastgen.optimizer.decoding.report import Reason, that_hold

FLAG = "gradient_checkpointing"


def checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that checkpoint, or have a layer do it, in a forward of this model."""
    return [module for module in model.modules() if module.training and vars(module).get(FLAG)]


def unsupported_reasons(modules: list[nn.Module]) -> list[Reason]:
    """Returns why `checkpointing` cannot do what these modules do; empty if it can."""
    layers = _layers(modules)
    reentrant = [layer for layer in layers if _options(layer).get("use_reentrant") is not False]
    replaced = [layer for layer in layers if "forward" in vars(layer)]
    text = "a module is in training mode with gradient checkpointing"
    return that_hold(
        ("TRAINING", f"{text} of a class that fastgen does not know", bool(modules) and not layers),
        ("TRAINING", f"{text} that is reentrant, which keeps no graph of keys", bool(reentrant)),
        ("TRAINING", f"{text}, and its forward has been replaced", bool(replaced)),
    )


@contextmanager
def switched_off(modules: list[nn.Module]) -> Iterator[None]:
    """A context in which these modules do not checkpoint."""
    for module in modules:
        setattr(module, FLAG, False)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, FLAG, True)


@contextmanager
def checkpointing(modules: list[nn.Module]) -> Iterator[None]:
    """A context in which the layers among these modules, `switched_off`, checkpoint with their cache."""
    layers = _layers(modules) if torch.is_grad_enabled() else []
    for layer in layers:
        vars(layer)["forward"] = OfCall(_checkpointed, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _checkpointed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer whose activations are computed again in the backward."""
    forward = type(layer).forward
    forward = getattr(forward, "__wrapped__", forward)  # without the library's own checkpoint
    return layer._gradient_checkpointing_func(partial(forward, layer, **kwargs), *args)


def _layers(modules: list[nn.Module]) -> list[Any]:
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def _options(layer: Any) -> dict[str, Any]:
    return getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
