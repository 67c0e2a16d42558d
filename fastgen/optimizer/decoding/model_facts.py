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
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
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
from fastgen.optimizer.decoding import user_code
from fastgen.optimizer.decoding.report import Reason
from fastgen.optimizer.decoding.user_code import KnownCode, LibraryCode, library_code, named, qualified_name, replaced
from fastgen.provenance import packages_of

_VALUES = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
_SWITCHES = frozenset({torch.bool, torch.int32, torch.int64})
_TENSORS = frozenset({Tensor, nn.Parameter})
_MAPPINGS = frozenset({dict, OrderedDict})
_COLLECTIONS = _MAPPINGS | {list, tuple, set, frozenset}
_CONFIGURATIONS = ("config", "cfg", "args")

# Of all modules of the process.
_HOOKS_OF_ALL = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)

# Objects of the program, of more than which its code is not known to read the same as before.
_MOST_FOLLOWED = 2000


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


class ModelFacts:
    """What one walk over a model's modules has found.

    compiled, in_training: the names of modules that are compiled or in training mode, "" for the model. training: what
    training mode switches on that makes rows differ. foreign_in_training: a module of a class of the program's own in
    training mode, which may do anything there. devices: of all weights and buffers. coupled: why the rows of a batch
    have an influence on each other, None if they have none that is known.
    Each with the name of its module: hooks: forward hooks that may care how many rows they see, None for those of all
    modules; foreign_classes: modules of the program's own classes; replaced: what the program has put in the place of
    the library's functions on single modules. What it has put into the library's classes, files and registries:
    `code.foreign`. user_code: these three, in words.
    altered: the names of modules that are not only the library's code; None is among them where all are, by torch's
    global hooks or by code in the library's files.

    What calls have tried: prefix_reasons: why the beginning of a prompt cannot be computed apart from the rest, by the
    type of its tokens, None where they have none; row_states: why rows cannot be expanded after a prefill, None before
    the first one.
    """

    row_states: list[Reason] | None = None

    def __init__(self, model: nn.Module, known: KnownCode) -> None:
        modules = dict(model.named_modules())
        self.known = known
        self.prefix_reasons: dict[int | None, list[Reason]] = {}
        self._modules = [(name, ref(module)) for name, module in modules.items()]
        self.keys = known.keys(modules.values())
        self.code, self.fingerprint = _fingerprint(modules.values(), known, self.keys)
        self.in_training = [name for name, module in modules.items() if module.training]
        self.training = next(filter(None, (_switched_on(name, modules[name]) for name in self.in_training)), None)
        self.compiled = [name for name, module in modules.items() if _is_compiled(module)]
        hooks = [(name, hook) for name, module in modules.items() for hook in _hooks(module)]
        hooks += [(None, hook) for hooks in _HOOKS_OF_ALL for hook in hooks.values()]
        self.hooks = [(name, qualified_name(hook)) for name, hook in hooks if not packages_of(hook) <= known.hooks]
        scaling = next((name for name, module in modules.items() if _scales_all_rows(module)), None)
        self.coupled = (
            None if scaling is None else f"{named(scaling)} scales its input by the largest number of all rows"
        )
        self.is_sharded = any(type(module).__module__.startswith("torch.distributed.") for module in modules.values())
        tensors = [(*module._parameters.values(), *module._buffers.values()) for module in modules.values()]
        self.devices = {tensor.device for of_module in tensors for tensor in of_module if tensor is not None}
        self.foreign_classes: list[tuple[str, str]] = []
        for name, module in modules.items():
            kind = type(module)
            if isinstance(module, torch.jit.ScriptModule):  # which has no forward to look at
                self.foreign_classes.append((name, f"{named(name)} (TorchScript)"))
            elif not packages_of(kind) <= known.packages:
                self.foreign_classes.append((name, f"{named(name)} ({kind.__module__}.{kind.__qualname__})"))
        self.foreign_in_training = next((name for name, _ in self.foreign_classes if modules[name].training), None)
        self.replaced = replaced(modules, self.code, known)
        self.user_code = [what for _, what in self.replaced + self.foreign_classes] + self.code.foreign
        hooked = {name for name, hook in hooks if type(hook) is not WeightNorm}
        foreign = {name for name, _ in self.foreign_classes + self.replaced}
        self.altered = hooked | foreign | {*self.compiled} | ({None} if self.code.foreign else set())

    @property
    def modules(self) -> dict[str, nn.Module]:
        """By name; those that are still there."""
        modules = {}
        for name, found in self._modules:
            if (module := found()) is not None:
                modules[name] = module
        return modules

    def is_current(self) -> bool:
        """Whether nothing was replaced since."""
        modules = self.modules
        if len(modules) < len(self._modules):
            return False
        return same(_fingerprint(modules.values(), self.known, self.keys)[1], self.fingerprint)

    def likeness(self) -> tuple[Any, ...]:
        """The fingerprint without what only one instance has: addresses, and identities of modules and other objects.

        Equal for two models of one class with the same configuration, flags, shapes and types. With what code of the
        program may read besides: objects, globals, what functions have closed over.
        """
        return self.code, *_description(self.modules.values(), self.known, of_instance=False)

    def row_tensors(self) -> dict[tuple[int, str], Tensor]:
        """The tensors that modules hold as plain attributes, as some do with states of their rows."""
        found: dict[tuple[int, str], Tensor] = {}
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
                        found[id(module), f"{type(module).__name__}.{name}.{part}".rstrip(".")] = tensor
        return found


