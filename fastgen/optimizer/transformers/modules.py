"""What is switched on inside a model and makes a forward of one row per input differ from one of all rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgen.ops.transforms import is_watched
from fastgen.optimizer.transformers import training
from fastgen.optimizer.transformers.verification import is_known_class
from fastgen.origin import PYTHON, packages_of

# Packages whose modules and forwards treat every row alike, whatever the number of rows.
_KNOWN_PACKAGES = PYTHON | {
    "transformers", "torch", "torchvision", "torchaudio", "timm", "peft", "accelerate", "bitsandbytes", "torchao",
    "optimum", "hqq", "gptqmodel", "auto_gptq", "awq", "kernels", "liger_kernel", "trl", "fastgen",
}  # fmt: skip

# Methods of the model itself that a program may have replaced.
_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")

# Packages whose hooks care for no row: captured outputs, weight norms, pruning, moves to a device, partials of these.
_KNOWN_HOOKS = {"transformers", "torch", "accelerate", "functools", "trl"}


def unsupported_reasons(model: nn.Module) -> list[str]:
    """Why a forward of fewer rows would not give what one of all rows gives; empty if it does."""
    modules = dict(model.named_modules())
    reasons = training.reasons(modules)
    hooks = [found for module in modules.values() for found in _hooks(module)]
    hooks += [*module_hooks._global_forward_pre_hooks.values(), *module_hooks._global_forward_hooks.values()]
    names = [_qualified_name(hook) for hook in hooks if not packages_of(hook) <= _KNOWN_HOOKS]
    reasons += [f"the model has a forward hook, which would see fewer rows: {name}" for name in names[:1]]
    if is_watched() or torch._C._len_torch_dispatch_stack():
        reasons.append("a mode of torch that the program has entered would see fewer rows")
    foreign = [reason for name, module in modules.items() for reason in _replaced_forward(name, module)]
    if is_known_class(model):  # other classes are verified
        first = {type(module): name for name, module in reversed(modules.items())}  # of each class
        foreign += [reason for kind, name in first.items() for reason in _foreign_class(name, kind)]
        foreign += [f"attention function {name}" for name in _foreign_attentions(modules.values())]
        foreign = foreign[:1] + [name for name in _METHODS if not _is_known(getattr(model, name, None))]
    return reasons + [f"{code} is not the library's, and may treat rows differently" for code in foreign]


def _replaced_forward(name: str, module: nn.Module) -> list[str]:
    """A forward that the program has put in the place of this module's, also where accelerate's hooks run before it."""
    forwards = (vars(module).get(attribute) for attribute in ("forward", "_old_forward"))
    return [] if all(map(_is_known, forwards)) else [f"the forward of {_named(name)}"]


def _foreign_class(name: str, kind: type[nn.Module]) -> list[str]:
    """A module of the program's own in a model of the library, or a class whose forward the program has replaced."""
    if not _is_known(kind):
        return [f"{_named(name)} ({kind.__module__}.{kind.__qualname__})"]
    if issubclass(kind, torch.jit.ScriptModule):  # it has no forward to look at
        return [f"{_named(name)} (TorchScript)"]
    return [] if _is_known(kind.forward) and _is_known(kind.__call__) else [f"the forward of {_named(name)}"]


def _named(name: str) -> str:
    return f"module {name}" if name else "the model"


def _foreign_attentions(modules: Iterable[nn.Module]) -> list[str]:
    """The names of attention and mask functions that the program has registered, if a module is set to them."""
    names = {str(getattr(getattr(module, "config", None), "_attn_implementation", None)) for module in modules}
    registered = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    return sorted(name for name in names if not all(_is_known(functions.get(name)) for functions in registered))


def _is_known(code: object) -> bool:
    return packages_of(code) <= _KNOWN_PACKAGES


def _hooks(module: nn.Module) -> list[object]:
    """Its forward hooks, and what accelerate runs before and after its forward."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return hooks + _single_hooks(vars(module)["_hf_hook"]) if "_hf_hook" in vars(module) else hooks


def _single_hooks(placed: Any) -> list[Any]:
    """accelerate's ModelHook as a list, or those inside of a SequentialHook, however deep."""
    return [hook for part in getattr(placed, "hooks", ()) for hook in _single_hooks(part)] or [placed]


def _qualified_name(hook: object) -> str:
    hook = getattr(hook, "func", hook)  # inside a functools.partial
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__name__)}"
