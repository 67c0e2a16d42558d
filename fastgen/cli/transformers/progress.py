"""The progress of a run on stderr: a bar on a terminal, occasional lines elsewhere, nothing with --quiet.

Failed inputs are always listed.

Tests: tests/cli/transformers/test_progress.py
"""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from fastgen.batch import run
from fastgen.cli.transformers.args import PROG
from fastgen.reasons import counted

SECONDS_BETWEEN_LINES = 10.0


class Progress(run.Progress):
    """Counts finished inputs; called by the thread that writes."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self.inputs, self.amount = 0, 0.0

    def start(self, total: int | None, done: int, unit: str) -> None:
        self._unit, self._total, self._done = unit, total, done
        self._begun = self._said = time.perf_counter()
        inputs = "inputs: {n_fmt}" if total is None else "{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} inputs"
        # disable=None: disables the bar without a terminal
        shown = {"bar_format": inputs + "{postfix}", "dynamic_ncols": True, "disable": True if self._quiet else None}
        self._bar = tqdm(total=total, initial=done, file=sys.stderr, **shown)

    def finished(self, inputs: int, amount: float, failures: list[tuple[int, str]]) -> None:
        for number, error in failures:
            self.say(f"line {number}: {error}")
        self.inputs += inputs
        self.amount += amount
        now = time.perf_counter()
        if not self._bar.disable:
            self._bar.set_postfix_str(self._speed(), refresh=False)
            self._bar.update(inputs)
        elif not self._quiet and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            done = self._done + self.inputs
            counts = counted(done, "input") if self._total is None else f"{done} of {counted(self._total, 'input')}"
            print(f"{counts}, {self._speed()}", file=sys.stderr, flush=True)

    def say(self, message: str) -> None:
        """Prints a line on stderr, above the bar, that begins with the command's name."""
        with tqdm.external_write_mode(file=sys.stderr):
            print(f"{PROG}: {message}", file=sys.stderr, flush=True)

    def note(self, message: str) -> None:
        """Prints a line like `say`, but not with --quiet."""
        if not self._quiet:
            self.say(message)

    def line(self, message: str) -> None:
        if not self._quiet:
            print(message, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()  # leaves the bar as it is

    def end(self) -> None:
        seconds = time.perf_counter() - self._begun
        digits = 0 if self._unit == "tokens" else 2
        speed = f"{self.inputs / seconds:.2f} inputs/s, {self.amount / seconds:.{digits}f} {self._unit}/s"
        self.line(f"{counted(self.inputs, 'line')} in {seconds:.2f} s, {speed}")

    def _speed(self) -> str:
        """Returns the speed, and the time left at this speed, too high at first because long inputs come first."""
        speed = self.inputs / (time.perf_counter() - self._begun)
        if self._total is None or not self.inputs:
            return f"{speed:.1f} inputs/s{self.details()}"
        left = (self._total - self._done - self.inputs) / speed
        return f"{speed:.1f} inputs/s, {tqdm.format_interval(left)} left{self.details()}"
