"""Facts about a model that a call of `generate` needs, from one walk over its modules.

They are valid until user code replaces something that `ModelFacts.is_current` compares. That is checked once per call
(`GenerateCall.facts_of`). If user code runs between steps, a `Snapshot` of the model is compared before each captured
step (`GenerateCall.has_changed`).

Tests: tests/optimizer/decoding/test_model_facts.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.weight_norm import WeightNorm

from fastgen.optimizer.decoding.report import Reason
from fastgen.optimizer.decoding.snapshot import (
    ADDRESS,
    COLLECTIONS,
    HOOKS_OF_ALL,
    LAYOUT,
    MAPPINGS,
    Snapshot,
    of_tensors,
)
from fastgen.optimizer.decoding.user_code import (
    KnownCode,
    are_current,
    is_from,
    named,
    namespaces,
    qualified_name,
    reference,
    replaced,
)
from fastgen.provenance import packages_of

_VALUES = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
_TENSORS = frozenset({Tensor, nn.Parameter})
_CONFIGURATIONS = ("config", "cfg", "args")

# Prefixes of attributes that no forward reads. The first two say how hooks are called.
_UNREAD = ("_forward_hooks_", "_forward_pre_hooks_", "_load_state_dict", "_state_dict")


class _Attributes(NamedTuple):
    """An object's attributes by name: simple ones are constants and empty collections; others are described.

    get: reads the simple ones, which are compared with their values in C. size: the number of all attributes.
    """

    get: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]
    simple: list[str]
    others: list[str]
    size: int


def _attributes_of(space: Mapping[str, Any], ignored: frozenset[str]) -> _Attributes:
    """Returns an object's attributes, without those that no forward reads or that fastgen sets for a call."""
    simple: list[str] = []
    others: list[str] = []
    values: list[Any] = []
    size = len(space)
    for name, value in space.items():
        kind = type(value)
        if name in ignored or name.startswith(_UNREAD):
            continue
        if kind in _VALUES or (kind in COLLECTIONS and (not value or (kind is tuple and _are_plain(value)))):
            simple.append(name)
            values.append(value if value or kind in _VALUES else kind())
        elif kind.__module__.startswith("fastgen.optimizer."):
            size = -1  # fastgen will remove or replace it
        else:
            others.append(name)
    # A getter of several names returns a tuple.
    get = itemgetter(simple[0], *simple) if simple else lambda space: ()
    return _Attributes(get, (*values[:1], *values), simple, others, size)


def _add(value: Any, values: list[Any], tensors: list[Any], identity: Callable[[Any], Any]) -> None:
    """Adds a constant, the items of a collection, or the identity of another object."""
    kind = type(value)
    if kind in _VALUES:
        values.append(value)
    elif kind is set or kind is frozenset:
        values.append(frozenset(value if _are_plain(value) else map(identity, value)))
    elif kind in COLLECTIONS:
        items = [*value, *value.values()] if kind in MAPPINGS else value
        values.append(len(items))
        if _are_plain(items):
            values += items
        else:
            for item in items:
                _add(item, values, tensors, identity)
    elif isinstance(value, Tensor):
        tensors.append(value)
    else:
        values.append(identity(value))


def _are_plain(values: Iterable[Any]) -> bool:
    return _VALUES.issuperset(map(type, values))


def _kind(value: Any) -> Any:
    function = value.__func__ if type(value) is MethodType else value
    return reference(function) if isinstance(function, (FunctionType, BuiltinFunctionType, type)) else type(value)


