"""Guards of a model: they notice what a program has replaced in it, and name the first difference by its path.

    KnownCode ──> Code    functions, methods and classes of one library class or file, shared by all models
        └───────> Guards  entries (container, key, kind, expected), from one walk over a model's modules

A container is a namespace of a module, of a class of user code or of a configuration, or a collection in one. The kinds
of entries are constants (by value), collections (by type and keys), tensors (by layout and address: captured steps read
weights at their addresses) and other objects (by identity). Objects are held by weak reference: a strong one would keep
alive what a program frees. What code reads elsewhere (closures, its globals) is not followed. Attributes that fastgen
sets for the time of a call are not compared.

Tests: tests/optimizer/decoding/test_guards.py, tests/optimizer/transformers/test_replaced_code.py,
tests/optimizer/transformers/test_changes_in_a_call.py
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fastgen.provenance import packages_of

# Hooks of all modules of the process.
GLOBAL_HOOKS: dict[str, dict[int, Any]] = {
    "torch's global forward pre-hooks": torch_module._global_forward_pre_hooks,
    "torch's global forward hooks": torch_module._global_forward_hooks,
}

# What runs outside a forward, or calls it as a whole: programs and libraries wrap it. torch itself replaces manual_seed
# once its compiler is imported, which may be during the first call.
OUTSIDE = frozenset({
    "__init__", "__init_subclass__", "__repr__", "from_pretrained", "generate", "load_state_dict", "manual_seed",
    "push_to_hub", "save_pretrained", "state_dict",
})  # fmt: skip

# Prefixes of attributes on which no output depends. The first two say how hooks are called.
_UNREAD = (
    "_forward_hooks_", "_forward_pre_hooks_", "_backward_", "_is_full_backward", "_load_state_dict", "_state_dict",
    "_non_persistent_buffers_set",
)  # fmt: skip

_CONFIGURATIONS = ("config", "cfg", "args")
_CONSTANTS = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
_MAPPINGS = frozenset({dict, OrderedDict})
_COLLECTIONS = _MAPPINGS | {list, tuple, set, frozenset}
_UNNAMED = ("", "_modules", "_parameters", "_buffers")  # keys that are left out of paths
_OF_CALL = "fastgen.optimizer."  # defines the classes of attributes that fastgen sets for the time of a call

Location: TypeAlias = tuple[int, Any]  # of an entry: the number of its container, and the key there


@dataclass(frozen=True, eq=False)
class KnownCode:
    """A host's knowledge of the code in its models.

    packages: packages whose modules and forwards treat every row alike, whatever the number of rows. hooks: packages
    whose hooks depend on no row. files: modules with functions and classes that models of several files call.
    registered: returns, by a name for messages, functions that read what modules find in the host's registries.
    encoder_of: returns the part of a model that runs once per input. not_of_a_step: attributes that no step reads.
    """

    packages: frozenset[str]
    hooks: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()
    registered: Callable[[Iterable[nn.Module]], dict[str, Callable[[], Any]]] = lambda modules: {}
    encoder_of: Callable[[nn.Module], nn.Module | None] = lambda model: None
    not_of_a_step: frozenset[str] = frozenset()


class OfCall(partial[Any]):
    """A function that is set on a module for the time of a call, and that guards do not compare."""


class Code:
    """The functions, methods and classes in the namespace of a library class or file, at one moment.

    user_code: the names of those that a program has put there. They are held weakly: a function may hold a model.
    """

    def __init__(self, owner: type | str, packages: frozenset[str]) -> None:
        is_file = isinstance(owner, str)
        self.path = owner if isinstance(owner, str) else qualified_name(owner)
        self.space = space = vars(sys.modules[owner]) if isinstance(owner, str) else vars(owner)
        # A new name in a class may override an inherited method. New names in a file are not called: torch.compile, for
        # example, adds some for its own code.
        self.size = None if is_file else len(space)
        names = [name for name in space if name not in OUTSIDE and not (is_file and name.startswith("__"))]
        names = [name for name in names if callable(space[name]) or hasattr(type(space[name]), "__get__")]
        self.user_code = {name: reference(space[name]) for name in names if not is_from(space[name], packages)}
        self.names = ["__doc__", "__doc__", *(name for name in names if name not in self.user_code)]
        self.get = itemgetter(*self.names)  # of one name it returns no tuple
        self.values = self.get(space)


_code: dict[tuple[type | str, frozenset[str]], Code] = {}


def code_of(owners: Iterable[type | str], packages: frozenset[str]) -> list[Code]:
    """Returns the code of classes and files: the same objects until a program replaces something in one."""
    codes = []
    for key in [(owner, packages) for owner in owners]:
        code = _code.get(key)
        if code is None or code_difference([code]) is not None:
            code = _code[key] = Code(*key)
        codes.append(code)
    return codes


def code_difference(codes: Iterable[Code]) -> str | None:
    """Returns the first function or class that was replaced since the code was read, or None."""
    for code in codes:
        name = None
        space = code.space
        try:
            if code.get(space) != code.values or code.size not in (None, len(space)):
                name = "a method"  # a new one, if no other differs
        except Exception:  # one was removed, or cannot be compared
            name = "a method"
        for user_name, expected in code.user_code.items():
            if reference(space.get(user_name)) != expected:
                name = user_name
        if name is not None:
            pairs = zip(code.names, code.values)
            name = next((changed for changed, value in pairs if space.get(changed) is not value), name)
            return f"{code.path}.{name} was replaced"
    return None


def is_user_code(called: Iterable[object], packages: frozenset[str]) -> bool:
    """Whether one of these objects, which each step calls, runs user code: in its class, methods or attributes."""
    bases = dict.fromkeys([base for item in called for base in type(item).__mro__[:-1]])
    functions = [value for item in called for value in getattr(item, "__dict__", {}).values() if callable(value)]
    return (
        not packages.issuperset([base.__module__.partition(".")[0] for base in bases])
        or any(map(attrgetter("user_code"), code_of(bases, packages)))
        or not all(is_from(function, packages) for function in functions)
    )


def is_from(value: Any, packages: frozenset[str]) -> bool:
    """Whether this code, and all code that it wraps, is from these packages."""
    return isinstance(value, BuiltinFunctionType) or packages_of(value) <= packages  # user code is rarely written in C


def qualified_name(code: object) -> str:
    """Returns `module.name` of a function or class, of the function in a partial, or of another object's class."""
    code = code.func if isinstance(code, partial) else code
    return f"{getattr(code, '__module__', '?')}.{getattr(code, '__qualname__', type(code).__name__)}"


