"""Exit statuses of the commands, and the exceptions that mean one.

Tests: tests/cli/transformers/test_cli_bad_flags.py
"""

from collections.abc import Collection
from difflib import get_close_matches
from importlib.util import find_spec

FAILED = 1
UNUSABLE = 2
# 128 and the number of a signal, as a shell has it of a program that the signal kills.
INTERRUPTED = 130  # SIGINT, which is Ctrl-C
READER_GONE = 141  # SIGPIPE
TERMINATED = 143  # SIGTERM


class InputError(Exception):
    """A flag, file or model that cannot be used. The message names it, the value given, and what would be accepted.

    Commands print the message as one line and end with status 2.
    """

    def __str__(self) -> str:
        """The message on one line, whatever line breaks it took over from a library's own message."""
        return " ".join(super().__str__().split())


class RunError(Exception):
    """A run that cannot go on, whatever was given. The message is one line; the command ends with status 1."""


def reason(error: BaseException) -> str:
    """An exception's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def check_packages(*names: str, flag: str = "") -> None:
    """Raises InputError with what to install where Python finds one of them nowhere; `flag` is what needs them."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise InputError(f"{flag} needs the package {' and '.join(missing)}: pip install {' '.join(missing)}".lstrip())


def did_you_mean(name: str, known: Collection[str], otherwise: str, before: str = "") -> str:
    """A hint for a name that is not known, in brackets: the nearest one that is, with what stands before it."""
    near = get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {before}{near[0]}?)" if near else f" ({otherwise})"