class ModelFacts:
    """The results of one walk over a model's modules, and what is compared to tell if user code has replaced any.

    The modules, the code that they run, and the attributes of both and of configurations are compared. Constants and
    the library's code are stored; modules, user code and all other objects are held by weak reference. What user code
    reads elsewhere is not followed.

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

    Results of attempts: prefix_reasons: why the beginning of a prompt cannot be computed apart from the rest, by the
    type of its tokens, None if they have no types; row_states: why rows cannot be expanded after a prefill, None before
    the first one.
    """

    row_states: list[Reason] | None = None

    def __init__(self, model: nn.Module, known_code: KnownCode) -> None:
        modules = dict(model.named_modules())
        self._compare_later(modules, known_code)
        self.prefix_reasons: dict[int | None, list[Reason]] = {}
        self.in_training = [name for name, module in modules.items() if module.training]
        self.training = next(filter(None, (_switched_on(name, modules[name]) for name in self.in_training)), None)
        self.compiled = [name for name, module in modules.items() if _is_compiled(module)]
        hooks = [(name, hook) for name, module in modules.items() for hook in _hooks(module)]
        hooks += [(None, hook) for hooks in HOOKS_OF_ALL for hook in hooks.values()]
        self.hooks = [(name, qualified_name(hook)) for name, hook in hooks if not packages_of(hook) <= known_code.hooks]
        scaling = next((name for name, module in modules.items() if _scales_all_rows(module)), None)
        self.coupled = (
            None if scaling is None else f"{named(scaling)} scales its input by the largest number of all rows"
        )
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
        self.replaced = replaced(modules, known_code)
        functions = known_code.registered(self._registered_names)
        others = [qualified_name(function) for function in functions if not is_from(function, known_code.packages)]
        self.foreign = sorted(what for namespace in self._code for what in namespace.foreign)
        self.foreign += [f"registered function {name}" for name in others]
        self.user_code = [what for _, what in self.replaced + self.foreign_classes] + self.foreign
        hooked = {name for name, hook in hooks if type(hook) is not WeightNorm}
        foreign = {name for name, _ in self.foreign_classes + self.replaced}
        self.altered = hooked | foreign | {*self.compiled} | ({None} if self.foreign else set())

    def _compare_later(self, modules: dict[str, nn.Module], known_code: KnownCode) -> None:
        """Stores what `is_current` compares."""
        self.known_code, self._names = known_code, list(modules)
        self.kinds = dict.fromkeys(map(type, modules.values()))
        bases = dict.fromkeys(base for kind in self.kinds for base in kind.__mro__)
        user_classes = [base for base in bases if not packages_of(base) <= known_code.packages]
        self._code = namespaces([base for base in bases if base not in user_classes], known_code)
        self._registered_names = known_code.keys(modules.values())
        holders: list[Any] = [*modules.values(), *user_classes]
        self._attributes: list[_Attributes] = []
        configurations = set()
        for holder in holders:  # the loop appends configurations
            self._attributes.append(_attributes_of(vars(holder), known_code.not_of_a_step))
            for name in self._attributes[-1].others:
                value = vars(holder)[name]
                if name.endswith(_CONFIGURATIONS) and hasattr(value, "__dict__") and id(value) not in configurations:
                    configurations.add(id(value))
                    holders.append(value)
        self._holders, self._types = list(map(reference, holders)), list(map(type, holders))
        others = [(index, name) for index, each in enumerate(self._attributes) for name in each.others]
        self._with_parameters = [index for index, name in others if name == "_parameters"]
        self._with_modules = [index for index, name in others if name == "_modules"]
        self._not_of_torch = [pair for pair in others if pair[1] not in ("_parameters", "_modules")]
        self._simple = [attributes.values for attributes in self._attributes]
        self._others = self._described(holders, of_instance=True)

    def snapshot(self) -> Snapshot:
        """Returns what the modules, users' classes and configurations hold now, if `is_current`."""
        return Snapshot(list(map(ref.__call__, self._holders)))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that still exist, by name."""
        modules = zip(self._names, map(ref.__call__, self._holders))
        return {name: module for name, module in modules if module is not None}

    def is_current(self) -> bool:
        """Whether nothing was replaced since the walk."""
        try:
            holders = list(map(ref.__call__, self._holders))
            if list(map(type, holders)) != self._types or not are_current(self._code):
                return False
            spaces = [holder.__dict__ for holder in holders]
            if [attributes.get(space) for attributes, space in zip(self._attributes, spaces)] != self._simple:
                return False
            for space, attributes in zip(spaces, self._attributes):
                if len(space) != attributes.size:
                    added = space.keys() - {*attributes.simple, *attributes.others}
                    new = _attributes_of({name: space[name] for name in added}, self.known_code.not_of_a_step)
                    if new.simple or new.others:
                        return False
            return self._described(holders, of_instance=True) == self._others
        except Exception:  # an attribute was deleted, or users' objects cannot be compared
            return False

    def likeness(self) -> tuple[Any, ...]:
        """Returns a key that is equal for models of one class with the same configuration, flags, shapes and dtypes.

        It contains everything that is compared except addresses, and the identities of modules and other objects.
        """
        holders = list(map(ref.__call__, self._holders))
        names = [name for attributes in self._attributes for name in attributes.simple + attributes.others]
        values = [value for attributes in self._attributes for value in attributes.values]
        constants = [value for value in values if value or type(value) in _VALUES]
        return *self._code, *self._types, *names, *constants, *self._described(holders, of_instance=False)

    def _described(self, holders: list[Any], of_instance: bool) -> list[Any]:
        """Returns the attributes that are not constants, the host's registered functions, and torch's global hooks."""
        # `id` identifies a module, because all of them still exist.
        identity, identity_of_module = (reference, id) if of_instance else (_kind, type)
        values: list[Any] = []
        tensors: list[Any] = []
        try:
            _add([*self.known_code.registered(self._registered_names), *HOOKS_OF_ALL], values, tensors, identity)
            parameters = [holders[index].__dict__["_parameters"] for index in self._with_parameters]
            modules = [holders[index].__dict__["_modules"] for index in self._with_modules]
            values += chain.from_iterable(parameters + modules)
            values += map(identity_of_module, chain.from_iterable(map(dict.values, modules)))
            tensors += chain.from_iterable(map(dict.values, parameters))
            for index, name in self._not_of_torch:
                _add(holders[index].__dict__[name], values, tensors, identity)
            tensors = [tensor for tensor in tensors if tensor is not None]
            values += [identity(tensor) for tensor in tensors if type(tensor) not in _TENSORS]
            return values + of_tensors(tensors, ADDRESS if of_instance else LAYOUT)
        except Exception:  # an attribute contains itself, or cannot be read
            return [object()]  # equals no other

    def row_tensors(self) -> dict[tuple[int, str], Tensor]:
        """Returns the tensors that modules hold as plain attributes, where some models store states of their rows."""
        tensors: dict[tuple[int, str], Tensor] = {}
        for module in self.modules.values():
            for name, value in vars(module).items():
                parts: Any = ()
                if isinstance(value, Tensor):
                    parts = (("", value),)
                elif isinstance(value, (list, tuple)):
                    parts = enumerate(value)
                elif isinstance(value, dict) and name not in ("_parameters", "_buffers", "_modules"):
                    parts = value.items()
                for part, tensor in parts:
                    if isinstance(tensor, Tensor):
                        tensors[id(module), f"{type(module).__name__}.{name}.{part}".rstrip(".")] = tensor
        return tensors


_facts: WeakKeyDictionary[nn.Module, ModelFacts] = WeakKeyDictionary()


def facts_of(model: nn.Module, known_code: KnownCode) -> ModelFacts:
    """Returns cached facts if they are still valid, see the rule above; otherwise walks the modules again."""
    before = _facts.get(model)
    if before is not None and before.known_code is known_code and before.is_current():
        return before
    facts = _facts[model] = ModelFacts(model, known_code)
    if before is not None:
        facts.row_states = before.row_states or None  # reasons remain; a changed model may store more
    return facts


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
