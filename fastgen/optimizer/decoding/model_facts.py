"""What must be known of a model in a call of `generate`, from one walk over its modules.

What invalidates it, the one rule: facts hold as long as the model's fingerprint is the same. That is made of the class
and all attributes of each module (hooks, adapters, training flags, submodules, compiled calls), the contents of its
configurations, the address, shape, strides and type of each tensor, torch's global hooks, and the functions that the
classes' code can call (`user_code`). A weight that is written in place keeps its address, where captured steps read it.
What fastgen puts on modules for the time of a call is left out.

A call compares once (`GenerateCall.facts_of`); where code of the program runs in each step, in each captured step. The
size alone is looked up again only where the first weight has changed its type or device: it decides about speed, never
about results. Tests: tests/optimizer/decoding/test_model_facts.py.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.weight_norm import WeightNorm

from fastgen.ops import cpu_linear
from fastgen.optimizer.decoding.reasons import Reason
from fastgen.optimizer.decoding.user_code import ENTRIES, LibraryCode, library_code, replaced_attributes
from fastgen.provenance import packages_of

_VALUES = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
_TENSORS = frozenset({Tensor, nn.Parameter})
_MAPPINGS = frozenset({dict, OrderedDict})
_COLLECTIONS = _MAPPINGS | {list, tuple, set, frozenset}
_CONFIGURATIONS = ("config", "cfg", "args")

# Of all modules of the process.
_HOOKS_OF_ALL = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)

# What describes one call of generate, and a mask that a prefill may make longer: no decode step reads them.
_NOT_OF_A_STEP = frozenset({"generation_config", "_future_mask"})

# In the names of numbers that say how much is left out or added at random: dropout, layerdrop, router_jitter_noise.
_RANDOM = ("drop", "jitter")


@dataclass(frozen=True)
class ModelSize:
    """modules: how many. weights: elements that a token of a prefill is multiplied with. step: those of a decode step,
    which has an output layer. large: elements of large weights that oneDNN may multiply with, on a CPU. bytes: of all
    weights.
    """

    modules: int
    weights: int
    step: int
    large: int
    bytes: int


@dataclass(frozen=True)
class KnownCode:
    """What a host knows of the code in its models.

    packages: whose modules and forwards treat every row alike, whatever the number of rows. hooks: those whose hooks
    care for no row. entries: methods of the model that a step calls beside its forward. keys, registered: under which
    names modules call functions of the host's registries, and the functions under these names.
    """

    packages: frozenset[str]
    hooks: frozenset[str] = frozenset()
    entries: frozenset[str] = frozenset()
    keys: Callable[[Iterable[nn.Module]], frozenset[str]] = lambda modules: frozenset()
    registered: Callable[[frozenset[str]], tuple[Callable, ...]] = lambda keys: ()

    def has(self, code: object) -> bool:
        return packages_of(code) <= self.packages


class ModelFacts:
    """What one walk over a model's modules has found.

    compiled, in_training: the names of modules that are compiled or in training mode, "" for the model. training: what
    training mode switches on that makes rows differ. devices: of all weights and buffers.
    Each with the name of its module: hooks: forward hooks that may care how many rows they see, None for those of all
    modules; hooked: with any hook but weight norm's; foreign_classes: modules of the program's own classes; replaced:
    what the program has put in the place of the library's functions on single modules. What it has put into the
    library's classes and files: `code.foreign`. prefix_reasons: why the beginning of a prompt cannot be computed
    apart from the rest; None until a host has tried.
    """

    prefix_reasons: list[Reason] | None = None

    def __init__(self, model: nn.Module, known: KnownCode) -> None:
        modules = dict(model.named_modules())
        self.known = known
        self._modules = [(name, ref(module)) for name, module in modules.items()]
        self.keys = known.keys(modules.values())
        self.code, self.fingerprint = _fingerprint(list(modules.values()), known, self.keys)
        self.in_training = [name for name, module in modules.items() if module.training]
        self.training = next(_switched_on(modules, self.in_training), None)
        self.compiled = [name for name, module in modules.items() if _is_compiled(module)]
        hooks = [(name, hook) for name, module in modules.items() for hook in _hooks(module)]
        hooks += [(None, hook) for hooks in _HOOKS_OF_ALL for hook in hooks.values()]
        self.hooks = [(name, _qualified_name(hook)) for name, hook in hooks if not packages_of(hook) <= known.hooks]
        self.hooked = {name for name, hook in hooks if type(hook) is not WeightNorm}
        self.is_sharded = any(type(module).__module__.startswith("torch.distributed.") for module in modules.values())
        self.devices = {tensor.device for module in modules.values() for tensor in _tensors_of(module)}
        foreign = ((name, type(module)) for name, module in modules.items() if not _is_library(type(module), known))
        self.foreign_classes = [(name, f"{named(name)} ({_kind_of_foreign(kind)})") for name, kind in foreign]
        self.replaced = list(_replaced(modules, self.code.names, known))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """By name; those that are still there."""
        return {name: module for name, found in self._modules if (module := found()) is not None}

    def is_current(self) -> bool:
        """Whether nothing was replaced since."""
        modules = list(self.modules.values())
        if len(modules) < len(self._modules):
            return False
        _, found = _fingerprint(modules, self.known, self.keys)
        return same(found, self.fingerprint)

    @functools.cached_property
    def altered(self) -> frozenset[str | None]:
        """The names of modules that are not only the library's code: hooked, compiled, replaced or of the program's own
        classes. None is among them where all modules are: by torch's global hooks, or by code in the library's files.
        """
        foreign = {name for name, _ in self.foreign_classes + self.replaced}
        return frozenset(self.hooked | foreign | {*self.compiled} | ({None} if self.code.foreign else set()))

    @functools.cached_property
    def foreign_in_training(self) -> str | None:
        """A module of a class of the program's own in training mode, which may do anything there."""
        modules = self.modules
        found = (name for name in self.in_training if name in modules and not self.known.has(type(modules[name])))
        return next(found, None)

    def likeness(self) -> tuple:
        """The fingerprint without what only one instance has: addresses, and identities of modules and other objects.

        Equal for two models of one class with the same configuration, flags, shapes and types.
        """
        modules = list(self.modules.values())
        return self.code.number, *_Description(lambda tensors: [], _kind, type).of(modules, self.known)

    def row_tensors(self) -> dict[tuple[int, str], Tensor]:
        """The tensors that modules hold as plain attributes, as some do with states of their rows."""
        return {
            (id(module), f"{type(module).__name__}.{name}.{part}".rstrip(".")): value
            for module in self.modules.values()
            for name, attribute in vars(module).items()
            if isinstance(attribute, Tensor) or (isinstance(attribute, (list, tuple, dict)) and attribute)
            if name not in ("_parameters", "_buffers", "_modules")
            for part, value in _tensors_in(attribute)
        }


