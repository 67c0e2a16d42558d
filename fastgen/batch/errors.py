"""What ends a run early: errors that a user can do something about, and requests to stop.

Tests: tests/cli/transformers/test_flags.py, tests/cli/transformers/test_ends.py
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec


class InputError(Exception):
    """A setting, file or model that cannot be used. The message names it, its value, and what would be accepted."""

    def __str__(self) -> str:  # a library's own message may have lines
        return " ".join(super().__str__().split())


class RunError(Exception):
    """A run that cannot continue, whatever its settings are. The message is one line."""


@dataclass
class Stop:
    """Whether somebody asks the run to end; a command adds to `requests`.

    finishing: the first request waits for the present work, such as a batch. is_patient: the run ends by itself after
    the first request, however long it takes.
    """

    requests: int = 0
    finishing: bool = False
    is_patient: bool = False


def reason(error: BaseException) -> str:
    """An exception's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def check_packages(*names: str, needed_by: str = "") -> None:
    """Raises InputError with what to install if Python finds one of them nowhere."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise InputError(
            f"{needed_by} needs the package {' and '.join(missing)}: pip install {' '.join(missing)}".lstrip()
        )


def did_you_mean(name: str, known: Collection[str], otherwise: str, before: str = "") -> str:
    """A hint for a name that is not known, in brackets: the nearest one that is, with what stands before it."""
    near = get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {before}{near[0]}?)" if near else f" ({otherwise})"
