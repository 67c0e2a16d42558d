"""`GenerationMixin.generate`: keeps the record for `fastgen.explain()` and returns caches as the library does.

Tests: tests/optimizer/transformers/test_generate_models.py, tests/optimizer/transformers/test_generate_options.py,
tests/optimizer/transformers/test_returned_cache.py
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastgen.optimizer.decoding.call import GenerateCall, generate_call
from fastgen.optimizer.decoding.faster_forwards import faster_forwards
from fastgen.optimizer.decoding.model_facts import size_of
from fastgen.optimizer.decoding.reasons import KV_CACHE, PREFILL, Reason
from fastgen.optimizer.transformers import forwards, model_reasons, verification
from fastgen.patching import disabled


def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    with generate_call(type(self).__name__) as call:
        if reasons := verification.refused_reasons(self):
            call.report.add_reasons(PREFILL, reasons)
            with disabled():
                return original(self, *args, **kwargs)
        call.user_cache = kwargs.get("past_key_values") is not None
        call.user_code = not model_reasons.is_known_class(self)
        call.to_verify = verification.call_to_verify(original, self, args, kwargs)
        if any(callable(value) for value in (kwargs.get("custom_generate"), *args[8:])):
            call.user_code, call.share = True, False
            text = "custom_generate may read the cache: plain layers, keys and values stored for each row"
            call.report.add_reasons(KV_CACHE, [Reason("CUSTOM_GENERATE", text)])
        try:
            with _faster_forwards(self, args, kwargs, call):
                result = original(self, *args, **kwargs)
        finally:
            call.to_verify = None  # it holds the model and all arguments
        if call.staged_seconds:
            call.end_stage("decoder")
        if not call.rows:
            call.report.add_reasons(PREFILL, [Reason("NO_PREFILL", "this decoding method does not call _prefill")])
    return result


def _faster_forwards(
    model: Any, args: tuple, kwargs: dict[str, Any], call: GenerateCall
) -> AbstractContextManager[None]:
    """Products and activations inside this call, of models so large that it pays to look at all their modules."""
    if not call.costs.should_swap_forwards(size_of(model)):
        return nullcontext()
    if model_reasons.compiled_reasons(model) or model_reasons.compiling_reasons(model, args, kwargs):
        return nullcontext()
    modules = model_reasons.facts_of(model).modules.values()
    return faster_forwards({model: modules}, forwards.forwards(), call.report.usages)
