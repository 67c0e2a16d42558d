"""One call of `GenerationMixin.generate`: its patch, and faster forwards while it runs.

    generate                        creates the GenerateCall, and stores what the arguments say about the call
      swap_forwards                 for the time of the call, on the modules of large models
      casting_once                  for models of accelerate's mixed precision
      _sample, _beam_search         token_loop.py, beam_search.py: a turn for each token; outputs.py: what they return
        _prefill                    prefill.py: once per input; its cache becomes a KVCache
        forward                     decode_step.py: eager, captured, replayed
    end of the call                 caches become the library's again, and the report is complete

Tests: tests/optimizer/transformers/test_generate_models.py, tests/optimizer/transformers/test_generate_options.py,
tests/optimizer/transformers/test_returned_cache.py, tests/optimizer/transformers/test_beam_scores.py,
tests/optimizer/transformers/test_seamless.py, tests/optimizer/decoding/test_faster_forwards.py,
tests/ops/test_cpu_linear.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import BuiltinFunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from fastgen.ops import activations, liger
from fastgen.ops.kernel import first_supported
from fastgen.ops.tracing import is_transformed
from fastgen.optimizer.decoding.call import GenerateCall, settings_of
from fastgen.optimizer.decoding.cost_model import first_weight, size_of
from fastgen.optimizer.decoding.faster_forwards import (
    FasterForward,
    Forward,
    faster_forwards,
    linears,
    multiply,
    should_swap,
)
from fastgen.optimizer.decoding.graph_cache import free_memory
from fastgen.optimizer.decoding.report import KV_CACHE, PREFILL, Reason
from fastgen.optimizer.transformers import checks, kept_prefix, kv_layers
from fastgen.optimizer.transformers.checks import generate_call
from fastgen.optimizer.transformers.first_use import FirstUse
from fastgen.optimizer.transformers.small_kernels import forwards_on_gpu
from fastgen.optimizer.transformers.sources import unknown_of
from fastgen.patching import disabled

# A call with at most this number of steps, whose prefill is too small to gain, bypasses fastgen.
MOST_STEPS_OF_TINY_CALL = 4

GROWS = "the static cache: one that grows, because nothing is compiled"

CAST_ONCE = "weights under autocast: cast once"

TOO_SMALL = Reason("TOO_SMALL", "the model and the call are too small to gain")

# Arguments that the library calls between steps.
_CALLBACKS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")

# Values of cache_implementation for which no version of transformers compiles the model.
_NEVER_COMPILED = (None, "dynamic", "dynamic_full", "offloaded", "quantized")


def generate(original: Callable, self: checks.HostModel, *args: Any, **kwargs: Any) -> Any:
    """Runs the library's `generate` inside a `GenerateCall`, in which patches find it.

    fastgen is off in a call that is too small to gain, and in the first one of a kind that no test has seen.
    """
    with generate_call(self) as call:
        if reasons := _tiny_reasons(call, self, args, kwargs):
            call.report.add_reasons(PREFILL, reasons)
            with disabled():
                return original(self, *args, **kwargs)
        if unknown := unknown_of(call, self):
            return FirstUse(call, self, unknown, args, kwargs).generate(original, _accelerated)
        return _accelerated(original, call, self, *args, **kwargs)


def _accelerated(original: Callable, call: GenerateCall, self: checks.HostModel, *args: Any, **kwargs: Any) -> Any:
    """Runs the library's `generate` with all patches in effect.

    args: `inputs` and `generation_config`, then objects that steps may call; the ninth is `custom_generate`.
    """
    if isinstance(source := args[0] if args else kwargs.get("input_ids", kwargs.get("inputs")), Tensor):
        has_tokens = self.config.is_encoder_decoder and source.dim() == 2 and source.dtype == torch.int64
        call.host.source = source if has_tokens else None
    call.host.user_cache = kv_layers.cache_of(kwargs) is not None
    call.host.has_callbacks = bool(args[2:]) or {*map(type, map(kwargs.get, _CALLBACKS))} != {NoneType}
    call.host.has_callbacks |= kwargs.get("custom_generate") is not None
    call.host.custom_generate = any(map(callable, (kwargs.get("custom_generate"), *args[8:])))
    call.host.user_code = call.host.custom_generate or checks.is_foreign(self)
    if call.host.custom_generate:
        text = "custom_generate may read the cache: plain layers, keys and values stored for each row"
        call.report.add_reasons(KV_CACHE, [Reason("CUSTOM_GENERATE", text)])
    if _is_static_in_vain(call, self, args, kwargs):
        call.report.shared.append(GROWS)
        kwargs["cache_implementation"] = "dynamic"
    with swap_forwards(self, args, kwargs, call), casting_once(call, self):
        result = original(self, *args, **kwargs)
    if call.report.stages:
        call.end_stage("decoder")
    if not call.rows:
        call.report.add_reasons(PREFILL, [Reason("NO_PREFILL", "this decoding method does not call _prefill")])
    return result


def _is_static_in_vain(
    call: GenerateCall, model: checks.HostModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call makes a static cache that it neither compiles nor shows: on a CPU, where it only costs time."""
    configs = (kwargs.get("generation_config"), *args[1:2], model.generation_config)

    def setting(name: str) -> Any:
        values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    if setting("cache_implementation") != "static" or model.device.type != "cpu" or args[2:]:
        return False
    is_supported = getattr(model, "_can_compile_fullgraph", False)  # otherwise the library may raise an error
    reads = [kwargs.get(name) for name in ("custom_generate", "assistant_model")]
    reads += [setting(name) for name in ("return_dict_in_generate", "compile_config", "prefill_chunk_size")]
    if not is_supported or kv_layers.cache_of(kwargs) is not None or any(reads):
        return False
    facts = call.facts_of(model, checks.KNOWN)
    return not (facts.hooks or facts.user_code or facts.compiled)