_facts: WeakKeyDictionary[nn.Module, ModelFacts] = WeakKeyDictionary()


def facts_of(model: nn.Module, known: KnownCode) -> ModelFacts:
    """Those of earlier calls as long as they hold, see the rule above; else from a new walk."""
    before = _facts.get(model)
    if before is not None and before.known is known and before.is_current():
        return before
    facts = _facts[model] = ModelFacts(model, known)
    if before is not None:
        facts.row_states = before.row_states or None  # what was found stays; a changed model may keep more
    return facts


# By the model: the module that has its first weight, and the name there; the type and device of that weight when the
# size was measured, and the size.
_firsts: WeakKeyDictionary[nn.Module, tuple[Callable[[], Any], str]] = WeakKeyDictionary()
_sizes: WeakKeyDictionary[nn.Module, tuple[Any, ModelSize]] = WeakKeyDictionary()


def size_of(model: nn.Module, known: KnownCode) -> ModelSize:
    """The size of the model, looked up again where its type or device has changed since the last call."""
    first, found = first_weight(model), _sizes.get(model)
    state = None if first is None else (first.dtype, first.device)
    if found is None or found[0] != state:
        found = _sizes[model] = state, _measured(model, known.encoder_of(model))
    return found[1]


def first_weight(model: nn.Module) -> Tensor | None:
    """The model's first parameter as it is, None if it has none."""
    module, name = _firsts.get(model, (lambda: None, ""))
    if (owner := module()) is not None and (weight := owner._parameters.get(name)) is not None:
        return weight
    path, weight = next(model.named_parameters(), ("", None))
    owner, _, name = path.rpartition(".")
    _firsts[model] = ref(model.get_submodule(owner)), name
    return weight


def _measured(model: nn.Module, encoder: nn.Module | None) -> ModelSize:
    modules, weights = list(model.modules()), list(model.parameters())
    # Tokens look up one row of an embedding; the output layer, of the same shape, sees the last token only.
    looked_up = {module.weight.shape for module in modules if isinstance(module, nn.Embedding)}
    before = set() if encoder is None else set(encoder.parameters())  # runs once per input anyway
    prefill = [weight for weight in weights if weight.dim() > 1 and weight not in before]
    used = [weight.numel() for weight in prefill if weight.shape not in looked_up]
    large = [weight.numel() for weight in weights if weight.is_cpu and weight.dtype in cpu_linear.DTYPES]
    large = [elements for elements in large if elements >= cpu_linear.MIN_ELEMENTS]
    output = max((shape.numel() for shape in looked_up), default=0)
    return ModelSize(len(modules), sum(used), sum(used) + output, sum(large), sum(weight.nbytes for weight in weights))


def _fingerprint(
    modules: Collection[nn.Module], known: KnownCode, keys: frozenset[str]
) -> tuple[LibraryCode, list[Any]]:
    """The code that these modules run, and their fingerprint: see the rule at the top."""
    code = library_code(modules, known.registered(keys), known)
    found: list[Any] = [code]
    for hooks in _HOOKS_OF_ALL:
        for key, hook in hooks.items():
            found += key, _referred(hook)
    return code, found + _description(modules, known, of_instance=True)


def same(found: Any, expected: Any) -> bool:
    """Whether two fingerprints are equal; objects whose comparison fails are not."""
    try:
        return bool(found == expected)
    except Exception:  # of an `__eq__` of the program's, or of an array's many answers
        return False


def _description(modules: Collection[nn.Module], known: KnownCode, of_instance: bool) -> list[Any]:
    try:
        return _described(modules, known, of_instance)
    except Exception:  # an attribute holds itself, or an object of the program cannot be looked into
        return [object()]  # equals no other


