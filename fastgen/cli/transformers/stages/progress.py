"""How far a run is, on stderr: a bar on a terminal, a line now and then elsewhere, nothing with --quiet.

Inputs that failed are always named.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from fastgen.cli.transformers.flags.arguments import PROG
from fastgen.cli.transformers.stages.items import Finished

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts what is finished; called by the thread that writes.

    total: how many inputs there are, None where nobody knows. done: how many of them an earlier run has written.
    verbose: says how long each stage had nothing to do. unit: of the amount that is generated.
    """

    def __init__(self, total: int | None, done: int, quiet: bool, verbose: bool = False, unit: str = "tokens") -> None:
        self.inputs = self.failures = 0
        self.amount = 0.0
        self._unit = unit
        self._total = total
        self._done = done
        self._quiet = quiet
        self._verbose = verbose
        self._begun = self._said = time.perf_counter()
        self._idle: Callable[[float], dict[str, float]] = lambda seconds: {}
        inputs = "{n_fmt} inputs" if total is None else "{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} inputs"
        self._bar = tqdm(
            total=total,
            initial=done,
            bar_format=inputs + "{postfix}",
            dynamic_ncols=True,
            file=sys.stderr,
            disable=quiet or not _has_columns(),
        )

    def watch(self, idle: Callable[[float], dict[str, float]]) -> None:
        """idle: given the seconds since the start, the share of them in which each stage had nothing to do."""
        self._idle = idle
        self._begun = self._said = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the stages started."""
        return time.perf_counter() - self._begun

    def finished(self, finished: Finished) -> None:
        """Counts a batch, and names the inputs in it that failed."""
        for number, error in finished.failures:
            self.say(f"line {number}: {error}")
        self.failures += len(finished.failures)
        self.inputs += len(finished.records)
        self.amount += finished.amount
        if not self._bar.disable:
            self._bar.set_postfix_str(self._speed(), refresh=False)
            self._bar.update(len(finished.records))
        now = time.perf_counter()
        if not self._quiet and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            if self._bar.disable:
                of = "" if self._total is None else f" of {self._total}"
                self._print(f"{self._done + self.inputs}{of} inputs, {self._speed()}")
            if self._verbose:
                self._print(self._shares())

    def say(self, message: str) -> None:
        """A line on stderr that begins with the command's name, above the bar."""
        self._print(f"{PROG}: {message}")

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()

    def summary(self) -> str:
        """What was done, how fast and, if verbose, how long each stage waited for others."""
        seconds = self.seconds
        places = 0 if self._unit == "tokens" else 2
        speed = f"{self.inputs / seconds:.2f} inputs/s, {self.amount / seconds:.{places}f} {self._unit}/s"
        shares = f"\n{self._shares()}" if self._verbose else ""
        return f"{self.inputs} lines in {seconds:.2f} s, {speed}{shares}"

    def _print(self, line: str) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            print(line, file=sys.stderr, flush=True)

    def _speed(self) -> str:
        """With the time left at this speed: too long at first, where the longest inputs come first."""
        speed = self.inputs / self.seconds
        if self._total is None or not self.inputs:
            return f"{speed:.1f} inputs/s"
        left = (self._total - self._done - self.inputs) / speed
        return f"{speed:.1f} inputs/s, {tqdm.format_interval(left)} left"

    def _shares(self) -> str:
        return "idle: " + ", ".join(f"{stage} {share:.0%}" for stage, share in self._idle(self.seconds).items())


class Busy:
    """How long stages have been at work, each in all of its threads together. threads: how many each has."""

    def __init__(self, threads: dict[str, int]) -> None:
        self._threads = threads
        self._seconds = dict.fromkeys(threads, 0.0)
        self._lock = threading.Lock()

    def timed(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, whose time counts for a stage."""

        def timed(*args: Any) -> Any:
            begun = time.perf_counter()
            try:
                return work(*args)
            finally:
                with self._lock:
                    self._seconds[stage] += time.perf_counter() - begun

        return timed

    def idle(self, seconds: float) -> dict[str, float]:
        """The share of so many seconds in which each stage had nothing to do."""
        return {stage: max(0.0, 1 - busy / (seconds * self._threads[stage])) for stage, busy in self._seconds.items()}


def _has_columns() -> bool:
    """Whether stderr is a terminal that knows how wide it is."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False
