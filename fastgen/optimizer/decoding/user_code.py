"""Which code that runs inside a model's forward is the program's: functions, methods and classes that it has put there.

What a library's forward can call is followed through its source names: from `forward` to the globals that it reads, to
the methods whose names it mentions, and on through the functions of known packages. A program that replaces one of
these (`modeling_llama.apply_rotary_pos_emb`, `GPTNeoAttention._attn`, a method of one module, an activation) may treat
rows differently or count calls, so that a forward of fewer rows, or none, would not be the same.
Tests: tests/optimizer/decoding/test_model_facts.py, tests/optimizer/transformers/test_replaced_code.py.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from operator import getitem, is_
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy
from torch import nn

from fastgen.provenance import PYTHON, packages_of

# Where a call of a module begins.
ENTRIES = frozenset({"forward", "_old_forward", "__call__"})

# What a program puts around a model as a whole, outside of its forward.
_OUTSIDE = frozenset({"generate"})

# Whose code is not followed: it calls no code of the hosts. What the first two hold is not looked at either.
_OUTER = PYTHON | {"numpy"}
_ENDS = _OUTER | {"torch", "fastgen"}

_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
_CONSTANTS = (bool, int, float, str, type(None))

# Python's own objects that hold what a program puts there. Bytes of an array that may be a switch.
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_SMALL = 64
# What a subclass of a container holds, whatever its own methods do.
_COPIES: dict[type, Callable[[Any], Any]] = {dict: dict.copy, list: list.copy, tuple: ().__add__}


@dataclass(frozen=True, eq=False)
class KnownCode:
    """What a host knows of the code in its models.

    packages: whose modules and forwards treat every row alike, whatever the number of rows. hooks: those whose hooks
    care for no row. entries: methods of the model that a step calls beside its forward. keys, registered: under which
    names modules call functions of the host's registries, and the functions under these names. encoder_of: the part of
    a model that runs once per input. not_of_a_step: attributes that no step reads.
    """

    packages: frozenset[str]
    hooks: frozenset[str] = frozenset()
    entries: frozenset[str] = frozenset()
    keys: Callable[[Iterable[nn.Module]], frozenset[str]] = lambda modules: frozenset()
    registered: Callable[[frozenset[str]], tuple[Callable[..., Any], ...]] = lambda keys: ()
    encoder_of: Callable[[nn.Module], nn.Module | None] = lambda model: None
    not_of_a_step: frozenset[str] = frozenset()


class LibraryCode:
    """What the forwards of these classes can call, and whether all of it comes from known packages.

    functions: what they call through a registry. names: the attributes that the code mentions. foreign: what is not
    from a known package, as `module.name`.
    """

    def __init__(self, kinds: Iterable[type], functions: tuple[Callable[..., Any], ...], known: KnownCode) -> None:
        self.names: set[str] = set()
        self.foreign: list[str] = []
        self._foreign: list[tuple[Any, str, Callable[[], Any]]] = []  # the values as references: they may hold a model
        self._spaces: list[Any] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        bases = sorted({base for kind in kinds for base in kind.__mro__ if base is not object}, key=qualified_name)
        self._sizes = [(vars(base), len(vars(base))) for base in bases]  # a method may be added where one was inherited
        spaces: dict[str, list[type]] = {}
        for base in bases:
            for name in vars(base):
                spaces.setdefault(name, []).append(base)
        seen: set[tuple[str, str]] = set()
        followed: set[int] = set()
        expanded: set[tuple[str, frozenset[str]]] = set()  # modules, with the names that code mentions beside them
        work: list[Any] = [*functions]

        def add(space: Any, owner: str, name: str, mentioned: frozenset[str]) -> None:
            value = space[name]
            if isinstance(value, ModuleType):
                if (value.__name__, mentioned) not in expanded and value.__name__.partition(".")[0] not in _OUTER:
                    expanded.add((value.__name__, mentioned))
                    for other in mentioned & vars(value).keys():
                        add(vars(value), value.__name__, other, mentioned)
            elif not (isinstance(value, _CONSTANTS) or _is_code(value)):
                return
            if (owner, name) in seen:
                return
            seen.add((owner, name))
            if not _is_from(value, known.packages):
                self.foreign.append(f"{owner}.{name}")
                self._foreign.append((space, name, _ref(value)))
                return
            self._spaces.append(space)
            self._names.append(name)
            self._values.append(value)
            work.append(value)

        def mention(name: str) -> None:
            if name not in self.names and name not in _OUTSIDE:
                self.names.add(name)
                for base in spaces.get(name, ()):
                    if not isinstance(vars(base)[name], _CONSTANTS):
                        add(vars(base), qualified_name(base), name, frozenset())

        for function in functions:
            if not _is_from(function, known.packages):
                self.foreign.append(f"registered function {qualified_name(function)}")
        for name in ENTRIES | known.entries:
            mention(name)
        while work:
            for function in _functions_in(work.pop()):
                if id(function) in followed or _ends(function):
                    continue
                followed.add(id(function))
                mentioned = _names_in(function.__code__)
                for name in mentioned:
                    if name in function.__globals__:
                        add(function.__globals__, function.__globals__["__name__"], name, mentioned)
                    else:
                        mention(name)
        self.foreign.sort()

    def is_current(self) -> bool:
        try:
            if not all(map(is_, map(getitem, self._spaces, self._names), self._values)):
                return False
            if any(len(space) != size for space, size in self._sizes):
                return False
            for space, name, found in self._foreign:
                if space[name] is not found():
                    return False
        except KeyError:  # the program has deleted one
            return False
        return True


_known: dict[Any, LibraryCode] = {}


def library_code(
    modules: Iterable[nn.Module], functions: tuple[Callable[..., Any], ...], known: KnownCode
) -> LibraryCode:
    """Of those of their classes that are from known packages; another object as soon as any of it was replaced."""
    kinds = set()
    for kind in set(map(type, modules)):
        if kind.__module__.partition(".")[0] in known.packages:
            kinds.add(kind)
    found = _known.get(key := (known, frozenset(kinds), functions))
    if found is None or not found.is_current():
        found = _known[key] = LibraryCode(kinds, functions, known)
    return found


def is_user_code(called: object, packages: frozenset[str]) -> bool:
    """Whether an object that is called in each step runs code of the program: its class, methods or attributes are."""
    for space in (*map(vars, type(called).__mro__[:-1]), getattr(called, "__dict__", {})):
        for value in space.values():
            if _is_code(value) and not _is_from(value, packages):
                return True
    return not packages_of(type(called)) <= packages


def replaced(modules: dict[str, nn.Module], code: LibraryCode, known: KnownCode) -> list[tuple[str, str]]:
    """What the program has put in the place of methods and functions of single modules, with the modules' names."""
    found = []
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if attribute in code.names and callable(value) and not _is_from(value, known.packages):
                if attribute in ENTRIES:
                    found.append((name, f"the forward of {named(name)}"))
                elif packages_of(type(module)) <= known.packages:
                    found.append((name, f"{attribute} of {named(name)}"))
    return found


