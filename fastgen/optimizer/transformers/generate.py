"""`GenerationMixin.generate`: one call, its report, and faster forwards on the modules of large models.

Outputs that a caller asks for and does not read are not kept: such a call runs as one that returns sequences alone, in
the loops that fastgen has for those.

Tests: tests/optimizer/transformers/test_generate_models.py, tests/optimizer/transformers/test_generate_options.py,
tests/optimizer/transformers/test_returned_cache.py, tests/optimizer/decoding/test_faster_forwards.py,
tests/optimizer/transformers/test_beam_scores.py, tests/optimizer/transformers/test_seamless.py
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from types import BuiltinFunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin
from transformers.activations import NewGELUActivation
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput
from transformers.pytorch_utils import Conv1D

from fastgen.ops import lookup
from fastgen.ops.tracing import is_transformed, is_watched
from fastgen.optimizer.decoding.call import GenerateCall, current_call, generate_call
from fastgen.optimizer.decoding.faster_forwards import Call, FasterForward, Forward, faster_forwards, linears, multiply
from fastgen.optimizer.decoding.model_facts import size_of
from fastgen.optimizer.decoding.report import KV_CACHE, PREFILL, Reason
from fastgen.optimizer.transformers import checks, kv_layers, verification
from fastgen.patching import disabled
from fastgen.provenance import comes_with

SEQUENCES_SCORES, ENCODER_STATES = "sequences_scores", "encoder_hidden_states"

_used: ContextVar[tuple[str, ...] | None] = ContextVar("fastgen_used_outputs", default=None)

# Arguments that are called between steps.
_CALLBACKS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")

# Values of cache_implementation for which no version of transformers compiles.
_NEVER_COMPILED = (None, "dynamic", "dynamic_full", "offloaded", "quantized")


def generate(original: Callable, self: checks.HostModel, *args: Any, **kwargs: Any) -> Any:
    with generate_call(type(self).__name__) as call:
        if reasons := verification.refused_reasons(self):
            call.report.add_reasons(PREFILL, reasons)
            with disabled():
                return original(self, *args, **kwargs)
        call.user_cache = kv_layers.cache_of(kwargs) is not None
        call.user_code = not checks.is_known_class(self)
        call.has_callbacks = bool(args[2:]) or {*map(type, map(kwargs.get, _CALLBACKS))} != {NoneType}
        call.to_verify = verification.call_to_verify(original, self, args, kwargs)
        if any(map(callable, (kwargs.get("custom_generate"), *args[8:]))):
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
    model: checks.HostModel, args: tuple, kwargs: dict[str, Any], call: GenerateCall
) -> AbstractContextManager[None]:
    """Products and activations inside this call, of models so large that it pays to look at all their modules.

    None where the call may compile the model, as the library does for the caches that have a static shape.
    """
    if not call.costs.should_swap_forwards(size_of(model, checks.KNOWN)):
        return nullcontext()
    facts, asked = call.facts_of(model, checks.KNOWN), [kwargs.get("cache_implementation")]
    for config in (kwargs.get("generation_config"), *args, getattr(model, "generation_config", None)):
        asked.append(getattr(config, "cache_implementation", None))
    is_static = getattr(kv_layers.cache_of(kwargs), "is_compileable", False)
    if facts.compiled or is_static or not all(map(_NEVER_COMPILED.__contains__, asked)):
        return nullcontext()
    return faster_forwards({model: facts.modules.values()}, forwards(), call.report.kernels)


def forwards() -> dict[type[nn.Module], Forward]:
    """The forwards by the type of their module."""
    products = linears()
    if products and isinstance(torch.addmm, BuiltinFunctionType):
        products[Conv1D] = partial(multiply, is_transposed=True)  # GPT-2's
    return {NewGELUActivation: new_gelu, **products}


def new_gelu(forward: FasterForward, input: Tensor, call: Call) -> Tensor | None:
    """Of GPT-2, GPT-J, T5 v1.1 and others: one pass over the tensor instead of eight.

    In half precision the original rounds after each of its steps, which a table repeats.
    """
    if torch.is_grad_enabled() or type(input) is not Tensor or is_transformed() or is_watched():
        return None
    if input.dtype == torch.float32:
        output = functional.gelu(input, approximate="tanh")
    elif lookup.can_look_up(input):
        output = torch.ops.fastgen.lookup(input, _table_of_new_gelu(input.dtype))
    else:
        return None
    call.usage["fused activation"] += 1
    return output


@functools.cache
def _table_of_new_gelu(dtype: torch.dtype) -> Tensor:
    return lookup.table_of(NewGELUActivation(), dtype)


@contextmanager
def only_outputs(*outputs: str) -> Iterator[None]:
    """Inside this context, of calls that ask for `scores` only `sequences` and these outputs are used.

    `scores` are a tensor `[rows, vocabulary_size]` of each step, gigabytes for a batch of summaries, and the library
    gives `sequences_scores` only with them. All outputs stay where others than scores, and hidden states beside the
    encoder's, are asked for, and where fastgen is off.
    """
    token = _used.set(outputs)
    try:
        yield
    finally:
        _used.reset(token)


def drop_unused_outputs(loop: Callable) -> Callable:
    """For a replacement of one of the library's loops: drops the outputs that the caller does not use."""
    signature = inspect.signature(loop)

    @wraps(loop)
    def run(*args: Any, **kwargs: Any) -> Any:
        used, call = _used.get(), current_call()
        if used is None or call is None:
            return loop(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        model, config = given.arguments["self"], given.arguments["generation_config"]
        if not _can_drop(model, config, used):
            return loop(*args, **kwargs)
        lean = given.arguments["generation_config"] = copy.copy(config)
        lean.return_dict_in_generate = lean.output_scores = lean.output_hidden_states = False
        model_kwargs = given.arguments["model_kwargs"]
        model_kwargs.pop("output_hidden_states", None)
        outputs: dict[str, Any] = {}
        if ENCODER_STATES in used:
            outputs[ENCODER_STATES] = model_kwargs["encoder_outputs"].hidden_states
        sequences = loop(*given.args, **given.kwargs)
        if SEQUENCES_SCORES in used:
            outputs[SEQUENCES_SCORES] = call.beam_scores[:, : config.num_return_sequences].flatten()
        kind = GenerateBeamEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateBeamDecoderOnlyOutput
        return kind(sequences=sequences, **outputs)

    return run


def _can_drop(model: Any, config: Any, used: tuple[str, ...]) -> bool:
    """Whether a call with this configuration can run as one that returns sequences alone."""
    if not (config.return_dict_in_generate and config.output_scores):
        return False
    if config.output_logits or config.output_attentions or (config.output_hidden_states and ENCODER_STATES not in used):
        return False
    if SEQUENCES_SCORES in used:
        return config.num_beams > 1 and comes_with(model._update_finished_beams, GenerationMixin)
    return config.num_return_sequences == 1  # Seamless M4T chooses among several by their scores