def _tiny_reasons(
    call: GenerateCall, model: checks.HostModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Reason]:
    """Returns why a call cannot gain what fastgen costs; empty if it can, or if its size is unknown."""
    prompt = args[0] if args else kwargs.get("input_ids")
    steps = kwargs.get("max_new_tokens")
    reuses_prefix = next(settings_of(kept_prefix.PrefixReuse), None) is not None
    if not isinstance(prompt, Tensor) or type(steps) is not int or reuses_prefix:
        return []
    config = kwargs.get("generation_config") or model.generation_config
    rows = 1
    for name in ("num_beams", "num_return_sequences"):
        rows = max(rows, kwargs.get(name) or getattr(config, name, None) or 1)
    size = size_of(model, checks.KNOWN)
    costs = call.costs
    is_short = steps <= MOST_STEPS_OF_TINY_CALL
    tokens = prompt.numel()
    if prompt.dim() and rows * len(prompt) > 1:  # the first row of an input, or of equal rows, is computed anyway
        tokens = (rows - 1) * tokens or tokens - prompt.shape[-1]
    is_tiny = is_short and not costs.pays(size.tokens(tokens), costs.overhead_of_prefill_once(size))
    return [TOO_SMALL] if is_tiny and not should_swap(costs, size, steps) else []


# Faster forwards: products of `nn.Linear` and GPT-2's `Conv1D`, and its GELU; on a GPU small_kernels.py.