def read_by_classes(kinds: Iterable[type], packages: frozenset[str]) -> Iterator[tuple[str | None, Any]]:
    """By name what the program's own classes among these hold, and the globals that their methods mention."""
    for kind in kinds:
        if packages_of(kind) <= packages:
            continue
        for base in kind.__mro__:
            if packages_of(base) <= packages:
                continue
            for name, value in vars(base).items():
                if not name.startswith("__") or isinstance(value, FunctionType):
                    yield name, value
                for other in getattr(getattr(value, "__code__", None), "co_names", ()):
                    if other in value.__globals__:
                        yield None, value.__globals__[other]


def held_by(value: Any, packages: frozenset[str], own: Set[str]) -> list[Any]:
    """What code of the program may read of this value as a switch: of its objects, classes and functions.

    packages: those that hold no switches of the program. own: of the model's classes. Code of other installed packages
    is not followed; it may lead through all of a test runner, and to what changes with each call.
    """
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, _WRAPPERS):
        return list(_functions_in(value))
    if isinstance(value, numpy.generic) or (isinstance(value, numpy.ndarray) and value.nbytes <= _SMALL):
        return [value.tobytes()]
    kind = type(value)
    if isinstance(value, (nn.Module, ModuleType)) or kind is BuiltinFunctionType:
        return []
    is_code = isinstance(value, (FunctionType, type))
    found = packages_of(value if is_code else kind)
    if kind not in _NAMESPACES and found <= packages:
        return []
    if is_code and all(package not in own and _is_in_site_packages(package) for package in found):
        return []
    if isinstance(value, FunctionType):
        return _read_by(value, packages)
    if isinstance(value, type):
        return [held for name, held in vars(value).items() if not name.startswith("__")]
    held: list[Any] = [kind]
    with suppress(AttributeError):
        held.append(dict(object.__getattribute__(value, "__dict__")))  # not what a proxy gives
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        held += [getattr(value, slot, None) for slot in ((slots,) if isinstance(slots, str) else slots)]
    return held + [copy(value) for of, copy in _COPIES.items() if isinstance(value, of)]


