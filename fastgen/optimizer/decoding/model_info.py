"""Facts about a model that a call of `generate` needs, from one walk over its modules.

They are valid until a program replaces something that the model's `Guards` compare: once per call
(`GenerateCall.facts_of`), and before a captured step if user code runs between steps (`GenerateCall.change_of`).

Tests: tests/optimizer/decoding/test_model_info.py
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.weight_norm import WeightNorm

from fastgen.optimizer.decoding.guards import GLOBAL_HOOKS, OUTSIDE, Guards, KnownCode, is_from, qualified_name
from fastgen.optimizer.decoding.report import PREFIX, Reason
from fastgen.provenance import packages_of

# The key in `ModelInfo.proofs` of a prefill with fewer rows, which are expanded afterwards.
FEWER_ROWS = ("fewer rows",)

# The methods through which a module is called.
_ENTRIES = frozenset({"forward", "_old_forward", "__call__"})


class ModelInfo:
    """The results of one walk over a model's modules, and the `guards` that tell whether they are still valid.

    kinds: the classes of the modules.
    compiled, in_training: the names of modules that are compiled or in training mode, "" for the model. training: what
    training mode switches on that makes rows differ. foreign_in_training: a module of a user's class in training mode,
    which may do anything there. devices: the devices of all weights and buffers. coupled: why the rows of a batch
    influence each other; None if nothing is known to do so.
    hooks: forward hooks that may depend on the number of rows, with the name of their module, None for global hooks.
    foreign_classes: modules of users' classes, with their names. replaced: what user code has set on single modules,
    with their names. foreign: what user code has put into the library's classes, files and registries. user_code: the
    last three, in words. altered: the names of modules that do not run the library's code alone; contains None if that
    is true of all modules, because of global hooks or code in the library's files.

    proofs: for each way that was tried on this model, the reasons not to use it, none if results were equal. Keys:
    `FEWER_ROWS`; `(PREFIX, token type or None, whether padding follows)`; `(DRAFTS, whether the cache is static, kind
    of call)`.
    """

    def __init__(self, model: nn.Module, known_code: KnownCode) -> None:
        modules = dict(model.named_modules())
        self._modules = {name: ref(module) for name, module in modules.items()}
        self.guards, self.kinds = Guards(modules, known_code), dict.fromkeys(map(type, modules.values()))
        self.proofs: dict[tuple[Any, ...], list[Reason]] = {}
        self.in_training = [name for name, module in modules.items() if module.training]
        self.training = next(filter(None, (_switched_on(name, modules[name]) for name in self.in_training)), None)
        self.compiled = [name for name, module in modules.items() if _is_compiled(module)]
        hooks = [(name, hook) for name, module in modules.items() for hook in _hooks(module)]
        hooks += [(None, hook) for hooks in GLOBAL_HOOKS.values() for hook in hooks.values()]
        self.hooks = [(name, qualified_name(hook)) for name, hook in hooks if not packages_of(hook) <= known_code.hooks]
        scaling = [named(name) for name, module in modules.items() if _scales_all_rows(module)]
        self.coupled = f"{scaling[0]} scales its input by the largest number of all rows" if scaling else None
        self.is_sharded = any(type(module).__module__.startswith("torch.distributed.") for module in modules.values())
        tensors = [(*module._parameters.values(), *module._buffers.values()) for module in modules.values()]
        self.devices = {tensor.device for module_tensors in tensors for tensor in module_tensors if tensor is not None}
        self.foreign_classes: list[tuple[str, str]] = []
        for name, module in modules.items():
            kind = type(module)
            if isinstance(module, torch.jit.ScriptModule):  # it has no Python code to check
                self.foreign_classes.append((name, f"{named(name)} (TorchScript)"))
            elif not packages_of(kind) <= known_code.packages:
                self.foreign_classes.append((name, f"{named(name)} ({kind.__module__}.{kind.__qualname__})"))
        self.foreign_in_training = next((name for name, _ in self.foreign_classes if modules[name].training), None)
        self.replaced = _replaced(modules, known_code)
        functions = [read() for read in self.guards.registered.values()]
        foreign_functions = [
            qualified_name(function) for function in functions if not is_from(function, known_code.packages)
        ]
        self.foreign = sorted(f"{code.path}.{name}" for code in self.guards.code for name in code.user_code)
        self.foreign += [f"registered function {name}" for name in foreign_functions]
        self.user_code = [what for _, what in self.replaced + self.foreign_classes] + self.foreign
        hooked = {name for name, hook in hooks if type(hook) is not WeightNorm}
        foreign = {name for name, _ in self.foreign_classes + self.replaced}
        self.altered = hooked | foreign | {*self.compiled} | ({None} if self.foreign else set())

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that still exist, by name."""
        modules = {name: reference() for name, reference in self._modules.items()}
        return {name: module for name, module in modules.items() if module is not None}

    def row_tensors(self) -> dict[tuple[int, str], Tensor]:
        """Returns the tensors that modules hold as plain attributes, where some models store states of their rows."""
        tensors: dict[tuple[int, str], Tensor] = {}
        for module in self.modules.values():
            for name, value in vars(module).items():
                items: Iterable[tuple[Any, Any]] = (("", value),)
                if isinstance(value, (list, tuple)):
                    items = enumerate(value)
                elif isinstance(value, dict) and name not in ("_parameters", "_buffers", "_modules"):
                    items = value.items()
                for key, tensor in items:
                    if isinstance(tensor, Tensor):
                        tensors[id(module), f"{type(module).__name__}.{name}.{key}".rstrip(".")] = tensor
        return tensors


