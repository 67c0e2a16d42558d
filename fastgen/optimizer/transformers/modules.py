"""What is switched on inside a model and makes a forward of one row per input differ from one of all rows."""

from __future__ import annotations

import functools

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Packages whose modules and forwards treat every row alike, whatever the number of rows.
_KNOWN_PACKAGES = (
    "transformers", "torch", "torchvision", "torchaudio", "timm", "peft", "accelerate", "bitsandbytes", "torchao",
    "optimum", "hqq", "gptqmodel", "auto_gptq", "awq", "kernels", "liger_kernel", "fastgen",
)  # fmt: skip

# Methods of the model itself that a program may have replaced.
_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")

# Packages whose hooks care for no row: captured outputs, weight normalisation, pruning, moving weights to a device.
_KNOWN_HOOKS = ("transformers", "torch", "accelerate")


def unsupported_reasons(model: nn.Module) -> list[str]:
    """Why a forward of fewer rows would not give what one of all rows gives; empty if it does."""
    reasons = []
    modules = dict(model.named_modules())
    training = next((name for name, module in modules.items() if module.training), None)
    if training is not None:
        where = f"module {training}" if training else "the model"
        reasons.append(f"{where} is in training mode, where dropout differs from row to row")
    hook = next((found for module in modules.values() for found in _unknown_hooks(module)), None)
    if hook is not None:
        reasons.append(f"the model has a forward hook, which would see fewer rows: {hook}")
    foreign = [reason for name, module in modules.items() for reason in _replaced_forward(name, module)]
    if _package(type(model)) == "transformers":  # other classes are verified
        foreign += [reason for name, module in modules.items() for reason in _foreign_class(name, module)]
        attention = next((name for module in modules.values() if (name := _foreign_attention(module))), None)
        foreign += [f"attention function {attention}"] if attention else []
        methods = [name for name in _METHODS if _package(getattr(model, name, None)) not in (None, *_KNOWN_PACKAGES)]
        foreign = foreign[:1] + methods
    return reasons + [f"{code} is not the library's, and may treat rows differently" for code in foreign]


def _replaced_forward(name: str, module: nn.Module) -> list[str]:
    """A forward that the program has put in the place of this module's, also where accelerate's hooks run before it."""
    forwards = (vars(module).get(attribute) for attribute in ("forward", "_old_forward"))
    replaced = any(_package(forward) not in (None, *_KNOWN_PACKAGES) for forward in forwards)
    return [f"the forward of {_named(name)}"] if replaced else []


def _foreign_class(name: str, module: nn.Module) -> list[str]:
    """A module of the program's own in a model of the library, or a class whose forward the program has replaced."""
    if _package(type(module)) not in _KNOWN_PACKAGES:
        return [f"{_named(name)} ({type(module).__module__}.{type(module).__qualname__})"]
    if isinstance(module, torch.jit.ScriptModule):  # its class has no forward to look at
        return [f"{_named(name)} (TorchScript)"]
    known = _package(type(module).forward) in (None, *_KNOWN_PACKAGES)
    return [] if known else [f"the forward of {_named(name)}"]


def _named(name: str) -> str:
    return f"module {name}" if name else "the model"


def _foreign_attention(module: nn.Module) -> str | None:
    """The name of an attention function that the program has registered, if the module is set to it."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    function = ALL_ATTENTION_FUNCTIONS.get(name) if isinstance(name, str) else None
    return None if _package(function) in (None, *_KNOWN_PACKAGES) else name


def _package(code: object) -> str | None:
    """The package of a class, or of the function that runs first in a call.

    A function's globals tell, because `functools.wraps` gives a wrapper the `__module__` of what it wraps.
    """
    while isinstance(code, functools.partial):
        code = code.func
    module = getattr(code, "__globals__", {}).get("__name__") or getattr(code, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else None


def _unknown_hooks(module: nn.Module) -> list[str]:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # inside a functools.partial
    placed = vars(module).get("_hf_hook")  # accelerate's ModelHook, or several in a SequentialHook
    functions += [type(hook) for hook in getattr(placed, "hooks", [] if placed is None else [placed])]
    names = [f"{getattr(f, '__module__', '?')}.{getattr(f, '__qualname__', type(f).__name__)}" for f in functions]
    return [name for name in names if name.partition(".")[0] not in _KNOWN_HOOKS]
