"""Which code that runs inside a model's forward is the program's: functions, methods and classes that it has put there.

What a library's forward can call is followed through its source names: from `forward` to the globals that it reads, to
the methods whose names it mentions, and on through the functions of known packages. A program that replaces one of
these (`modeling_llama.apply_rotary_pos_emb`, `GPTNeoAttention._attn`, a method of one module, an activation) may treat
rows differently or count calls, so that a forward of fewer rows, or none, would not be the same.
Tests: tests/optimizer/decoding/test_model_facts.py, tests/optimizer/transformers/test_replaced_code.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import getitem, is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

from torch import nn

from fastgen.provenance import PYTHON, packages_of

# Where a call of a module begins.
ENTRIES = frozenset({"forward", "_old_forward", "__call__"})

# What a program puts around a model as a whole, outside of its forward.
_OUTSIDE = frozenset({"generate"})

# Whose code is not followed: it calls no code of the hosts. What the first two hold is not looked at either.
_OUTER = PYTHON | {"numpy"}
_ENDS = _OUTER | {"torch", "fastgen"}

_CALLABLE = (FunctionType, BuiltinFunctionType, MethodType, functools.partial, type)
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property)
_CONSTANTS = (bool, int, float, str, type(None))

# A namespace, the name of something in it, and what messages call that.
Place = tuple[Any, str, str]

_numbers = itertools.count()


class LibraryCode:
    """What the forwards of these classes can call, and whether all of it comes from known packages.

    number: another one as soon as any of it was replaced. names: the attributes that the code mentions. foreign: what
    is not from a known package, as `module.name`.
    """

    def __init__(
        self,
        kinds: Iterable[type],
        functions: tuple[Callable, ...],
        entries: frozenset[str],
        packages: frozenset[str],
    ) -> None:
        self.number = next(_numbers)
        places, self.names = _reached(kinds, functions, entries, packages)
        values = [space[name] for space, name, _ in places]
        is_foreign = [not _is_from(value, packages) for value in values]
        self.foreign = sorted(described for (*_, described), is_so in zip(places, is_foreign) if is_so)
        known = [(*place[:2], value) for place, value, is_so in zip(places, values, is_foreign) if not is_so]
        self._spaces, self._names, self._values = map(list, zip(*known)) if known else ([], [], [])
        # What the program has put there may hold a model.
        self._foreign = [(place, _ref(value)) for place, value, is_so in zip(places, values, is_foreign) if is_so]

    def is_current(self) -> bool:
        try:
            unchanged = all(map(is_, map(getitem, self._spaces, self._names), self._values))
            return unchanged and all(space[name] is found() for (space, name, _), found in self._foreign)
        except KeyError:  # the program has deleted one
            return False


_known: dict[Any, LibraryCode] = {}


def library_code(
    kinds: frozenset[type], functions: tuple[Callable, ...], entries: frozenset[str], packages: frozenset[str]
) -> LibraryCode:
    """Of those of these classes that are from known packages; looked up again if any of it was replaced.

    functions: what they call through a registry. entries: methods that are called beside the forward.
    """
    kinds = frozenset(kind for kind in kinds if kind.__module__.partition(".")[0] in packages)
    found = _known.get(key := (kinds, functions))
    if found is None or not found.is_current():
        found = _known[key] = LibraryCode(kinds, functions, entries, packages)
    return found


def is_user_code(called: object, packages: frozenset[str]) -> bool:
    """Whether an object that is called in each step runs code of the program: its class, methods or attributes are."""
    methods = (value for base in type(called).__mro__ for value in vars(base).values())
    code = [value for value in methods if isinstance(value, (FunctionType, *_WRAPPERS))]
    code += [value for value in getattr(called, "__dict__", {}).values() if callable(value)]
    return not packages_of(type(called)) <= packages or not all(_is_from(value, packages) for value in code)


def replaced_attributes(module: nn.Module, names: frozenset[str], packages: frozenset[str]) -> list[str]:
    """The attributes of one module that are called by these names and are code of the program."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and (name in names or name in ENTRIES) and not _is_from(value, packages)
    ]


def _reached(
    kinds: Iterable[type], functions: tuple[Callable, ...], entries: frozenset[str], packages: frozenset[str]
) -> tuple[list[Place], frozenset[str]]:
    """What the code of these classes and functions can come to, and the names of attributes that it mentions."""
    bases = sorted({base for kind in kinds for base in kind.__mro__ if base is not object}, key=_qualified_name)
    spaces: dict[str, list[type]] = {}
    for base in bases:
        for name in vars(base):
            spaces.setdefault(name, []).append(base)
    places: dict[tuple[str, str], Place] = {}
    names: set[str] = set()
    followed: set[int] = set()
    expanded: set[tuple[str, frozenset[str]]] = set()  # modules, with the names that code mentions beside them
    work: list[Any] = [*functions]

    def add(space: Any, owner: str, name: str, mentioned: frozenset[str]) -> None:
        value = space[name]
        is_new = (owner, name) not in places
        if not isinstance(value, (*_CALLABLE, *_CONSTANTS, ModuleType, *_WRAPPERS)):
            return
        places[owner, name] = space, name, f"{owner}.{name}"
        if isinstance(value, ModuleType):
            if (value.__name__, mentioned) not in expanded and value.__name__.partition(".")[0] not in _OUTER:
                expanded.add((value.__name__, mentioned))
                for other in mentioned & vars(value).keys():
                    add(vars(value), value.__name__, other, mentioned)
        elif is_new and _is_from(value, packages) and not isinstance(value, _CONSTANTS):
            work.append(value)

    def mention(name: str) -> None:
        if name not in names and name not in _OUTSIDE:
            names.add(name)
            for base in spaces.get(name, ()):
                if not isinstance(vars(base)[name], _CONSTANTS):
                    add(vars(base), _qualified_name(base), name, frozenset())

    for name in ENTRIES | entries:
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
    return list(places.values()), frozenset(names)


def _functions_in(code: Any) -> Iterator[FunctionType]:
    """The functions that this one, or this method, partial or property, runs through."""
    if isinstance(code, (staticmethod, classmethod, MethodType)):
        yield from _functions_in(code.__func__)
    elif isinstance(code, property):
        yield from _functions_in(code.fget)
    elif isinstance(code, (functools.cached_property, functools.partial)):
        yield from _functions_in(code.func)
    elif isinstance(code, FunctionType):
        yield code
        inner = [cell.cell_contents for cell in code.__closure__ or () if not _is_empty(cell)]
        for one in (getattr(code, "__wrapped__", None), *inner):
            if one is not code and isinstance(one, FunctionType):
                yield from _functions_in(one)


def _ends(function: FunctionType) -> bool:
    """Whether what it calls is not followed: in torch, only the forwards of its modules are."""
    is_forward = function.__name__ == "forward" and function.__module__.startswith("torch.nn.modules.")
    return packages_of(function) <= _ENDS and not is_forward


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function, and in those that are defined inside of it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _is_from(value: Any, packages: frozenset[str]) -> bool:
    if isinstance(value, (*_CONSTANTS, ModuleType, BuiltinFunctionType)):  # functions in C are hardly the program's
        return True
    if isinstance(value, _WRAPPERS):
        value = next(getattr(value, name) for name in ("fget", "func", "__func__") if hasattr(value, name))
    return packages_of(value) <= packages


def _ref(value: Any) -> Callable[[], Any]:
    try:
        return ref(value)
    except TypeError:
        return lambda: value


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