_facts: WeakKeyDictionary[nn.Module, ModelInfo] = WeakKeyDictionary()


def facts_of(model: nn.Module, known_code: KnownCode) -> ModelInfo:
    """Returns the model's cached facts if they are still valid; otherwise walks over its modules again."""
    previous = _facts.get(model)
    if previous is not None and previous.guards.known_code is known_code and previous.guards.check() is None:
        return previous
    facts = _facts[model] = ModelInfo(model, known_code)
    if previous is not None:  # what was right is tried again: a changed model may store more
        facts.proofs.update((use, reasons) for use, reasons in previous.proofs.items() if reasons and use[0] != PREFIX)
    return facts


def last_facts_of(model: nn.Module) -> ModelInfo | None:
    """Returns the facts that an earlier call has requested, which may no longer be valid."""
    return _facts.get(model)


def named(name: str) -> str:
    """Returns a module's name for messages."""
    return f"module {name}" if name else "the model"


def _replaced(modules: Mapping[str, nn.Module], known_code: KnownCode) -> list[tuple[str, str]]:
    """Returns the methods and functions that user code has set on single modules, with the modules' names."""
    replacements = []
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if callable(value) and attribute not in OUTSIDE and not is_from(value, known_code.packages):
                if attribute in _ENTRIES:
                    replacements.append((name, f"the forward of {named(name)}"))
                elif packages_of(type(module)) <= known_code.packages:
                    replacements.append((name, f"{attribute} of {named(name)}"))
    return replacements


def _hooks(module: nn.Module) -> list[object]:
    """Returns a module's forward hooks, and accelerate's hooks around its forward."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return hooks + _single_hooks(vars(module)["_hf_hook"]) if "_hf_hook" in vars(module) else hooks


def _single_hooks(placed: Any) -> list[Any]:
    """Returns accelerate's ModelHook as a list; unpacks a SequentialHook at any depth."""
    return [hook for part in getattr(placed, "hooks", ()) for hook in _single_hooks(part)] or [placed]


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by `module.compile()`, or by `torch.compile` of it or of its forward."""
    if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
        return True
    forward = vars(module).get("forward", getattr(type(module), "forward", None))
    return hasattr(forward, "_torchdynamo_orig_callable")


def _switched_on(name: str, module: nn.Module) -> str:
    """Returns what training mode switches on in a module that makes equal rows differ, or rows depend on each other.

    Reinforcement learning generates in training mode with models without dropout: there it is empty.
    """
    what = ""
    if isinstance(module, _DropoutNd):
        what = f"p={module.p:g}, where rows differ" if module.p else ""
    elif isinstance(module, _BatchNorm):
        what = "batch normalization, where rows depend on each other"
    elif isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        what = f"random numbers in {type(module).__name__}"
    elif getattr(module, "gradient_checkpointing", False):
        what = "gradient checkpointing, where the library keeps no cache"
    else:
        config = getattr(module, "config", None)
        for read in (*_random_names_read(module.__class__), *filter(_is_random, vars(module))):
            value = vars(module).get(read, getattr(config, read, None))
            if isinstance(value, (int, float)) and value > 0:
                what = f"{read}={value:g}, where rows differ"
                break
    return what and f"{name or 'the model'} is in training mode with {what}"


def _scales_all_rows(module: nn.Module) -> bool:
    """Whether the module is from `torch.ao.quantization.quantize_dynamic`."""
    kind = type(module).__module__
    return kind.startswith(("torch.ao.nn.quantized.dynamic.", "torch.ao.nn.intrinsic.quantized.dynamic."))


def _is_random(name: str) -> bool:
    """Whether a number of this name controls randomness: dropout, layerdrop, router_jitter_noise."""
    return "drop" in name or "jitter" in name


@functools.cache
def _random_names_read(kind: type) -> frozenset[str]:
    """Returns the names of configuration attributes that the methods of a class read, if they control randomness.

    Configurations contain more than is used: GPT-2's has dropouts of its heads for classification.
    """
    names: set[str] = set()
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if name != "__init__" and hasattr(value, "__code__"):
                names.update(filter(_is_random, inspect.unwrap(value).__code__.co_names))
    return frozenset(names)
