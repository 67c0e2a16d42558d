"""The name under which models of transformers take and return their KV cache: `cache` since 5.24.

Before, it was `past_key_values`, and `cache_params` in Mamba; newer versions accept these with a warning for a while.
All files take the name from here, so that no call of fastgen warns.

Tests: tests/models/test_cache_names.py
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(names: Container[str]) -> str:
    """Returns the name of the cache among these parameters or fields, the newest if there are several."""
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


CACHE = cache_name(CausalLMOutputWithPast.__dataclass_fields__)  # the library's name


def named_cache(forward: Callable) -> Callable:
    """Wraps a forward so that `cache` may also be called `past_key_values`; the signature has the library's name."""

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            if kwargs.get("cache") is not None:
                raise ValueError("cache and past_key_values are one argument: pass cache")
            kwargs["cache"] = kwargs.pop("past_key_values")
        return forward(*args, **kwargs)

    signature = inspect.signature(forward)
    parameters = [
        parameter.replace(name=CACHE) if name == "cache" else parameter
        for name, parameter in signature.parameters.items()
    ]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed
