"""Targets of patches: finding them, checking that they fit, installing and removing replacements.

An attribute of a class or module is replaced, never a class: existing objects and `isinstance` stay right. It is looked
up without binding it, and the content of `vars(owner)` is stored, so that an inherited method does not stay behind as a
copy.

Tests: tests/patching/test_patching.py, tests/patching/test_patching_conflicts.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from fastgen.patching.patch import Patch

_ABSENT = object()
_MARK = "__fastgen_patch__"


class Unmet(Exception):
    """A patch does not fit the host; the message says what was wanted and what was found."""


@dataclass
class Target:
    """An attribute of an owner. original: what the owner itself held; function: what a call reaches; its signature."""

    owner: object
    attribute: str
    original: object
    kind: type | None
    function: Callable
    signature: inspect.Signature
    installed: object = None
    on_top: object = None
    active: bool = False

    def install(self, wrapper: Callable) -> None:
        """Installs `wrapper` as the same kind of method; it takes effect once `active` is set."""
        setattr(wrapper, _MARK, self)
        installed = self.kind(wrapper) if self.kind else wrapper
        setattr(self.owner, self.attribute, installed)
        self.installed = installed

    def remove(self) -> str:
        """Restores the original; if another library has patched on top, leaves its patch and returns its name."""
        self.active = False
        current = vars(self.owner).get(self.attribute, _ABSENT)
        if current is self.installed:
            if self.original is _ABSENT:
                delattr(self.owner, self.attribute)
            else:
                setattr(self.owner, self.attribute, self.original)
        elif current is not self.original and current is not _ABSENT:
            self.on_top = current
            function = _function(current)
            return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
        self.installed = None
        return ""

    def is_on_top(self) -> bool:
        """Whether the owner holds the wrapper, and it is in effect."""
        return self.active and vars(self.owner).get(self.attribute) is self.installed

    def still_buried(self) -> bool:
        """Whether the wrapper is still under another library's patch, and can be activated there instead of stacked."""
        if self.installed is None:
            return False
        current = vars(self.owner).get(self.attribute)
        is_known = current is self.installed or (current is not None and current is self.on_top)
        return is_known or getattr(_function(current), _MARK, None) is self


def find_target(patch: Patch, module: ModuleType) -> Target:
    """Returns the target of `patch` in `module`. Raises Unmet if the contract does not hold."""
    owner: object = module
    *parents, attribute = patch.path
    for name in parents:
        owner = _static_attribute(patch, owner, name)
        if not inspect.isclass(owner):
            raise Unmet(f"wanted {patch.target}, found that {name} is a {type(owner).__name__}, not a class")
    attribute_value = _static_attribute(patch, owner, attribute)
    kind = type(attribute_value) if isinstance(attribute_value, (staticmethod, classmethod)) else None
    function = _function(attribute_value)
    if not inspect.isroutine(function):
        raise Unmet(f"wanted a function at {patch.target}, found a {type(attribute_value).__name__}")
    if hasattr(function, _MARK):
        raise Unmet(f"wanted the original of {patch.target}, found it patched by another copy of fastgen")
    signature = _checked_signature(patch, function)
    return Target(owner, attribute, vars(owner).get(attribute, _ABSENT), kind, function, signature)


def _function(value: object) -> object:
    """Returns the function inside a staticmethod or classmethod, or the value itself."""
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _static_attribute(patch: Patch, owner: object, name: str) -> object:
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        kind = "class" if inspect.isclass(owner) else "module"
        raise Unmet(f"wanted {patch.target}, found no {name!r} in {kind} {getattr(owner, '__name__', owner)}") from None


def _checked_signature(patch: Patch, function: Callable) -> inspect.Signature:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise Unmet(f"wanted a signature of {patch.target}, found none: {error}") from None
    if not all(signature.parameters.keys() & set(names.split("|")) for names in patch.parameters):
        wanted, actual = ", ".join(patch.parameters), ", ".join(signature.parameters)
        raise Unmet(f"wanted the parameters ({wanted}) of {patch.target}, found ({actual})")
    return signature


def host_version(host: str) -> str | None:
    """Returns the version of an imported package, or None if neither it nor its distribution has one."""
    version = getattr(sys.modules.get(host), "__version__", None)
    if isinstance(version, str) and _release(version):
        return version
    from importlib import metadata

    try:
        return metadata.version(host)
    except metadata.PackageNotFoundError:
        return None


def older_than(lowest: str, host: str) -> str:
    """Returns the wanted and the installed version if the host is older than `lowest`; otherwise an empty string."""
    version = host_version(host)
    is_older = version is not None and _release(version) < _release(lowest)
    return f"wanted {host} {lowest} or newer, found {version}" if is_older else ""


def upgrade_reason(lowest: str, host: str) -> str:
    """Returns the text of `older_than` with the command that installs a newer version; empty if none is needed."""
    why = older_than(lowest, host)
    return why and f"{why}: pip install '{host}>={lowest}'"


def too_old(patch: Patch) -> str:
    """Returns why the installed versions are too old for `patch`; empty if they are not."""
    if why := older_than(patch.lowest, patch.host):
        return why
    return next(filter(None, (older_than(least, package) for package, least in patch.needs)), "")


def _release(version: str) -> tuple[int, ...]:
    """Returns (5, 23) for "5.23.0.dev0+cpu": pre-releases count as the release, and 5.23 equals 5.23.0."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    numbers = [int(number) for number in match[1].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
