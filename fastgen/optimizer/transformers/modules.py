"""What is switched on inside a model and makes a forward of one row per input differ from one of all rows."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgen.ops.transforms import is_watched

# Packages whose modules and forwards treat every row alike, whatever the number of rows.
_KNOWN_PACKAGES = (
    "transformers", "torch", "torchvision", "torchaudio", "timm", "peft", "accelerate", "bitsandbytes", "torchao",
    "optimum", "hqq", "gptqmodel", "auto_gptq", "awq", "kernels", "liger_kernel", "fastgen",
)  # fmt: skip

# Python's own wrappers, which are as good as what they wrap.
_NEUTRAL = sys.stdlib_module_names - {"__main__"} | {"typing_extensions"}

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
    hooks = [found for module in modules.values() for found in _hooks(module)]
    hooks += [*module_hooks._global_forward_pre_hooks.values(), *module_hooks._global_forward_hooks.values()]
    hook = next((name for name in map(_qualified_name, hooks) if name.partition(".")[0] not in _KNOWN_HOOKS), None)
    if hook is not None:
        reasons.append(f"the model has a forward hook, which would see fewer rows: {hook}")
    if is_watched() or torch._C._len_torch_dispatch_stack():
        reasons.append("a mode of torch that the program has entered would see fewer rows")
    foreign = [reason for name, module in modules.items() for reason in _replaced_forward(name, module)]
    if "transformers" in _packages(type(model)):  # other classes are verified
        foreign += [reason for name, module in modules.items() for reason in _foreign_class(name, module)]
        attention = next((name for module in modules.values() if (name := _foreign_attention(module))), None)
        foreign += [f"attention function {attention}"] if attention else []
        foreign = foreign[:1] + [name for name in _METHODS if not _is_known(getattr(model, name, None))]
    return reasons + [f"{code} is not the library's, and may treat rows differently" for code in foreign]


def _replaced_forward(name: str, module: nn.Module) -> list[str]:
    """A forward that the program has put in the place of this module's, also where accelerate's hooks run before it."""
    forwards = (vars(module).get(attribute) for attribute in ("forward", "_old_forward"))
    return [] if all(map(_is_known, forwards)) else [f"the forward of {_named(name)}"]


def _foreign_class(name: str, module: nn.Module) -> list[str]:
    """A module of the program's own in a model of the library, or a class whose forward the program has replaced."""
    if not _is_known(type(module)):
        return [f"{_named(name)} ({type(module).__module__}.{type(module).__qualname__})"]
    if isinstance(module, torch.jit.ScriptModule):  # its class has no forward to look at
        return [f"{_named(name)} (TorchScript)"]
    known = _is_known(type(module).forward) and _is_known(type(module).__call__)
    return [] if known else [f"the forward of {_named(name)}"]


def _named(name: str) -> str:
    return f"module {name}" if name else "the model"


def _foreign_attention(module: nn.Module) -> str | None:
    """The name of an attention or mask function that the program has registered, if the module is set to it."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if not isinstance(name, str):
        return None
    known = all(_is_known(functions.get(name)) for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS))
    return None if known else name


def _is_known(code: object) -> bool:
    return _packages(code) <= _NEUTRAL.union(_KNOWN_PACKAGES)


def _packages(code: object) -> set[str]:
    """The packages of a class, or of all functions and objects that a call runs through.

    A function's globals tell, because `functools.wraps` gives a wrapper the `__module__` of what it wraps.
    """
    packages = set()
    while code is not None:
        kind = type(code)  # not isinstance, to which wrapt's proxies say that they are what they wrap
        if kind is types.MethodType or issubclass(kind, functools.partial):
            code = code.__func__ if kind is types.MethodType else code.func
            continue
        if kind is types.FunctionType:
            module, code = code.__globals__.get("__name__"), vars(code).get("__wrapped__")
        elif issubclass(kind, (type, types.BuiltinFunctionType)):
            module, code = code.__module__, None
        else:
            module, code = kind.__module__, getattr(code, "__wrapped__", None)
        packages.add(str(module).partition(".")[0])
    return packages


def _hooks(module: nn.Module) -> list[object]:
    """Its forward hooks, and the classes of what accelerate runs before and after its forward."""
    placed = vars(module).get("_hf_hook")
    classes = [] if placed is None else [type(hook) for hook in _single_hooks(placed)]
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *classes]


def _single_hooks(placed: Any) -> list[Any]:
    """accelerate's ModelHook as a list, or those inside of a SequentialHook, however deep."""
    return [hook for part in getattr(placed, "hooks", ()) for hook in _single_hooks(part)] or [placed]


def _qualified_name(hook: object) -> str:
    hook = getattr(hook, "func", hook)  # inside a functools.partial
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__name__)}"
