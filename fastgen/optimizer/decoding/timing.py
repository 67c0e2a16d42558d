"""Calls measured in turns: their seconds, their memory, and what other programs take of the CPUs meanwhile.

One call says little: other programs take the cores, and clocks and caches change. So all ways to do the same work run
directly after each other in each turn, the first of a turn rotates, and a ratio is the median over the turns. Where the
turns disagree, or a call is too short, there is no ratio but a reason.

Tests: tests/optimizer/test_timing.py, tests/optimizer/test_verify.py
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

PROC = Path("/proc")

# LEAST_TURNS are always measured; after SECONDS no further turn begins.
LEAST_TURNS, MOST_TURNS = 5, 15
SECONDS = 10.0

# A shorter call, and turns whose ratios differ by this factor, have no ratio.
MIN_SECONDS = 0.01
MOST_SPREAD = 1.5

# How often the range of a ratio may miss the median of all turns that could be measured.
MOST_MISSES = 0.1


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one way is as another: the median of the turns, and the range of a second measurement.

    The range is that of the turns without the lowest and the highest, as many as the confidence interval of a median
    leaves out: none of 5, three of 15.
    """

    median: float
    low: float
    high: float
    turns: int

    def __str__(self) -> str:
        return f"{self.median:.2f} times as fast ({self.low:.2f} to {self.high:.2f} in {self.turns} turns)"


def ratio_of(theirs: Sequence[float], ours: Sequence[float]) -> Ratio | str:
    """Returns the ratio of the seconds of two ways in the same turns, or the reason that there is none."""
    shortest = min(statistics.median(theirs), statistics.median(ours))
    turns = len(ours)
    if shortest < MIN_SECONDS:
        least = f"at least {MIN_SECONDS * 1e3:.0f} ms"
        return f"no ratio: a call of {shortest * 1e3:.1f} ms is too short to compare ({least})"
    ratios = sorted(their / our for their, our in zip(theirs, ours))
    left_out = max((count for count in range(1, turns // 2) if _misses(turns, count) <= MOST_MISSES), default=0)
    low = ratios[left_out]
    high = ratios[-1 - left_out]
    if high > MOST_SPREAD * low:
        return f"no ratio: {turns} turns differ too much, {low:.2f} to {high:.2f} times as fast"
    return Ratio(statistics.median(ratios), low, high, turns)


def _misses(turns: int, left_out: int) -> float:
    """Returns the probability that the range without the `left_out` lowest and highest turns misses the median."""
    return 2 * sum(math.comb(turns, count) for count in range(left_out + 1)) / 2.0**turns


def in_turns(ways: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Calls all ways in turns; returns the seconds of each way's calls. On a GPU the device finishes each call."""
    seconds: list[list[float]] = [[] for _ in ways]
    end = time.perf_counter() + SECONDS
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() > end:
            break
        first = turn % len(ways)
        for index in [*range(first, len(ways)), *range(first)]:
            _synchronize()
            begun = time.perf_counter()
            ways[index]()
            _synchronize()
            seconds[index].append(time.perf_counter() - begun)
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_memory(call: Callable[[], object]) -> int | None:
    """Returns the bytes that a call adds at its peak: allocated on the GPU if one is used, resident otherwise.

    None if the system does not say: it is not Linux, or a container forbids it. With glibc, memory that earlier calls
    freed goes back to the system first.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        baseline = torch.cuda.memory_allocated()
        call()
        return int(torch.cuda.max_memory_allocated() - baseline)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    try:
        (PROC / "self" / "clear_refs").write_text("5")  # resets VmHWM, the peak of the process
        baseline = _status_bytes("VmRSS")
    except OSError:
        call()
        return None
    call()
    return max(_status_bytes("VmHWM") - baseline, 0)


def _status_bytes(field: str) -> int:
    lines = (PROC / "self" / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


class Load:
    """The share of the CPUs' time that other programs take from the creation of this object to a call of `share`."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._busy = self._other_seconds()

    def share(self) -> float | None:
        """Returns the share, from 0 to 1; None if the system does not say."""
        if self._busy is None or (busy := self._other_seconds()) is None:
            return None
        cpu_seconds = (time.perf_counter() - self._begun) * (os.cpu_count() or 1)
        return min(max((busy - self._busy) / max(cpu_seconds, 1e-3), 0.0), 1.0)

    @staticmethod
    def _other_seconds() -> float | None:
        """Returns the seconds since the start of the machine that its CPUs have worked for other processes."""
        try:
            fields = (PROC / "stat").read_text().split("\n")[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _idle, _iowait, *interrupts_and_steal = map(int, fields)
        ticks = user + nice + system + sum(interrupts_and_steal)
        return ticks / os.sysconf("SC_CLK_TCK") - _own_seconds()


def _own_seconds(pid: str = "self") -> float:
    """Returns the CPU time of a process and of those that it has started."""
    try:
        times = (PROC / pid / "stat").read_text().rpartition(")")[2].split()[11:15]
        children = " ".join(path.read_text() for path in (PROC / pid / "task").glob("*/children")).split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + sum(map(_own_seconds, children))


def describe_load(share: float | None) -> str:
    """Returns a clause on the share of other programs; "" if it is not known."""
    return "" if share is None else f"other programs took {share:.0%} of the CPUs"
