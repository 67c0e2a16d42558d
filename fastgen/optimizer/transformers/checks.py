"""Checks of a call of transformers: why a part of it is left to the library. One function for each part.

    row_reasons       one row of each group of equal rows may stand for the group: prompts, captured steps, compaction
    loop_reasons      the decoding loop is fastgen's
    can_capture       its steps are captured
    by_batch_index    processors that prevent compaction, as does parameters_of_rows

What only looks at the arguments of a prefill is in prefill.py and row_groups.py, what looks at caches in kv_layers.py.

Tests: tests/optimizer/transformers/test_foreign_code.py, tests/optimizer/transformers/test_replaced_code.py,
tests/optimizer/transformers/test_training_mode.py, tests/optimizer/transformers/test_captured_steps.py,
tests/optimizer/transformers/test_replaced_loop.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import NoneType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import GenerationMixin
from transformers import __version__ as transformers_version
from transformers.generation import logits_process as processors_of
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgen.models.cache_names import CACHE
from fastgen.ops.tracing import is_watched, replaced_functions
from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding import graphs
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.report import LOOP, REORDERS_ITSELF, USER_CACHE, Reason
from fastgen.optimizer.decoding.user_code import KnownCode, is_user_code, named
from fastgen.optimizer.transformers import TESTED, architectures, compat, kv_layers
from fastgen.optimizer.transformers.constrained import treats_rows_alone
from fastgen.provenance import PYTHON, comes_with, packages_of

_REGISTRIES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, compat.EXPERTS_FUNCTIONS)
_REGISTERED_AS = ("_attn_implementation", "_experts_implementation")


def _registered_names(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Under which names modules call functions of the library's registries: attention, masks, experts."""
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return frozenset(str(getattr(config, name, None)) for config in configs.values() for name in _REGISTERED_AS)


def _registered_functions(names: frozenset[str]) -> tuple[Callable, ...]:
    found: list[Callable] = []
    for functions in _REGISTRIES:
        found += filter(None, map(functions.get, sorted(names)))
    return tuple(found)


def _encoder_of(model: nn.Module) -> nn.Module | None:
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if is_encoder_decoder and hasattr(model, "get_encoder") else None


KNOWN = KnownCode(
    # Packages whose modules and forwards treat every row alike, and what the library itself calls.
    packages=PYTHON | {
        "transformers", "torch", "torchvision", "torchaudio", "timm", "peft", "accelerate", "bitsandbytes", "torchao",
        "optimum", "hqq", "gptqmodel", "auto_gptq", "awq", "kernels", "liger_kernel", "trl", "fastgen", "numpy",
        "einops", "flash_attn", "causal_conv1d", "mamba_ssm", "deepspeed", "huggingface_hub", "packaging",
        "safetensors", "scipy", "tokenizers",
    },
    # Captured outputs, weight norms, pruning, moves to a device, partials of these.
    hooks=frozenset({"transformers", "torch", "accelerate", "functools", "trl"}),
    entries=frozenset({"prepare_inputs_for_generation", "_update_model_kwargs_for_generation"}),
    keys=_registered_names,
    registered=_registered_functions,
    encoder_of=_encoder_of,
    not_of_a_step=frozenset({"generation_config"}),
)  # fmt: skip


class HostModel(Protocol):
    """What is asked of a model with the library's `GenerationMixin`, besides what every module has."""

    config: Any
    generation_config: Any
    device: torch.device
    dtype: torch.dtype
    generate: Callable[..., Any]
    forward: Callable[..., Any]
    __call__: Callable[..., Any]
    modules: Callable[[], Iterable[nn.Module]]
    get_decoder: Callable[[], Any]
    prepare_inputs_for_generation: Callable[..., dict[str, Any]]
    _prefill: Callable[..., Any]
    _update_model_kwargs_for_generation: Callable[..., dict[str, Any]]
    _update_finished_beams: Callable[..., Any]


