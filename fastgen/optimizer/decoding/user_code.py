"""Detection of user code inside a model's forward: functions, methods and classes that a program has put there.

A program that replaces a library function (`modeling_llama.apply_rotary_pos_emb`, `GPTNeoAttention._attn`, a method of
one module, an activation) may treat rows differently or count calls, so a forward of fewer rows, or none, would not be
the same. fastgen checks the namespaces of the classes of the model's modules, of the files that define them, and of
files that the host's models share. What their code reads elsewhere is not followed.

Tests: tests/optimizer/decoding/test_model_facts.py, tests/optimizer/transformers/test_replaced_code.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import BuiltinFunctionType
from typing import Any
from weakref import ref

from torch import nn

from fastgen.provenance import packages_of

# The methods through which a module is called.
ENTRIES = frozenset({"forward", "_old_forward", "__call__"})

# Methods that run outside a forward, or call it as a whole: programs and libraries wrap these.
_OUTSIDE = frozenset({
    "__init__", "__init_subclass__", "__repr__", "from_pretrained", "generate", "load_state_dict", "push_to_hub",
    "save_pretrained", "state_dict",
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class KnownCode:
    """A host's knowledge of the code in its models.

    packages: packages whose modules and forwards treat every row alike, whatever the number of rows. hooks: packages
    whose hooks depend on no row. files: modules with functions and classes that models of several files call. keys:
    returns the names under which modules call functions of the host's registries; registered: the functions of these
    names. encoder_of: returns the part of a model that runs once per input. not_of_a_step: attributes that no step
    reads.
    """

    packages: frozenset[str]
    hooks: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()
    keys: Callable[[Iterable[nn.Module]], frozenset[str]] = lambda modules: frozenset()
    registered: Callable[[frozenset[str]], tuple[Callable[..., Any], ...]] = lambda keys: ()
    encoder_of: Callable[[nn.Module], nn.Module | None] = lambda model: None
    not_of_a_step: frozenset[str] = frozenset()


class Namespace:
    """The functions, methods and classes that one class or file holds.

    foreign: the names of user code, as `module.name`. User code is held by weak reference: a function may hold a model.
    """

    def __init__(self, owner: type | str, space: Mapping[str, Any], packages: frozenset[str]) -> None:
        self.space = space
        # A new name in a class may override an inherited method. New names in a file are not called: torch.compile, for
        # example, adds some for its own code.
        is_file = isinstance(owner, str)
        self.size = None if is_file else len(space)
        names = [name for name, value in space.items() if is_code(value) and name not in _OUTSIDE]
        names = [name for name in names if not (is_file and name.startswith("__"))]
        foreign = {name: reference(space[name]) for name in names if not is_from(space[name], packages)}
        self.foreign = [f"{owner if isinstance(owner, str) else qualified_name(owner)}.{name}" for name in foreign]
        self.references = [*foreign.items()]
        self.get = itemgetter("__doc__", *(name for name in names if name not in foreign))
        self.values = self.get(space)


_namespaces: dict[tuple[type | str, frozenset[str]], Namespace] = {}


def namespaces(classes: Iterable[type], known_code: KnownCode) -> list[Namespace]:
    """Returns the namespaces of these classes, of the files that define them, and of the host's files.

    Each is the same object for all models until user code replaces something in it.
    """
    files = dict.fromkeys([*(kind.__module__ for kind in classes if issubclass(kind, nn.Module)), *known_code.files])
    spaces: dict[type | str, Mapping[str, Any]] = {kind: vars(kind) for kind in classes if kind is not object}
    spaces |= {file: vars(sys.modules[file]) for file in files if file in sys.modules}
    current = []
    for owner, space in spaces.items():
        namespace = _namespaces.get((owner, known_code.packages))
        if namespace is None or not are_current([namespace]):
            namespace = _namespaces[owner, known_code.packages] = Namespace(owner, space, known_code.packages)
        current.append(namespace)
    return current


def are_current(code: Iterable[Namespace]) -> bool:
    """Whether user code has replaced nothing in these namespaces since they were read."""
    try:
        for namespace in code:
            if namespace.get(namespace.space) != namespace.values or namespace.size not in (None, len(namespace.space)):
                return False
            for name, value in namespace.references:
                if value != reference(namespace.space[name]):
                    return False
    except KeyError:  # user code has deleted one
        return False
    return True


def is_user_code(called: object, packages: frozenset[str]) -> bool:
    """Whether an object that each step calls runs user code: in its class, its methods or its attributes."""
    for space in (*map(vars, type(called).__mro__[:-1]), getattr(called, "__dict__", {})):
        for value in space.values():
            if is_code(value) and not is_from(value, packages):
                return True
    return not packages_of(type(called)) <= packages


def replaced(modules: Mapping[str, nn.Module], known_code: KnownCode) -> list[tuple[str, str]]:
    """Returns the methods and functions that user code has set on single modules, with the modules' names."""
    replacements = []
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if callable(value) and attribute not in _OUTSIDE and not is_from(value, known_code.packages):
                if attribute in ENTRIES:
                    replacements.append((name, f"the forward of {named(name)}"))
                elif packages_of(type(module)) <= known_code.packages:
                    replacements.append((name, f"{attribute} of {named(name)}"))
    return replacements


def named(name: str) -> str:
    """Returns a module's name for messages."""
    return f"module {name}" if name else "the model"


def is_code(value: object) -> bool:
    """Whether the value can be called, or runs code when it is read as an attribute."""
    return callable(value) or hasattr(type(value), "__get__")


def is_from(value: Any, packages: frozenset[str]) -> bool:
    """Whether this code, and all code that it wraps, is from these packages."""
    return isinstance(value, BuiltinFunctionType) or packages_of(value) <= packages  # user code is rarely written in C


def reference(value: Any) -> Any:
    """Returns a weak reference, or an equivalent, that is equal only to a reference to the same object."""
    try:
        return ref(value)
    except TypeError:
        return type(value), id(value)


def qualified_name(code: object) -> str:
    """Returns `module.name` of a function or class, of the function in a partial, or of another object's class."""
    code = code.func if isinstance(code, functools.partial) else code
    return f"{getattr(code, '__module__', '?')}.{getattr(code, '__qualname__', type(code).__name__)}"
