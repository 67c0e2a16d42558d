"""`GenerationMixin.generate`: one call with its report, inside of which the other patches find it.

    generate                        makes the GenerateCall, and notes what the arguments say about the call
      swap_forwards                 faster_forwards.py: for the time of the call, on the modules of large models
      _sample, _beam_search         token_loop.py, beam_search.py: a turn for each token; call.py: what nobody reads
        _prefill                    prefill.py: once per input; its cache becomes a KVCache
        forward                     decode_step.py: eager, captured, replayed
    end of the call                 caches become the library's again, and the report is complete

Tests: tests/optimizer/transformers/test_generate_models.py, tests/optimizer/transformers/test_generate_options.py,
tests/optimizer/transformers/test_returned_cache.py
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

from torch import Tensor

from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.cost_model import size_of
from fastgen.optimizer.decoding.report import KV_CACHE, PREFILL, Reason
from fastgen.optimizer.transformers import checks, kept_prefix, kv_layers, verification
from fastgen.optimizer.transformers.call import generate_call
from fastgen.optimizer.transformers.faster_forwards import swap_forwards
from fastgen.patching import disabled

TOO_SMALL = Reason("TOO_SMALL", "the model and the call are too small to gain")

# Arguments that are called between steps.
_CALLBACKS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")


def generate(original: Callable, self: checks.HostModel, *args: Any, **kwargs: Any) -> Any:
    """Runs the library's `generate` inside a `GenerateCall`.

    fastgen is off in a call that is too small to gain, and if results of this class have differed.
    args: `inputs` and `generation_config`, then what steps may call; after eight of them `custom_generate`.
    """
    with generate_call(self) as call:
        if reasons := verification.refused_reasons(self) or _tiny_reasons(call, self, args, kwargs):
            call.report.add_reasons(PREFILL, reasons)
            with disabled():
                return original(self, *args, **kwargs)
        call.host.user_cache = kv_layers.cache_of(kwargs) is not None
        call.host.user_code = not checks.is_known_class(self)
        call.host.has_callbacks = bool(args[2:]) or {*map(type, map(kwargs.get, _CALLBACKS))} != {NoneType}
        call.host.to_verify = verification.call_to_verify(original, self, args, kwargs)
        if any(map(callable, (kwargs.get("custom_generate"), *args[8:]))):
            call.host.user_code, call.host.share = True, False
            text = "custom_generate may read the cache: plain layers, keys and values stored for each row"
            call.report.add_reasons(KV_CACHE, [Reason("CUSTOM_GENERATE", text)])
        try:
            with swap_forwards(self, args, kwargs, call):
                result = original(self, *args, **kwargs)
        finally:
            call.host.to_verify = call.host.checks = None  # which hold the model and all arguments
        if call.report.stages:
            call.end_stage("decoder")
        if not call.rows:
            call.report.add_reasons(PREFILL, [Reason("NO_PREFILL", "this decoding method does not call _prefill")])
    return result


def _tiny_reasons(
    call: GenerateCall, model: checks.HostModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Reason]:
    """Why a call cannot gain what fastgen costs; empty if it can, or if it is not known how large it is."""
    prompt, steps = args[0] if args else kwargs.get("input_ids"), kwargs.get("max_new_tokens")
    if not isinstance(prompt, Tensor) or type(steps) is not int or kept_prefix.reuse_of(model) is not None:
        return []
    config = kwargs.get("generation_config") or model.generation_config
    names = ("num_beams", "num_return_sequences")
    rows = max(kwargs.get(name) or getattr(config, name, None) or 1 for name in names)
    may_gain = call.costs.may_gain(size_of(model, checks.KNOWN), rows * prompt.numel(), steps)
    return [] if may_gain else [TOO_SMALL]
