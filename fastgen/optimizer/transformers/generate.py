"""`GenerationMixin.generate`: keeps the record for `fastgen.explain()` and returns caches as the library does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastgen.optimizer import report
from fastgen.optimizer.transformers import cache_layers, verification
from fastgen.patching import disabled


def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    with report.recording(type(self).__name__) as record:
        if reasons := verification.pending_reasons(self, original, args, kwargs):
            record.fallbacks += reasons
            with disabled():
                return original(self, *args, **kwargs)
        record.user_gave_cache = kwargs.get("past_key_values") is not None
        result = original(self, *args, **kwargs)
        cache_layers.restore(getattr(result, "past_key_values", None))
    return result