def _described(modules: Collection[nn.Module], known: KnownCode, of_instance: bool) -> list[Any]:
    """What modules hold, as a flat list of values.

    of_instance: with the addresses of tensors and the identities of modules and other objects. Called for each module
    of a model in each call of `generate`, so that C does what it can.
    """
    identity, identity_of_module = (_referred, ref) if of_instance else (_kind, type)
    kinds = list(map(type, modules))
    own = set() if of_instance else set().union(*map(packages_of, set(kinds))) - known.packages
    ignored = known.not_of_a_step | {"__getstate__"}  # how a module is copied, see `faster_forwards`
    found: list[Any] = [*kinds]
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def add(name: Any, value: Any) -> None:
        kind = type(value)
        if kind in _VALUES:
            found.append(value)
        elif name in ignored:
            pass
        elif isinstance(value, Tensor):
            tensors.append(value)
            if kind not in _TENSORS:  # what a subclass holds besides may be replaced with it
                found.append(identity(value))
        elif kind in _MAPPINGS:
            found.append(len(value))
            if _are_plain(value) and _are_plain(value.values()) and ignored.isdisjoint(value):
                found.extend(value.items())
                return
            for key, item in value.items():
                if key not in ignored:
                    found.append(key if type(key) in _VALUES else identity(key))
                    add(key, item)
        elif kind is list or kind is tuple:
            found.append(len(value))
            if _are_plain(value):
                found.extend(value)
                return
            for item in value:
                add(None, item)
        elif kind is set or kind is frozenset:
            found.append(frozenset(value if _are_plain(value) else map(identity, value)))
        elif not kind.__module__.startswith("fastgen.optimizer."):
            found.append(identity(value))
            is_configuration = isinstance(name, str) and name.endswith(_CONFIGURATIONS)
            if id(value) in seen:  # once for all modules that have it
                return
            if is_configuration and hasattr(value, "__dict__"):
                seen.add(id(value))
                add(None, dict(vars(value)))
            elif not of_instance and (held := user_code.held_by(value, known.packages, own)):
                seen.add(id(value))
                if len(seen) > _MOST_FOLLOWED:
                    raise ValueError("code of the program may read too many objects")
                add(None, held)

    for module in modules:
        for name, value in vars(module).items():
            kind = type(value)
            if kind in _VALUES:
                found.append(value)
            elif kind in _COLLECTIONS and not value:  # most are empty
                found.append(0)
            elif kind not in _MAPPINGS:
                add(name, value)
            elif name == "_modules" and None not in value.values():
                found += value
                found += map(identity_of_module, value.values())
            elif name == "_parameters" and _TENSORS.issuperset(map(type, value.values())):
                found += value
                tensors += value.values()
            else:
                add(name, value)
    for name, value in user_code.read_by_classes(dict.fromkeys(kinds), known.packages):
        add(name, value)
    for tensor in tensors:
        try:
            strides = tensor.stride() if tensor.layout == torch.strided else None
            found += tensor.shape, strides, tensor.dtype, tensor.device
        except RuntimeError:  # of nested tensors, which have no shape
            found += type(tensor), tensor.dtype, tensor.device
        if of_instance:
            try:
                found.append(tensor.data_ptr())
            except RuntimeError:  # it has no memory of its own, as inside of torch.func, or is sparse
                found.append(id(tensor))
        elif tensor.is_cpu and tensor.dtype in _SWITCHES and tensor.numel() == 1:
            found.append(tensor.item())
    return found


def _are_plain(values: Iterable[Any]) -> bool:
    return _VALUES.issuperset(map(type, values))


def _referred(value: Any) -> Any:
    """A reference that equals one to the same object only, also when another one lies at its address."""
    try:
        return ref(value)
    except TypeError:
        return type(value), id(value)


def _kind(value: Any) -> Any:
    return _referred(value) if isinstance(value, (FunctionType, BuiltinFunctionType, type)) else type(value)


def _hooks(module: nn.Module) -> list[object]:
    """Its forward hooks, and what accelerate runs before and after its forward."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return hooks + _single_hooks(vars(module)["_hf_hook"]) if "_hf_hook" in vars(module) else hooks


def _single_hooks(placed: Any) -> list[Any]:
    """accelerate's ModelHook as a list, or those inside of a SequentialHook, however deep."""
    return [hook for part in getattr(placed, "hooks", ()) for hook in _single_hooks(part)] or [placed]


def _is_compiled(module: nn.Module) -> bool:
    """By `module.compile()`, or `torch.compile` of it or of its forward."""
    if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
        return True
    forward = vars(module).get("forward", getattr(type(module), "forward", None))
    return hasattr(forward, "_torchdynamo_orig_callable")


def _switched_on(name: str, module: nn.Module) -> str:
    """What training mode switches on in a module that makes a row differ from an equal one, or depend on the others.

    Reinforcement learning generates in training mode, with models that drop nothing: rows are equal there.
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
    """Whether it is from `torch.ao.quantization.quantize_dynamic`."""
    kind = type(module).__module__
    return kind.startswith(("torch.ao.nn.quantized.dynamic.", "torch.ao.nn.intrinsic.quantized.dynamic."))


def _is_random(name: str) -> bool:
    """Whether a number of this name says how much is left out or added: dropout, layerdrop, router_jitter_noise."""
    return "drop" in name or "jitter" in name


@functools.cache
def _random_names_read(kind: type) -> frozenset[str]:
    """The names in the methods of a class, of what may be attributes of its configuration.

    Configurations hold more than is used: GPT-2's has dropouts of its heads for classification.
    """
    names: set[str] = set()
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if name != "__init__" and hasattr(value, "__code__"):
                names.update(filter(_is_random, inspect.unwrap(value).__code__.co_names))
    return frozenset(names)
