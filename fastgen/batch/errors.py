"""Errors that a user can do something about.

Tests: tests/cli/transformers/test_flags.py, tests/cli/transformers/test_ends.py
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from importlib.util import find_spec

from fastgen.patching.target import upgrade_reason


class InputError(Exception):
    """A setting, file or model that cannot be used. The message names it, its value, and what would be accepted."""

    def __str__(self) -> str:
        """The message on one line, whatever line breaks it took over from a library's own message."""
        return " ".join(super().__str__().split())


class RunError(Exception):
    """A run that cannot continue, whatever its settings are. The message is one line."""


def reason(error: BaseException) -> str:
    """An exception's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def check_packages(*names: str, needed_by: str = "") -> None:
    """Raises InputError with what to install if Python finds one of them nowhere."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise InputError(
            f"{needed_by} needs the package {' and '.join(missing)}: pip install {' '.join(missing)}".lstrip()
        )


def check_version(package: str, lowest: str) -> None:
    """Raises InputError with the versions wanted and found where an older one is installed."""
    if why := upgrade_reason(lowest, package):
        raise InputError(why)


def did_you_mean(name: str, known: Collection[str], otherwise: str, before: str = "") -> str:
    """A hint for a name that is not known, in brackets: the nearest one that is, with what stands before it."""
    near = get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {before}{near[0]}?)" if near else f" ({otherwise})"