@dataclass
class _Record:
    """What is kept of one model between calls.

    size_of: type and device of the first weight when `size` was found. first: the module that has it, and its name
    there. row_states: why rows cannot be expanded after a prefill; None if none was watched yet.
    """

    size: ModelSize | None = None
    size_of: tuple[torch.dtype, torch.device] | None = None
    first: tuple[Callable[[], Any], str] = (lambda: None, "")
    facts: ModelFacts | None = None
    row_states: list[Reason] | None = None


_records: WeakKeyDictionary[nn.Module, _Record] = WeakKeyDictionary()


def _record(model: nn.Module) -> _Record:
    found = _records.get(model)
    if found is None:
        found = _records[model] = _Record()
    return found


def facts_of(model: nn.Module, known: KnownCode) -> ModelFacts:
    """Those of earlier calls as long as they hold, see the rule above; else from a new walk."""
    record = _record(model)
    facts = record.facts
    if facts is None or facts.known is not known or not facts.is_current():
        facts = record.facts = ModelFacts(model, known)
        record.row_states = record.row_states or None  # what was found stays; a changed model may keep more
    return facts


def row_states(model: nn.Module) -> list[Reason] | None:
    """Why rows cannot be expanded after a prefill of this model; None if no prefill of it was watched yet."""
    return _record(model).row_states


def remember_row_states(model: nn.Module, reasons: list[Reason]) -> list[Reason]:
    """Notes why this model's prefills have to run with all rows, empty if they need not; returns it."""
    _record(model).row_states = reasons
    return reasons


def size_of(model: nn.Module) -> ModelSize:
    """The size of the model, looked up again where its type or device has changed since the last call."""
    record, first = _record(model), first_weight(model)
    state = None if first is None else (first.dtype, first.device)
    if record.size is None or record.size_of != state:
        record.size, record.size_of = _measured(model), state
    return record.size


def first_weight(model: nn.Module) -> Tensor | None:
    """The model's first parameter as it is, None if it has none."""
    record = _record(model)
    module, name = record.first
    if (owner := module()) is not None and (weight := owner._parameters.get(name)) is not None:
        return weight
    path = next((path for path, _ in model.named_parameters()), None)
    if path is None:
        return None
    owner, _, name = path.rpartition(".")
    record.first = ref(model.get_submodule(owner)), name
    return record.first[0]()._parameters[name]


