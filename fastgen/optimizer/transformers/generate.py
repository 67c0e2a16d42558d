"""`GenerationMixin.generate`: keeps the record for `fastgen.explain()` and returns caches as the library does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fastgen.ops import cpu_linear
from fastgen.optimizer import report
from fastgen.optimizer.decoding.linear_mode import FastLinear
from fastgen.optimizer.transformers import cache_layers, compiled, verification
from fastgen.patching import disabled

MIN_ELEMENTS_PER_MODULE = 1 << 16


def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    with report.recording(type(self).__name__) as record:
        if reasons := verification.pending_reasons(self, original, args, kwargs):
            record.fallbacks += reasons
            with disabled():
                return original(self, *args, **kwargs)
        record.user_gave_cache = kwargs.get("past_key_values") is not None
        with _fast_linear(self, record):
            result = original(self, *args, **kwargs)
        for cache in tuple(record.caches):  # one that is returned, or that somebody has kept
            cache_layers.restore(cache)
        if not record.rows:
            record.fallbacks.append("prefill and caches: this way of decoding makes its prefill itself")
    return result


def _fast_linear(model: nn.Module, record: report.Report) -> AbstractContextManager:
    if cpu_linear.machine_reasons() or not _has_large_products(model) or compiled.reasons(model):
        return nullcontext()
    usage: Counter[str] = Counter()
    record.usages.append(usage)
    return FastLinear(usage)


def _has_large_products(model: nn.Module) -> bool:
    """Whether what `FastLinear` saves is more than it costs, which is a microsecond for every call of torch."""
    modules = sum(1 for _ in model.modules())
    weights = [weight.numel() for weight in model.parameters() if weight.is_cpu and weight.dtype == torch.float32]
    return sum(size for size in weights if size >= cpu_linear.MIN_ELEMENTS) >= MIN_ELEMENTS_PER_MODULE * modules
