"""What is switched on inside a model and makes a forward of one row per input differ from one of all rows."""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Packages whose modules and forwards treat every row alike, whatever the number of rows.
_KNOWN_PACKAGES = (
    "transformers", "torch", "torchvision", "torchaudio", "timm", "peft", "accelerate", "bitsandbytes", "torchao",
    "optimum", "hqq", "gptqmodel", "auto_gptq", "awq", "kernels", "liger_kernel",
)  # fmt: skip

# Methods of the model itself that a program may have replaced.
_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")

# Packages whose hooks care for no row: captured outputs, weight normalisation, pruning.
_KNOWN_HOOKS = ("transformers", "torch")


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
    if _package(type(model)) == "transformers":  # other classes are verified
        foreign = next((reason for name, module in modules.items() for reason in _foreign_code(name, module)), None)
        methods = [name for name in _METHODS if _package(getattr(model, name, None)) not in (None, *_KNOWN_PACKAGES)]
        attention = next((name for module in modules.values() if (name := _foreign_attention(module))), None)
        foreign = foreign or (attention and f"attention function {attention}")
        if foreign is not None:
            reasons.append(f"{foreign} is not the library's, and may treat rows differently")
        reasons += [f"{name} is not the library's, and may treat rows differently" for name in methods]
    return reasons


def _foreign_code(name: str, module: nn.Module) -> list[str]:
    """What the program has put in the place of a module of the library, or of its forward."""
    if _package(type(module)) not in _KNOWN_PACKAGES:
        return [f"module {name} ({type(module).__module__}.{type(module).__qualname__})"]
    if isinstance(module, torch.jit.ScriptModule):
        return [f"module {name} (TorchScript)"]
    if not name:  # the model itself, whose forward is often wrapped to watch it
        return []
    forward = vars(module).get("forward", type(module).forward)
    forward = getattr(forward, "func", forward)  # inside a functools.partial
    return [] if _package(forward) in (None, *_KNOWN_PACKAGES) else [f"the forward of module {name}"]


def _foreign_attention(module: nn.Module) -> str | None:
    """The name of an attention function that the program has registered, if the module is set to it."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    function = ALL_ATTENTION_FUNCTIONS.get(name) if isinstance(name, str) else None
    return None if _package(function) in (None, *_KNOWN_PACKAGES) else name


def _package(code: object) -> str | None:
    module = getattr(code, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else None


def _unknown_hooks(module: nn.Module) -> list[str]:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # inside a functools.partial
    names = [f"{getattr(f, '__module__', '?')}.{getattr(f, '__qualname__', type(f).__name__)}" for f in functions]
    return [name for name in names if name.partition(".")[0] not in _KNOWN_HOOKS]