def _measured(model: nn.Module) -> ModelSize:
    modules, weights = list(model.modules()), list(model.parameters())
    # Tokens look up one row of an embedding; the output layer, of the same shape, sees the last token only.
    looked_up = {module.weight.shape for module in modules if isinstance(module, nn.Embedding)}
    before = set(model.get_encoder().parameters()) if _has_encoder(model) else set()  # runs once per input anyway
    prefill = [weight for weight in weights if weight.dim() > 1 and weight not in before]
    used = [weight.numel() for weight in prefill if weight.shape not in looked_up]
    large = [weight.numel() for weight in weights if weight.is_cpu and weight.dtype in cpu_linear.DTYPES]
    large = [elements for elements in large if elements >= cpu_linear.MIN_ELEMENTS]
    output = max((shape.numel() for shape in looked_up), default=0)
    return ModelSize(len(modules), sum(used), sum(used) + output, sum(large), sum(weight.nbytes for weight in weights))


def _has_encoder(model: nn.Module) -> bool:
    """Whether the model's configuration says that its decoder gets the states of an encoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)) and hasattr(model, "get_encoder")


def _fingerprint(modules: list[nn.Module], known: KnownCode, keys: frozenset[str]) -> tuple[LibraryCode, list[Any]]:
    """The code that these modules run, and their fingerprint: see the rule at the top."""
    code = _code_of(modules, known, keys)
    found = [code.number, *((key, _referred(hook)) for hooks in _HOOKS_OF_ALL for key, hook in hooks.items())]
    return code, found + _Description(_addresses, _referred, ref).of(modules, known)


def _code_of(modules: list[nn.Module], known: KnownCode, keys: frozenset[str]) -> LibraryCode:
    return library_code(frozenset(map(type, modules)), known.registered(keys), known.entries, known.packages)


def same(found: list[Any], expected: list[Any]) -> bool:
    """Whether two fingerprints are equal; objects whose comparison fails are not."""
    try:
        return found == expected
    except Exception:  # of an `__eq__` of the program's, or of an array's many answers
        return False


class _Description:
    """What modules hold, as a flat list of values.

    addresses: of tensors. identity: of an object without a value. identity_of_module: of a module. Called for each
    module of a model in each call of `generate`, so that C does what it can.
    """

    def __init__(
        self,
        addresses: Callable[[list[Tensor]], list[int]],
        identity: Callable[[Any], Any],
        identity_of_module: Callable[[nn.Module], Any],
    ) -> None:
        self.addresses, self.identity, self.identity_of_module = addresses, identity, identity_of_module
        self.found: list[Any] = []
        self.tensors: list[Tensor] = []
        self.seen: set[int] = set()

    def of(self, modules: list[nn.Module], known: KnownCode) -> list[Any]:
        found, tensors, kinds = self.found, self.tensors, list(map(type, modules))
        found += kinds
        for module in modules:
            for name, value in vars(module).items():
                kind = type(value)
                if kind in _VALUES:
                    found.append(value)
                elif kind in _COLLECTIONS and not value:  # most are empty
                    found.append(0)
                elif kind not in _MAPPINGS:
                    self.describe(name, value)
                elif name == "_modules" and None not in value.values():
                    found += value
                    found += map(self.identity_of_module, value.values())
                elif name == "_parameters" and _TENSORS.issuperset(map(type, value.values())):
                    found += value
                    tensors += value.values()
                else:
                    self.items(value)
        for kind in dict.fromkeys(kinds):
            if not known.has(kind):
                self.foreign_class(kind)
        found += self.addresses(tensors)
        for tensor in tensors:
            found += _layout(tensor)
        return found

    def items(self, items: Any) -> None:
        self.found.append(len(items))
        for name, value in items.items():
            if name not in _NOT_OF_A_STEP:
                self.found.append(name if type(name) in _VALUES else self.identity(name))
                self.describe(name, value)

    def describe(self, name: Any, value: Any) -> None:
        kind, add = type(value), self.found.append
        if kind in _VALUES:
            add(value)
        elif name in _NOT_OF_A_STEP:
            pass
        elif isinstance(value, Tensor):
            self.tensors.append(value)
            if kind not in _TENSORS:  # what a subclass holds besides may be replaced with it
                add(self.identity(value))
        elif kind in _MAPPINGS:
            self.items(value)
        elif kind is list or kind is tuple:
            add(len(value))
            for item in value:
                self.describe(None, item)
        elif kind is set or kind is frozenset:
            add(frozenset(item for item in value if type(item) in _VALUES))
        elif kind.__module__.startswith("fastgen.optimizer."):
            pass
        elif hasattr(value, "__dict__") and isinstance(name, str) and name.endswith(_CONFIGURATIONS):
            add(self.identity(value))
            if id(value) not in self.seen:  # once for all modules that have it
                self.seen.add(id(value))
                self.items(vars(value))
        else:
            add(self.identity(value))

    def foreign_class(self, kind: type) -> None:
        """Of a class of the program's: what its code reads, which may be switches."""
        for base in kind.__mro__:
            for name, value in vars(base).items() if base.__module__ == kind.__module__ else ():
                if type(value) in _VALUES or isinstance(value, FunctionType):
                    self.describe(name, value)
                for other in getattr(getattr(value, "__code__", None), "co_names", ()):
                    if other in value.__globals__:
                        self.describe(None, value.__globals__[other])


