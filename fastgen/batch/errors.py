"""Early ends of a run: errors that a user can fix, and requests to stop.

Tests: tests/cli/transformers/test_flags.py, tests/cli/transformers/test_ends.py
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path


class InputError(Exception):
    """A setting, file or model cannot be used. The message names it, its value, and what would be accepted."""

    def __str__(self) -> str:  # a library's message may have several lines
        return " ".join(super().__str__().split())


class RunError(Exception):
    """A run cannot continue, whatever its settings are. The message is one line."""


@dataclass
class Stop:
    """The requests that the run should end; a command counts them in `requests`.

    finishing: whether the first request waits for the present work, such as a batch. is_patient: whether the run ends
    by itself after the first request, however long it takes.
    """

    requests: int = 0
    finishing: bool = False
    is_patient: bool = False


def reason(error: BaseException) -> str:
    """Returns an exception's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def check_packages(*names: str, needed_by: str = "") -> None:
    """Raises InputError with what to install if a package is missing."""
    if missing := [name for name in names if _is_missing(name)]:
        raise InputError(
            f"{needed_by} needs the package {' and '.join(missing)}: pip install {' '.join(missing)}".lstrip()
        )


def _is_missing(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:  # of the package that should contain it
        return True


def check_device(setting: str, device: str | None) -> None:
    """Raises InputError if this is a GPU and torch cannot use any; a build without CUDA need not be imported for that.

    `setting`: the setting and its value in the form for messages.
    """
    spec = find_spec("torch")
    if not (device or "").startswith("cuda") or spec is None or spec.origin is None:
        return
    if "torch" not in sys.modules:
        build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
        if not build["cuda"] and not build.get("hip"):
            version = build["__version__"]
            raise InputError(f"{setting}: torch {version} is built without CUDA (accepted: cpu, or a torch with CUDA)")
    import torch

    if not torch.cuda.is_available():
        raise InputError(f"{setting}: torch finds no GPU (accepted: cpu)")


def did_you_mean(name: str, names: Collection[str], otherwise: str, prefix: str = "") -> str:
    """Returns a hint for an unknown name, in brackets: the nearest of `names` with a prefix, or else `otherwise`."""
    near = get_close_matches(name, sorted(names), n=1)
    return f" (did you mean {prefix}{near[0]}?)" if near else f" ({otherwise})"
