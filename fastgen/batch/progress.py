"""How somebody follows a run, and asks for its end; the command has its own of both.

Tests: tests/cli/transformers/test_progress.py, tests/cli/transformers/test_ends.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class Progress:
    """Hears how far a run is; this one shows nothing. details: gives what a line about the speed says besides."""

    details: Callable[[], str] = str

    def start(self, total: int | None, done: int, unit: str) -> None:
        """Begins to count `total` inputs, None if nobody knows, of which `done` are written. unit: of amounts."""

    def finished(self, inputs: int, amount: float, failures: list[tuple[int, str]]) -> None:
        """Counts a batch; failures: lines in it, with their errors."""

    def say(self, message: str) -> None:
        """Shows what went wrong."""

    def note(self, message: str) -> None:
        """Shows what a user should know."""

    def line(self, message: str) -> None:
        """Shows what the run does."""

    def end(self) -> None:
        """Shows what was done, and how fast."""

    def close(self) -> None:
        """Ends the count, whether the run is complete or not."""


@dataclass
class Stop:
    """Whether somebody asks the run to end; a command adds to `requests`.

    finishing: the run does what the first request is to let finish. is_patient: the run ends by itself after the first
    request, however long it takes.
    """

    requests: int = 0
    finishing: bool = False
    is_patient: bool = False
