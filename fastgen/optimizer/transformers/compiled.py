"""Compiled models are left alone: their graphs were made for the library's caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Values of cache_implementation for which no version of transformers compiles.
_NEVER_COMPILED = (None, "dynamic", "dynamic_full", "offloaded", "quantized")


def reasons(model: nn.Module) -> list[str]:
    """What of the model is compiled, by `module.compile()` or `torch.compile` of it or its forward; else empty."""
    compiled = next((name for name, module in model.named_modules() if _is_compiled(module)), None)
    if compiled is None:
        return []
    return [f"module {compiled} is compiled" if compiled else "the model is compiled"]


def call_reasons(model: Any, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """Why this call of `generate` may compile the model, as it does for the caches that have a static shape."""
    configs = [kwargs.get("generation_config"), *args, getattr(model, "generation_config", None)]
    asked = [kwargs.get("cache_implementation"), *(getattr(one, "cache_implementation", None) for one in configs)]
    reasons = [f"cache_implementation {name}" for name in asked if name not in _NEVER_COMPILED]
    cache = kwargs.get("past_key_values")
    return reasons + ([f"a {type(cache).__name__}"] if getattr(cache, "is_compileable", False) else [])


def _is_compiled(module: nn.Module) -> bool:
    if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
        return True
    if isinstance(module, torch.jit.ScriptModule):  # its class has no forward to look at
        return False
    return hasattr(vars(module).get("forward", type(module).forward), "_torchdynamo_orig_callable")
