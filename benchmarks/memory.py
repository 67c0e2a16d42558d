"""The memory that a call adds at its peak."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable

import torch


def added_mb(call: Callable[[], object], device: str) -> float:
    """In a process that has not needed as much before: what was freed is used again, and not counted."""
    with PeakMemory(device) as memory:
        call()
    return memory.added / 1e6


def peak_mb(call: Callable[[], object], device: str) -> float:
    """The same in any process: what calls before have freed goes back to the system first, where glibc can do that."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return added_mb(call, device)


class PeakMemory:
    """Bytes that a block adds at its peak: allocated memory on a GPU, resident memory of the process otherwise."""

    def __init__(self, device: str) -> None:
        self.device, self.added = device, 0

    def __enter__(self) -> PeakMemory:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return self
        import psutil

        self.process, self.stopped = psutil.Process(), threading.Event()
        self.before = self.process.memory_info().rss
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()
        return self

    def _watch(self) -> None:
        while not self.stopped.wait(0.005):
            self.added = max(self.added, self.process.memory_info().rss - self.before)

    def __exit__(self, *exception: object) -> None:
        if self.device == "cuda":
            self.added = torch.cuda.max_memory_allocated() - self.before
        else:
            self.stopped.set()
            self.watcher.join()