@functools.cache
def _is_in_site_packages(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def _read_by(function: FunctionType, packages: frozenset[str]) -> list[Any]:
    """Globals, also those of the program's modules, defaults, attributes, and what it has closed over."""
    names, found = _names_in(function.__code__), [function.__defaults__, function.__kwdefaults__, dict(vars(function))]
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            found.append(value)
        elif value.__name__.partition(".")[0] not in packages:
            found += [vars(value)[other] for other in names & vars(value).keys()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    return found


def named(name: str) -> str:
    """A module as messages have it."""
    return f"module {name}" if name else "the model"


def _inside(code: Any) -> Any:
    """What this method, property or partial calls."""
    return next(getattr(code, name) for name in ("fget", "func", "__func__") if hasattr(code, name))


def _functions_in(code: Any) -> Iterator[FunctionType]:
    """The functions that this one, or this method, partial or property, runs through."""
    if isinstance(code, (*_WRAPPERS, MethodType, functools.partial)):
        yield from _functions_in(_inside(code))
    elif isinstance(code, type) and issubclass(code, nn.Module):  # one that a forward makes and calls
        yield from _functions_in(getattr(code, "forward", None))
    elif isinstance(code, FunctionType):
        yield code
        inner = [getattr(code, "__wrapped__", None)]
        for cell in code.__closure__ or ():
            with suppress(ValueError):  # it is empty
                inner.append(cell.cell_contents)
        for one in inner:
            if one is not code and isinstance(one, FunctionType):
                yield from _functions_in(one)


def _ends(function: FunctionType) -> bool:
    """Whether what it calls is not followed: in torch, only the forwards of its modules are."""
    is_forward = function.__name__ == "forward" and function.__module__.startswith("torch.nn.modules.")
    return packages_of(function) <= _ENDS and not is_forward


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function, and in those that are defined inside of it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _is_code(value: object) -> bool:
    """Whether it is called, or runs code where an attribute of this name is read."""
    return callable(value) or hasattr(type(value), "__get__")


def _is_from(value: Any, packages: frozenset[str]) -> bool:
    if isinstance(value, (*_CONSTANTS, ModuleType, BuiltinFunctionType)):  # functions in C are hardly the program's
        return True
    # Mocks are Python's own, but stand for what a program puts there.
    return packages_of(_inside(value) if isinstance(value, _WRAPPERS) else value) <= packages - {"unittest"}


def _ref(value: Any) -> Callable[[], Any]:
    try:
        return ref(value)
    except TypeError:
        return lambda: value


def qualified_name(code: object) -> str:
    code = code.func if isinstance(code, functools.partial) else code
    return f"{getattr(code, '__module__', '?')}.{getattr(code, '__qualname__', type(code).__name__)}"
