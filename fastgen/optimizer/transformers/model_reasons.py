"""Whether a forward of some of the rows of a model of transformers gives them what a forward of all rows would.

Tests: tests/optimizer/transformers/test_foreign_code.py, tests/optimizer/transformers/test_replaced_code.py,
tests/optimizer/transformers/test_training_mode.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgen.ops.transforms import is_watched
from fastgen.optimizer.decoding import model_facts
from fastgen.optimizer.decoding.call import current_call
from fastgen.optimizer.decoding.model_facts import KnownCode, ModelFacts, named
from fastgen.optimizer.decoding.reasons import Reason
from fastgen.origin import PYTHON, packages_of

# Models in which the rows of a batch have an influence on each other.
COUPLED_MODELS = {
    "nllb-moe": "the capacity of its experts depends on the number of rows",
    "big_bird": "its sparse attention draws random numbers for each row",
}

# Values of cache_implementation for which no version of transformers compiles.
_NEVER_COMPILED = (None, "dynamic", "dynamic_full", "offloaded", "quantized")

_REGISTRIES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)


def _attention_names(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Under which names modules call attention and mask functions of the library's registries."""
    configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
    return frozenset(str(getattr(config, "_attn_implementation", None)) for config in configs.values())


def _attention_functions(names: frozenset[str]) -> tuple[Callable, ...]:
    found = (functions.get(name) for functions in _REGISTRIES for name in sorted(names))
    return tuple(function for function in found if function is not None)


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
    keys=_attention_names,
    registered=_attention_functions,
)  # fmt: skip


def is_known_class(model: Any) -> bool:
    """Whether the model's class is of transformers or of fastgen, whose parity the tests compare."""
    return packages_of(type(model)) <= {"transformers", "fastgen"}


def facts_of(model: Any) -> ModelFacts:
    """Those of the call of `generate` that runs."""
    call = current_call()
    return model_facts.facts_of(model, KNOWN) if call is None else call.facts_of(model, KNOWN)


def model_reasons(model: Any) -> list[Reason]:
    """What in the model or around it lets rows depend on each other, or is made for its rows; empty if nothing is."""
    facts = facts_of(model)
    reasons: list[Reason] = []
    if torch.is_grad_enabled():
        reasons.append(Reason("GRADIENTS", "autograd records, but shared caches are written in place"))
    if facts.training is not None:
        reasons.append(Reason("TRAINING", facts.training))
    elif (name := facts.foreign_in_training) is not None:
        reasons.append(Reason("TRAINING", f"{named(name)}, of a class of the program's, is in training mode"))
    for _, hook in facts.hooks[:1]:
        reasons.append(Reason("HOOKS", f"the model has a forward hook, which would see fewer rows: {hook}"))
    if is_watched() or torch._C._len_torch_dispatch_stack():
        reasons.append(Reason("TORCH_MODE", "a mode of torch that the program has entered would see fewer rows"))
    foreign = [what for _, what in facts.replaced]
    if is_known_class(model):  # other classes are verified
        foreign += [what for _, what in facts.foreign_classes] + _foreign_attentions(facts.keys) + facts.code.foreign
    for code in foreign[:1]:
        reasons.append(Reason("USER_CODE", f"{code} is not the library's, and may treat rows differently"))
    reasons += compiled_reasons(model)
    if model.config.model_type in COUPLED_MODELS:
        text = f"{model.config.model_type}: {COUPLED_MODELS[model.config.model_type]}"
        reasons.append(Reason("ROWS_COUPLED", text))
    return reasons + (model_facts.row_states(model) or [])


def compiled_reasons(model: Any) -> list[Reason]:
    """What of the model is compiled, and so made for the library's caches; else empty."""
    return [Reason("COMPILED", f"{named(name)} is compiled") for name in facts_of(model).compiled[:1]]


def compiling_reasons(model: Any, args: tuple, kwargs: dict[str, Any]) -> list[Reason]:
    """Why this call of `generate` may compile the model, as it does for the caches that have a static shape."""
    configs = [kwargs.get("generation_config"), *args, getattr(model, "generation_config", None)]
    asked = [kwargs.get("cache_implementation"), *(getattr(one, "cache_implementation", None) for one in configs)]
    texts = [f"cache_implementation {name}" for name in asked if name not in _NEVER_COMPILED]
    cache = kwargs.get("past_key_values")
    texts += [f"a {type(cache).__name__}"] if getattr(cache, "is_compileable", False) else []
    return [Reason("COMPILED", text) for text in texts]


def learn_row_states(model: Any, before: dict[tuple[int, str], Tensor], inputs: int) -> list[Reason]:
    """Notes what a prefill of `inputs` rows has left in modules, which no cache can give more rows; returns it.

    Some models do so (RecurrentGemma's recurrent states, the rope_deltas of Qwen2-VL). before: `facts.row_tensors()`.
    """
    names = {
        name
        for (module, name), value in facts_of(model).row_tensors().items()
        if before.get((module, name)) is not value and inputs in value.shape[:2]
    }
    return model_facts.remember_row_states(model, [_keeps(name) for name in sorted(names)])


def row_state_reasons(model: Any, sizes: set[int]) -> list[Reason]:
    """What the model's modules hold that may be of the rows: tensors that are as long as one of `sizes`."""
    tensors = facts_of(model).row_tensors()
    names = {name for (_, name), value in tensors.items() if sizes.intersection(value.shape[:2])}
    return [_keeps(name) for name in sorted(names)]


def _keeps(name: str) -> Reason:
    return Reason("MODEL_STATE", f"the model keeps states of its rows in {name}")


def _foreign_attentions(names: frozenset[str]) -> list[str]:
    """The names of attention and mask functions that the program has registered, if a module is set to them."""
    return sorted(
        f"attention function {name}"
        for name in names
        if not all(KNOWN.has(functions.get(name)) for functions in _REGISTRIES)
    )
