"""Seconds of the stages of a call."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Seconds = dict[str, float]


def medians(turns: list[Seconds]) -> Seconds:
    """Of each stage."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


class Clock:
    """Seconds of each stage since `start`, without those of stages inside of it."""

    def __init__(self, device: str, rest: str) -> None:
        """rest: the name of what lies between stages."""
        self.device, self.rest = device, rest
        self.start()

    def start(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._name, self._since = self.rest, self._time()

    def stop(self, total: str) -> Seconds:
        """The stages' seconds, and their sum by the name of `total`."""
        self._go_on_with(self.rest)
        return dict(self.seconds) | {total: self.seconds.total()}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Also a decorator, which is Python's own: fastgen leaves models alone whose methods a program has replaced."""
        before = self._go_on_with(name)
        try:
            yield
        finally:
            self._go_on_with(before)

    def _go_on_with(self, name: str) -> str:
        now = self._time()
        self.seconds[self._name] += now - self._since
        before, self._name, self._since = self._name, name, now
        return before

    def _time(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