def _addresses(tensors: list[Tensor]) -> list[int]:
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return list(map(_address, tensors))


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own, as inside of torch.func, or is sparse
        return id(tensor)


def _layout(tensor: Tensor) -> tuple:
    try:
        return tensor.shape, tensor.stride() if tensor.layout == torch.strided else None, tensor.dtype, tensor.device
    except RuntimeError:  # of nested tensors, which have no shape
        return type(tensor), tensor.dtype, tensor.device


def _referred(value: Any) -> Any:
    """A reference that equals one to the same object only, also when another one lies at its address."""
    try:
        return ref(value)
    except TypeError:
        return type(value), id(value)


def _kind(value: Any) -> Any:
    return _referred(value) if isinstance(value, (FunctionType, BuiltinFunctionType)) else type(value)


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


def _is_compiled(module: nn.Module) -> bool:
    """By `module.compile()`, or `torch.compile` of it or of its forward."""
    if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
        return True
    if isinstance(module, torch.jit.ScriptModule):  # its class has no forward to look at
        return False
    return hasattr(vars(module).get("forward", type(module).forward), "_torchdynamo_orig_callable")


def _is_library(kind: type[nn.Module], known: KnownCode) -> bool:
    return known.has(kind) and not issubclass(kind, torch.jit.ScriptModule)  # which has no forward to look at


def _kind_of_foreign(kind: type[nn.Module]) -> str:
    return "TorchScript" if issubclass(kind, torch.jit.ScriptModule) else f"{kind.__module__}.{kind.__qualname__}"


def _replaced(modules: dict[str, nn.Module], names: frozenset[str], known: KnownCode) -> Iterator[tuple[str, str]]:
    """What the program has put in the place of methods and functions of single modules."""
    for name, module in modules.items():
        for attribute in replaced_attributes(module, names | known.entries, known.packages):
            if attribute in ENTRIES:
                yield name, f"the forward of {named(name)}"
            elif known.has(type(module)):
                yield name, f"{attribute} of {named(name)}"


def named(name: str) -> str:
    """A module as messages have it."""
    return f"module {name}" if name else "the model"


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return (tensor for tensor in tensors if tensor is not None)


def _tensors_in(attribute: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(attribute, Tensor):
        yield "", attribute
    elif isinstance(attribute, (list, tuple)):
        yield from ((str(index), value) for index, value in enumerate(attribute) if isinstance(value, Tensor))
    elif isinstance(attribute, dict):
        yield from ((str(key), value) for key, value in attribute.items() if isinstance(value, Tensor))


def _switched_on(modules: dict[str, nn.Module], in_training: Iterable[str]) -> Iterator[str]:
    """What training mode switches on that makes a row differ from an equal one, or depend on the others.

    Reinforcement learning generates in training mode, with models that drop nothing: rows are equal there.
    """
    for name in in_training:
        for what in _random_in(modules[name]):
            yield f"{name or 'the model'} is in training mode with {what}"


def _random_in(module: nn.Module) -> list[str]:
    if isinstance(module, _DropoutNd):
        return [f"p={module.p:g}, where rows differ"] if module.p else []
    if isinstance(module, _BatchNorm):
        return ["batch normalization, where rows depend on each other"]
    if isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return [f"random numbers in {type(module).__name__}"]
    if getattr(module, "gradient_checkpointing", False):
        return ["gradient checkpointing, where the library keeps no cache"]
    config = getattr(module, "config", None)
    read = {name: getattr(config, name, None) for name in _random_names_read(module.__class__)}
    numbers = {name: value for name, value in {**read, **vars(module)}.items() if _is_random(name, value)}
    return [f"{name}={value:g}, where rows differ" for name, value in numbers.items()]


def _is_random(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0 and any(part in name for part in _RANDOM)


@functools.cache
def _random_names_read(kind: type) -> frozenset[str]:
    """The names in the methods of a class, of what may be attributes of its configuration.

    Configurations hold more than is used: GPT-2's has dropouts of its heads for classification.
    """
    attributes = (item for base in kind.__mro__ for item in vars(base).items())
    functions = (value for name, value in attributes if name != "__init__" and hasattr(value, "__code__"))
    names = (name for function in functions for name in _names_in(function))
    return frozenset(name for name in names if any(part in name for part in _RANDOM))


def _names_in(function: Any) -> tuple[str, ...]:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__.co_names