def is_known_class(model: object) -> bool:
    """Whether the model's class is of transformers or of fastgen, whose parity the tests compare."""
    return type(model).__module__.partition(".")[0] in ("transformers", "fastgen")


def untested_reasons(model: HostModel) -> list[Reason]:
    """What no test covers: a class that is not of transformers or fastgen, or a newer transformers; else empty."""
    if not is_known_class(model):
        text = f"{type(model).__module__}.{type(model).__qualname__} is not a class of transformers"
    elif "transformers" in PATCH_SET.untested_hosts:
        text = f"transformers {transformers_version} is newer than the newest tested {TESTED[1]}"
    else:
        return []
    return [Reason("UNTESTED", text)]


def row_reasons(call: GenerateCall, model: HostModel) -> list[Reason]:
    """What in the model or around it lets rows depend on each other, or is made for its rows; empty if nothing is.

    Otherwise a forward of some of the rows gives them what a forward of all rows would.
    """
    facts = call.facts_of(model, KNOWN)
    reasons: list[Reason] = []
    if torch.is_grad_enabled():
        reasons.append(Reason("GRADIENTS", "autograd records, but shared caches are written in place"))
    if facts.training is not None:
        reasons.append(Reason("TRAINING", facts.training))
    elif (name := facts.foreign_in_training) is not None:
        reasons.append(Reason("TRAINING", f"{named(name)}, of a class of the program's, is in training mode"))
    for _, hook in facts.hooks[:1]:
        reasons.append(Reason("HOOKS", f"the model has a forward hook, which would see fewer rows: {hook}"))
    reasons += _mode_reasons()
    # Other classes than the library's are verified.
    user_code = facts.user_code if is_known_class(model) else [what for _, what in facts.replaced]
    for code in user_code[:1]:
        reasons.append(Reason("USER_CODE", f"{code} is not the library's, and may treat rows differently"))
    for name in facts.compiled[:1]:
        reasons.append(Reason("COMPILED", f"{named(name)} is compiled"))
    if (kind := model.config.model_type) in architectures.COUPLED_ROWS:
        reasons.append(Reason("ROWS_COUPLED", f"{kind}: {architectures.COUPLED_ROWS[kind]}"))
    return reasons + (facts.row_states or [])


def _mode_reasons() -> list[Reason]:
    is_active = is_watched() or torch._C._len_torch_dispatch_stack()
    text = "a mode of torch that the program has entered would see fewer rows, or other functions"
    return [Reason("TORCH_MODE", text)] if is_active else []


def row_state_reasons(
    call: GenerateCall, model: HostModel, sizes: set[int], before: dict[tuple[int, str], Tensor] | None = None
) -> list[Reason]:
    """What the model's modules hold that may be of the rows: tensors that are as long as one of `sizes`.

    Some models keep such states (RecurrentGemma's recurrent states, the rope_deltas of Qwen2-VL). before: what they
    held at another time (`ModelFacts.row_tensors`), which does not count.
    """
    reasons = {}
    for key, value in call.facts_of(model, KNOWN).row_tensors().items():
        if (before is None or before.get(key) is not value) and sizes.intersection(value.shape[:2]):
            reasons[key[1]] = Reason("MODEL_STATE", f"the model keeps states of its rows in {key[1]}")
    return [*map(reasons.__getitem__, sorted(reasons))]


# The loop.