def swap_forwards(
    model: checks.HostModel, args: tuple, kwargs: dict[str, Any], call: GenerateCall
) -> AbstractContextManager[None]:
    """Sets faster forwards on the model's modules while this call runs, if the model is large enough to gain.

    None are set if the call may compile the model, as the library does for caches with a static shape, or under
    autocast, whose products are torch's.
    """
    weight = first_weight(model)
    is_gpu = weight is not None and weight.is_cuda and not liger.unsupported_reasons()
    if not (is_gpu or should_swap(call.costs, size_of(model, checks.KNOWN), kwargs.get("max_new_tokens"))):
        return nullcontext()
    if torch.is_autocast_enabled("cuda" if is_gpu else "cpu") or casts_in_forward(model):  # then products are torch's
        return nullcontext()
    facts = call.facts_of(model, checks.KNOWN)
    implementations = [kwargs.get("cache_implementation")]
    for config in (kwargs.get("generation_config"), *args, getattr(model, "generation_config", None)):
        implementations.append(getattr(config, "cache_implementation", None))
    is_static = getattr(kv_layers.cache_of(kwargs), "is_compileable", False)
    if facts.compiled or is_static or not all(map(_NEVER_COMPILED.__contains__, implementations)):
        return nullcontext()
    if is_gpu and (facts.hooks or facts.user_code or facts.is_sharded):
        return nullcontext()
    modules = facts.modules.values()
    return faster_forwards(call, {model: modules}, forwards_on_gpu(modules) if is_gpu else forwards())


# Mixed precision.


def casts_in_forward(model: checks.HostModel) -> bool:
    """Whether accelerate has prepared the model with mixed precision: each forward enters autocast and leaves it."""
    return "_original_forward" in vars(model) and hasattr(vars(model).get("forward"), "__wrapped__")


@contextmanager
def casting_once(call: GenerateCall, model: checks.HostModel) -> Iterator[None]:
    """A context in which a model of `casts_in_forward` casts each trainable fp32 weight once, and not in each step.

    torch keeps the casts until the outermost autocast ends, which is here the end of the call: the next call sees the
    optimizer's step. A change during the call would be missed, so no casts are kept if user code may run in it.
    """
    keeps = casts_in_forward(model) and not call.host.has_callbacks and _can_keep_casts(call, model)
    if keeps:
        torch.autocast_increment_nesting()
        call.is_accelerated = True
    try:
        yield
    finally:
        if keeps:
            call.report.shared.append(CAST_ONCE)
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _can_keep_casts(call: GenerateCall, model: checks.HostModel) -> bool:
    """Whether there are casts to keep, weights stay where they are during the call, and the casts fit into memory."""
    facts = call.facts_of(model, checks.KNOWN)
    modules = facts.modules.values()
    weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
    is_plain = all(type(weight) is nn.Parameter and not hasattr(weight, "ds_id") for weight in weights)  # DeepSpeed's
    moves = facts.is_sharded or any("_hf_hook" in vars(module) for module in modules)
    if moves or facts.hooks or facts.user_code or not is_plain or len(facts.devices) != 1:
        return False
    needed = sum(2 * weight.numel() for weight in weights if weight.requires_grad and weight.dtype == torch.float32)
    return 0 < needed <= free_memory(next(iter(facts.devices)))


def forwards() -> dict[type[nn.Module], Forward]:
    """Returns the faster forwards by the type of their module."""
    products = linears()
    if products and isinstance(torch.addmm, BuiltinFunctionType):
        products[Conv1D] = partial(multiply, is_transposed=True)  # in GPT-2
    return {NewGELUActivation: new_gelu, **products}


def new_gelu(forward: FasterForward, input: Tensor, call: GenerateCall) -> Tensor | None:
    """Computes the GELU of GPT-2, GPT-J, T5 v1.1 and other models in one pass over the tensor instead of eight.

    In half precision the original rounds after each of its operations; a table reproduces that.
    """
    if torch.is_grad_enabled() or type(input) is not Tensor or is_transformed():
        return None
    if input.dtype == torch.float32:
        kernel = first_supported(activations.GELU_KERNELS, "cpu", input)
        output = kernel.run(input, activations.GELU_TANH)
    elif activations.can_look_up(input):
        kernel = first_supported(activations.LOOKUP_KERNELS, "cpu")
        output = kernel.run(input, _table_of_new_gelu(input.dtype))
    else:
        return None
    call.report.kernels["fused activation"] += 1
    return output


@functools.cache
def _table_of_new_gelu(dtype: torch.dtype) -> Tensor:
    return activations.table_of(NewGELUActivation(), dtype)
