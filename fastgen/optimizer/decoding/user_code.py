"""Which code inside a model's forward is user code: functions, methods and classes that a program has put there.

A program that replaces one of these (`modeling_llama.apply_rotary_pos_emb`, `GPTNeoAttention._attn`, a method of one
module, an activation) may treat rows differently or count calls, so that a forward of fewer rows, or none, would not be
the same. fastgen looks at the namespaces of the classes of the model's modules, of the files that define them, and of
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

# Where a call of a module begins.
ENTRIES = frozenset({"forward", "_old_forward", "__call__"})

# What runs outside of a forward, or calls it as a whole: programs and libraries wrap these.
_OUTSIDE = frozenset({
    "__init__", "__init_subclass__", "__repr__", "from_pretrained", "generate", "load_state_dict", "push_to_hub",
    "save_pretrained", "state_dict",
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class KnownCode:
    """What a host knows of the code in its models.

    packages: whose modules and forwards treat every row alike, whatever the number of rows. hooks: packages whose hooks
    depend on no row. files: modules with functions and classes that models of several files call. keys, registered:
    under which names modules call functions of the host's registries, and the functions under these names. encoder_of:
    the part of a model that runs once per input. not_of_a_step: attributes that no step reads.
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

    foreign: those that are user code, as `module.name`. They are held by reference: a function may hold a model.
    """

    def __init__(self, owner: type | str, space: Mapping[str, Any], packages: frozenset[str]) -> None:
        self.space = space
        # A method may be added where it was inherited; a file gets names that nobody calls, such as those with
        # underscores that torch.compile puts there for code of its own.
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


def namespaces(classes: Iterable[type], known: KnownCode) -> list[Namespace]:
    """Returns the namespaces of these classes, of the files that define them, and of the host's files.

    Each is the same object for all models until the program replaces something in it.
    """
    files = dict.fromkeys([*(kind.__module__ for kind in classes if issubclass(kind, nn.Module)), *known.files])
    spaces: dict[type | str, Mapping[str, Any]] = {kind: vars(kind) for kind in classes if kind is not object}
    spaces |= {file: vars(sys.modules[file]) for file in files if file in sys.modules}
    found = []
    for owner, space in spaces.items():
        namespace = _namespaces.get((owner, known.packages))
        if namespace is None or not are_current([namespace]):
            namespace = _namespaces[owner, known.packages] = Namespace(owner, space, known.packages)
        found.append(namespace)
    return found


def are_current(code: Iterable[Namespace]) -> bool:
    """Whether the program has replaced nothing in these namespaces since they were looked at."""
    try:
        for one in code:
            if one.get(one.space) != one.values or one.size not in (None, len(one.space)):
                return False
            for name, value in one.references:
                if value != reference(one.space[name]):
                    return False
    except KeyError:  # the program has deleted one
        return False
    return True


def is_user_code(called: object, packages: frozenset[str]) -> bool:
    """Whether an object that is called in each step runs user code: its class, or one of its methods or attributes."""
    for space in (*map(vars, type(called).__mro__[:-1]), getattr(called, "__dict__", {})):
        for value in space.values():
            if is_code(value) and not is_from(value, packages):
                return True
    return not packages_of(type(called)) <= packages


def replaced(modules: Mapping[str, nn.Module], known: KnownCode) -> list[tuple[str, str]]:
    """What the program has put on single modules, methods and functions, with the modules' names."""
    found = []
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if callable(value) and attribute not in _OUTSIDE and not is_from(value, known.packages):
                if attribute in ENTRIES:
                    found.append((name, f"the forward of {named(name)}"))
                elif packages_of(type(module)) <= known.packages:
                    found.append((name, f"{attribute} of {named(name)}"))
    return found


def named(name: str) -> str:
    """Returns a module's name as messages have it."""
    return f"module {name}" if name else "the model"


def is_code(value: object) -> bool:
    """Whether it is called, or runs code where an attribute of this name is read."""
    return callable(value) or hasattr(type(value), "__get__")


def is_from(value: Any, packages: frozenset[str]) -> bool:
    """Whether this code, and all that is wrapped in it, is from these packages."""
    return isinstance(value, BuiltinFunctionType) or packages_of(value) <= packages  # few programs are written in C


def reference(value: Any) -> Any:
    """Returns what equals a reference to the same object only, also when another one lies at its address."""
    try:
        return ref(value)
    except TypeError:
        return type(value), id(value)


def qualified_name(code: object) -> str:
    code = code.func if isinstance(code, functools.partial) else code
    return f"{getattr(code, '__module__', '?')}.{getattr(code, '__qualname__', type(code).__name__)}"