def loop_reasons(
    call: GenerateCall,
    model: HostModel,
    processors: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool,
    arguments: dict[str, Any],
    methods: tuple[str, ...] = (),
) -> list[Reason]:
    """Why a loop of the library cannot be replaced by one of fastgen, as the report tells; empty if it can.

    arguments: the `model_kwargs` of the loop. methods: those that the library's loop calls, and fastgen's does not.
    """
    reasons = _replaced_reasons(model, processors, stopping_criteria, methods) + _mode_reasons()
    if (cache := kv_layers.cache_of(arguments)) is not None:
        reasons += kv_layers.unsupported_types(cache)
    if untested := untested_reasons(model):
        reasons += untested
    elif call.user_code:
        reasons.append(Reason("CUSTOM_GENERATE", "custom_generate may read the cache"))
    elif call.user_cache:
        reasons.append(USER_CACHE)
    if not compat.STEPS_ARE_KNOWN:
        reasons.append(Reason("TRANSFORMERS_VERSION", "transformers before 5.3 prepares its steps in another way"))
    if synced_gpus:
        reasons.append(Reason("SYNCED_GPUS", "synced_gpus is set"))
    if generation_config.return_dict_in_generate:
        reasons.append(Reason("RETURN_DICT", "return_dict_in_generate is set"))
    if getattr(generation_config, "is_assistant", False):
        reasons.append(Reason("ASSISTANT", "the model is the assistant of another"))
    supported = (EosTokenCriteria, MaxLengthCriteria)
    if not all(type(criterion) in supported and _runs_library_code(criterion) for criterion in stopping_criteria):
        reasons.append(Reason("STOPPING_CRITERION", "a stopping criterion other than length and end tokens"))
    call.report.add_reasons(LOOP, reasons)
    return reasons


def _replaced_reasons(
    model: HostModel, processors: Any, stopping_criteria: Any, methods: tuple[str, ...]
) -> list[Reason]:
    """What the program has put in the place of what the library's loop calls, and fastgen's does not, or otherwise."""
    reasons = []
    for name in ("transformers.sample", "transformers.beam_search"):
        if not PATCH_SET.replaces_host(name):
            reasons.append(Reason("METHOD_REPLACED", f"{name}: another loop was there before fastgen"))
    for name in ("_has_unfinished_sequences", *methods):
        if not comes_with(getattr(model, name, None), GenerationMixin):
            reasons.append(Reason("METHOD_REPLACED", f"{name} is not that of GenerationMixin"))
    if "__call__" in vars(model):
        reasons.append(Reason("METHOD_REPLACED", "__call__ of this model: some loops of the library call it"))
    for called in (processors, stopping_criteria):
        if not _runs_library_code(called):
            reasons.append(Reason("METHOD_REPLACED", f"{type(called).__name__}.__call__ is not that of transformers"))
    for name in replaced_functions():
        reasons.append(Reason("FUNCTION_REPLACED", f"{name} is not that of torch"))
    return reasons


def _runs_library_code(called: object) -> bool:
    """Whether a call of this object, of a class that the library has, runs the library's code."""
    return packages_of(type(called).__call__) == {"transformers"}


# Its steps.


def can_capture(
    call: GenerateCall, model: HostModel, generation_config: Any, input_ids: Tensor, arguments: dict[str, Any]
) -> bool:
    """Whether a loop that begins with these `model_kwargs` should try to; adds to the report why not."""
    most, (rows, length) = generation_config.max_length or 0, input_ids.shape
    host_reasons = partial(_step_reasons, model, most, arguments)
    return graphs.can_capture(
        call, model, model, rows, most - length, KNOWN, host_reasons, partial(row_reasons, call, model)
    )


def _step_reasons(model: HostModel, most: int, arguments: dict[str, Any]) -> list[Reason]:
    """Why steps up to position `most` are not captured, as far as arguments and configuration tell."""
    reasons: list[Reason] = []
    if not compat.LAYERS_ARE_KNOWN:
        reasons.append(Reason("TRANSFORMERS_VERSION", "transformers before 5.17 has other static caches"))
    if not arguments.get("use_cache"):
        reasons.append(Reason("NO_CACHE", "use_cache is not set"))
    if not getattr(model, "_can_compile_fullgraph", False) and model.config.model_type not in architectures.SYNC_FREE:
        text = f"{type(model).__name__}.forward may synchronise with the device (not _can_compile_fullgraph)"
        reasons.append(Reason("MAY_SYNC", text))
    if (attention := getattr(model.config, "_attn_implementation", None)) not in ("sdpa", "eager"):
        reasons.append(Reason("ATTENTION", f"attention {attention} (supported: sdpa, eager)"))
    if getattr(model, "hf_quantizer", None) is not None:
        reasons.append(Reason("QUANTIZED", "the model is quantized"))
    if (cache := arguments.get(CACHE)) is not None:
        reasons += kv_layers.layer_reasons(cache, most)
    embedding: Any = getattr(model.get_decoder(), "embed_positions", None)
    table = getattr(embedding, "weights", None)
    if isinstance(table, Tensor) and most + embedding.padding_idx + 1 > len(table):  # M2M100's would have to grow
        reasons.append(Reason("POSITIONS", f"{most} positions, and the table has {len(table)}"))
    if hasattr(model, "_reorder_cache"):
        reasons.append(REORDERS_ITSELF)
    return reasons