def reference(value: Any, callback: Callable[[Any], None] | None = None) -> Any:
    """Returns a weak reference, or its equivalent for an object that permits none."""
    try:
        return ref(value, callback)
    except TypeError:
        return type(value), id(value)


class Guards:
    """The entries of one model, and their comparison.

    The locations of entries, (container, key), are in four lists, one for each kind; `_read` reads what is compared.
    Containers 0 to 2 hold the model and the classes of user code, the registered functions in use, and torch's global
    hooks. Then come what these contain: collections, and namespaces of modules, configurations and these classes.
    """

    def __init__(self, modules: Mapping[str, nn.Module], known_code: KnownCode) -> None:
        self.known_code = known_code
        kinds = dict.fromkeys(map(type, modules.values()))
        bases = dict.fromkeys(chain.from_iterable(kind.__mro__[:-1] for kind in kinds))
        library = [base for base in bases if packages_of(base) <= known_code.packages]
        files = [*(base.__module__ for base in library if issubclass(base, nn.Module)), *known_code.files]
        self.code = code_of([*library, *filter(sys.modules.__contains__, dict.fromkeys(files))], known_code.packages)
        roots = {"": modules[""], **{qualified_name(base): base for base in bases if base not in library}}
        self._roots = {name: ref(root) for name, root in roots.items()}
        self.registered = known_code.registered(modules.values())
        self._nested: list[tuple[int, Any, bool]] = []  # a container's location, and whether it is a namespace
        self._paths = ["", "", ""]
        self._names: list[tuple[int, frozenset[str]]] = []  # the attributes in each namespace
        self._objects, self._collections, self._tensors, self._constants = (list[Location]() for _ in range(4))
        self._getters: list[tuple[int, Callable[[Any], tuple[Any, ...]]]] = []
        containers = self._containers()
        self._add_entries(containers, {*map(id, modules.values()), *map(id, roots.values())})
        self._expected = self._read(containers)
        self._expected[3] = [tuple(map(_copy, constants)) for constants in self._expected[3]]
        self._freed: dict[Location, Any] = {}
        objects = [(location, containers[location[0]][location[1]]) for location in self._objects]
        self._references = [reference(value, partial(self._freed.setdefault, location)) for location, value in objects]

    def _add_entries(self, containers: list[Any], owners: set[int]) -> None:
        """Walks over the model. owners: the ids of objects that have a namespace, besides configurations."""
        nested = set[int]()
        unread_of = dict[frozenset[str], frozenset[str]]()
        for index, container in enumerate(containers):  # the loop appends containers
            constants, of_call = [], []
            is_namespace = index > 2 and self._nested[index - 3][2]
            names = frozenset(container if is_namespace else ())
            if names not in unread_of:
                unread_of[names] = frozenset(name for name in names if not self._is_read(name))
            unread = unread_of[names]
            for key, value in _items(container):
                if key in unread:
                    continue
                if type(value) in _CONSTANTS and (is_namespace or value is not None):  # most values
                    constants.append(key)
                    continue
                if type(value).__module__.startswith(_OF_CALL):
                    of_call.append(key)
                    continue
                is_configuration = is_namespace and key.endswith(_CONFIGURATIONS) and hasattr(value, "__dict__")
                has_namespace = is_configuration or id(value) in owners
                if isinstance(value, Tensor):
                    self._tensors.append((index, key))
                elif value is not None and is_constant(value):
                    constants.append(key)
                elif id(value) in nested or not (has_namespace or type(value) in _COLLECTIONS):
                    self._objects.append((index, key))
                else:
                    (self._objects if has_namespace else self._collections).append((index, key))
                    self._nested.append((index, key, has_namespace))
                    self._paths.append(self._paths[index] if key in _UNNAMED else self._path(index, key))
                    containers.append(vars(value) if has_namespace else value)
                    nested.add(id(value))
            if is_namespace:
                self._names.append((index, names.difference(of_call)))
            if constants:
                keys = constants if len(constants) > 1 else constants * 2  # a getter of one key returns no tuple
                self._getters.append((index, itemgetter(*keys)))
                self._constants += [(index, key) for key in keys]

    def _is_read(self, name: str) -> bool:
        """Whether outputs may depend on an attribute of this name."""
        return not (name in self.known_code.not_of_a_step or name.startswith(_UNREAD))

    def _containers(self) -> list[Any]:
        roots = {name: root() for name, root in self._roots.items()}
        containers = [roots, {name: read() for name, read in self.registered.items()}, GLOBAL_HOOKS]
        for index, key, is_namespace in self._nested:
            value = containers[index][key]
            containers.append(vars(value) if is_namespace else value)
        return containers

    def _read(self, containers: list[Any]) -> list[list[Any]]:
        objects = [containers[index][key] for index, key in self._objects]
        return [
            [*map(id, objects), *map(id, map(type, objects))],
            _keys([containers[index][key] for index, key in self._collections]),
            _addresses([containers[index][key] for index, key in self._tensors]),
            [get(containers[index]) for index, get in self._getters],
        ]

    def check(self, between_steps: bool = False) -> str | None:
        """Returns what was replaced first since the walk ("layers.3.forward was added"), or None.

        between_steps: whether library code is skipped, which programs replace before a call. An unchanged Llama with 8
        layers takes 0.18 ms then, and 0.29 ms otherwise (AMD EPYC, family 25, model 1).
        """
        if not between_steps and (difference := code_difference(self.code)) is not None:
            return difference
        if self._freed:  # its id may be used again
            return f"{self._path(*next(iter(self._freed)))} was replaced"
        try:
            containers = self._containers()
            present = self._read(containers)
        except Exception as error:
            return f"an attribute was removed ({error!r})"
        with suppress(Exception):
            if self._expected == present:
                return self._added(containers)
        locations = self._objects * 2 + self._collections + self._tensors + self._constants
        pairs = zip(locations, *(chain(*values[:3], *values[3]) for values in (self._expected, present)))
        changed = [location for location, old, new in pairs if old is not new and _differ(old, new)]
        return f"{self._path(*changed[0])} was replaced" if changed else None

    def _added(self, containers: list[Any]) -> str | None:
        """Returns the first attribute that is new in a namespace."""
        for index, names in self._names:
            space = containers[index]
            if len(space) != len(names):
                for name in space.keys() - names:
                    if not type(space[name]).__module__.startswith(_OF_CALL) and self._is_read(name):
                        return f"{self._path(index, name)} was added"
        return None

    def _path(self, index: int, key: Any) -> str:
        return f"{self._paths[index]}.{key}".strip(".") or "the model"


