"""The name under which models of transformers take and return their KV cache: `cache` since 5.24.

Before, it was `past_key_values`, and `cache_params` in Mamba; newer versions accept these with a warning.
Tests: tests/models/test_cache_names.py
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers.generation import utils

CACHE_NAMES = ("cache", "past_key_values", "cache_params")

# The library's name.
CACHE = "cache" if "cache" in utils.ALL_CACHE_NAMES else "past_key_values"


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
    parameters = [one.replace(name=CACHE) if name == "cache" else one for name, one in signature.parameters.items()]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed
