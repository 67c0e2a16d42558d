"""The captured steps of a model between two calls.

captures.py decides what a call takes from a `GraphCache` and when it captures. This module knows no host library.

Tests: tests/optimizer/decoding/test_graphs.py, tests/gpu/test_captured_steps_cuda.py
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastgen.optimizer.decoding.graphs import CapturedGraph, CpuCapture, CudaCapture, torch_settings
from fastgen.optimizer.decoding.report import Reason
from fastgen.optimizer.decoding.static_kv_cache import KVContent

# The most graphs of one model between two calls, and the most bytes of all together: less on a CPU, whose memory
# programs need for themselves. On a GPU a part of what is free without them is kept if that is more.
MOST_GRAPHS = 16
MOST_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
PART_KEPT = 4

_nbytes = attrgetter("nbytes")


class GraphCache:
    """The captured steps of one model in one dtype on one device; the least recently used is dropped first.

    It decides only what memory allows, and drops all if the model has changed. A call that holds `in_use` takes graphs
    out of `entries` and puts them back, so that calls with the same shapes take turns. refused: why no more graphs are
    captured. has_exact_lengths: whether prompts are never padded to a common length: on a CPU in half precision, masked
    padding could change which of two close logits is larger; also if no mask could hide the padding. steps_without: for
    each number of rows, the steps of earlier calls that had too few for a graph. in_training: whether the model is
    trained between calls, which needs the memory. backend: captures kernels on this device.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.in_training = False
        self.backend = CudaCapture(device) if device.type == "cuda" else CpuCapture()
        self.in_use = threading.Lock()
        self.refused: list[Reason] = []
        self.has_exact_lengths = device.type == "cpu" and dtype not in (torch.float32, torch.float64)
        self.steps_without: Counter[int] = Counter()
        self.entries: OrderedDict[Hashable, CapturedGraph] = OrderedDict()  # the latest last
        self._state: Any = None

    def set_state(self, state: Any) -> None:
        """Drops graphs that were captured in another state of the model."""
        if state is not self._state:
            self.entries.clear()
            self._state = state

    def key_of(
        self, content: KVContent, most: int, exact_lengths: bool, variant: Hashable, for_all: bool
    ) -> tuple[Any, ...]:
        """Returns the key of a step with `most` positions per row; its last item is the spec of the cache."""
        return variant, torch_settings(), content.spec(most, exact_lengths or self.has_exact_lengths, for_all)

    @property
    def most_bytes_of_call(self) -> int:
        """The most bytes of a static cache: half of the free memory, because filling it copies the content."""
        return int(free_memory(self.device)) // 2 if self.device.type == "cuda" else MOST_BYTES["cpu"]

    def make_room(self, nbytes: int) -> None:
        """Drops graphs, the least recently used first, until a static cache of `nbytes` bytes fits, if it can fit."""
        if self.device.type == "cpu" or nbytes > self.most_bytes_of_call + self._nbytes // 2:
            return
        while self.entries and nbytes > self.most_bytes_of_call:
            self.entries.popitem(last=False)

    @property
    def _nbytes(self) -> int:
        return sum(map(_nbytes, self.entries.values()))

    def put(self, graph: CapturedGraph) -> None:
        """Stores a graph for later calls if they may use it; drops the least recently used if there are too many."""
        most_bytes = MOST_BYTES[self.device.type]
        if self.device.type != "cpu" and not self.in_training:
            free_without = int(free_memory(self.device)) + self._nbytes + graph.nbytes
            most_bytes = max(most_bytes, free_without // PART_KEPT)
        if graph.is_useful and graph.nbytes <= most_bytes:
            graph.end_call()
            self.entries[graph.key] = graph
        while len(self.entries) > MOST_GRAPHS or self._nbytes > most_bytes:
            self.entries.popitem(last=False)


def free_memory(device: torch.device) -> float:
    """Returns the free bytes of a device, with those that torch keeps unused; infinity if the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf, macOS not this number
        return math.inf


_graph_caches: WeakKeyDictionary[nn.Module, GraphCache] = WeakKeyDictionary()


def graphs_of(model: nn.Module, weight: Tensor) -> GraphCache:
    """Returns a model's graph cache; drops graphs captured with another dtype or device, which would hold old weights.

    weight: any weight that a step reads.
    """
    cache = _graph_caches.get(model)
    if cache is None or (cache.device, cache.dtype) != (weight.device, weight.dtype):
        cache = _graph_caches[model] = GraphCache(weight.device, weight.dtype)
    cache.in_training = model.training
    return cache