def _differ(old: Any, new: Any) -> bool:
    try:
        return bool(old != new)
    except Exception:  # of a tensor, for example
        return True


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the keys or indices of a container, with the values; none for a set."""
    if isinstance(container, Mapping):
        return container.items()
    return () if isinstance(container, (set, frozenset)) else enumerate(container)


def is_constant(value: Any) -> bool:
    """Whether the value is a constant, or a collection of constants."""
    kind = type(value)
    try:
        return kind in _CONSTANTS or (
            kind in _COLLECTIONS and all(map(is_constant, [*value, *value.values()] if kind in _MAPPINGS else value))
        )
    except RecursionError:  # it contains itself
        return False


def _copy(constant: Any) -> Any:
    if type(constant) in _CONSTANTS:
        return constant
    return deepcopy(constant) if constant else type(constant)()


def _keys(collections: list[Any]) -> list[Any]:
    """Returns the type of each collection, and its keys in their order, or its length."""
    return [
        (type(collection), tuple(collection) if type(collection) in _MAPPINGS else len(collection))
        for collection in collections
    ]


_layout = attrgetter("shape", "dtype")


def _addresses(tensors: list[Tensor]) -> list[Any]:
    """Returns the type, the layout and the address of each tensor."""
    try:
        readings = map(type, tensors), map(_layout, tensors), map(Tensor.stride, tensors), map(Tensor.data_ptr, tensors)
        return list(zip(*readings))
    except RuntimeError:  # one is sparse, nested, or inside torch.func
        if len(tensors) > 1:
            return [_addresses([tensor])[0] for tensor in tensors]
        return [(type(tensors[0]), id(tensors[0]))]
