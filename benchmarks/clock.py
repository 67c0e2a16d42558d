"""Seconds of calls that take turns, and of the stages of a call."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Seconds = dict[str, float]


def medians(turns: list[Seconds]) -> Seconds:
    """Of each stage, or of each way."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def in_turns(ways: Mapping[str, Callable[[], Any]], repeats: int) -> Iterator[tuple[Seconds, dict[str, Any]]]:
    """Calls all ways directly after each other, every other time backwards; of each, seconds and what it returned."""
    for turn in range(repeats):
        seconds, returned = {}, {}
        for way in [*ways][:: -1 if turn % 2 else 1]:
            begun = time.perf_counter()
            returned[way] = ways[way]()
            seconds[way] = time.perf_counter() - begun
        yield seconds, returned


def times_as_fast(turns: list[Seconds]) -> float:
    """The median of stock's seconds by fastgen's of the same turn."""
    return statistics.median(turn["stock"] / turn["fastgen"] for turn in turns)


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