# Finished inputs.

# Processors that treat every row for itself, from what it holds.
BY_ROW = (
    processors_of.MinLengthLogitsProcessor,
    processors_of.MinNewTokensLengthLogitsProcessor,
    processors_of.TemperatureLogitsWarper,
    processors_of.TopKLogitsWarper,
    processors_of.TopPLogitsWarper,
    processors_of.MinPLogitsWarper,
    processors_of.TypicalLogitsWarper,
    processors_of.EpsilonLogitsWarper,
    processors_of.EtaLogitsWarper,
    processors_of.RepetitionPenaltyLogitsProcessor,
    processors_of.NoRepeatNGramLogitsProcessor,
    processors_of.SequenceBiasLogitsProcessor,
    processors_of.NoBadWordsLogitsProcessor,
    processors_of.ForcedBOSTokenLogitsProcessor,
    processors_of.ForcedEOSTokenLogitsProcessor,
    processors_of.InfNanRemoveLogitsProcessor,
    processors_of.ExponentialDecayLengthPenalty,
    processors_of.LogitNormalization,
    processors_of.SuppressTokensAtBeginLogitsProcessor,
    processors_of.SuppressTokensLogitsProcessor,
    processors_of.WhisperTimeStampLogitsProcessor,
)


# The library's packages, and those of what it calls.
_LIBRARY = PYTHON | {"transformers", "torch", "fastgen"}

# Attributes that have no entry per row although their size may equal the number of rows: token ids, and what compaction
# takes along itself.
_NOT_OF_ROWS = frozenset({
    "eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "multi_token_biases", "bad_word_ids",
    "prompt_ignore_length",
})  # fmt: skip


def by_batch_index(processors: Iterable[Any]) -> list[Reason]:
    """The processors that may know rows by their batch index, and not only by what each holds."""
    others = (one for one in processors if not (_is_by_row(one) or treats_rows_alone(one)))
    return [
        Reason("PROCESSOR_BY_ROW", f"{type(one).__name__} may know the rows by their batch index") for one in others
    ]


def parameters_of_rows(processors: Iterable[Any], rows: int) -> list[Reason]:
    """What processors hold that may have an entry for each of these rows: a temperature for each prompt."""
    reasons = []
    for processor in filter(_is_by_row, processors):
        of_classes = [vars(base).items() for base in type(processor).__mro__[:-1]]
        held = {
            name: value for items in of_classes for name, value in items if isinstance(value, (Tensor, list, tuple))
        }
        for name, value in (held | vars(processor)).items():
            if name not in _NOT_OF_ROWS and any(_may_be_of_rows(leaf, rows) for leaf in tree_leaves(value)):
                text = f"{type(processor).__name__}.{name} may have an entry for each row"
                reasons.append(Reason("PROCESSOR_BY_ROW", text))
    return reasons


def _is_by_row(processor: Any) -> bool:
    return type(processor) in BY_ROW and not is_user_code(processor, _LIBRARY)


def _may_be_of_rows(value: Any, rows: int) -> bool:
    if type(value) is Tensor:
        return value.shape[:1] == (rows,)
    return not isinstance(value, (bool, int, float, str, NoneType))
