"""How far a run is, on stderr: a bar on a terminal, a line now and then elsewhere, nothing with --quiet.

Inputs that failed are always named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from fastgen.cli.transformers.arguments import PROG
from fastgen.cli.transformers.items import Finished

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts what is finished; called by the thread that writes.

    total: how many inputs there are, None where nobody knows. done: how many of them an earlier run has written.
    """

    def __init__(self, total: int | None, done: int, quiet: bool) -> None:
        self.inputs = self.tokens = self.failures = 0
        self._total = total
        self._done = done
        self._quiet = quiet
        self._begun = self._said = time.perf_counter()
        self._stalls: Callable[[float], dict[str, float]] = lambda seconds: {}
        shown = not quiet and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, unit="input", file=sys.stderr, disable=not shown)

    def watch(self, stalls: Callable[[float], dict[str, float]]) -> None:
        """stalls: given the seconds since the start, the share of them in which each stage had nothing to do."""
        self._stalls = stalls
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
        self.tokens += finished.tokens
        if not self._bar.disable:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(len(finished.records))
        now = time.perf_counter()
        if self._bar.disable and not self._quiet and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            self.say(self._line())

    def say(self, message: str) -> None:
        """A line on stderr, above the bar."""
        with tqdm.external_write_mode(file=sys.stderr):
            print(f"{PROG}: {message}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()

    def summary(self) -> str:
        """What was done, how fast, and how long each stage waited for others."""
        seconds = self.seconds
        return f"{self.inputs} lines in {seconds:.2f} s, {self.inputs / seconds:.2f} inputs/s, {self._rates()}"

    def _line(self) -> str:
        seconds = self.seconds
        done = self._done + self.inputs
        of = "" if self._total is None else f" of {self._total}"
        rest = ""
        if self._total is not None and self.inputs:
            left = seconds / self.inputs * (self._total - done)
            rest = f", {tqdm.format_interval(left)} left"
        return f"{done}{of} inputs, {self.inputs / seconds:.2f} inputs/s, {self._rates()}{rest}"

    def _rates(self) -> str:
        seconds = self.seconds
        stalls = " ".join(f"{stage} {share:.0%}" for stage, share in self._stalls(seconds).items())
        return f"{self.tokens / seconds:.0f} tokens/s, stalled: {stalls}"
