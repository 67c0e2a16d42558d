"""A step of a decoding loop at fixed addresses, recorded once and then replayed: on a GPU as a CUDA graph.

Seamless, "CUDA Graph": one launch for all kernels of the text decoder's step. The buffers belong to the recording, and
calls with the same shapes use it one after the other. Not yet run on a GPU; on a CPU a replay is a plain call with the
same tensors. Knows no host library.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastgen.optimizer.decoding.static_cache import StaticCache

# What one model's recordings may hold between two calls.
MOST_RECORDINGS = 16
MOST_BYTES = 1 << 30

Run = Callable[[], Any]


class PlainCall:
    """The stand-in for a CUDA graph where there is none: calls the same function on the same tensors."""

    name = "decode step, static"

    def warm_up(self, run: Run) -> Any:
        return run()

    def record(self, run: Run) -> Run:
        return run


class CudaGraph:
    """Captures CUDA graphs on a stream of its own, in one pool of memory: they are replayed one after the other."""

    name = "decode step, CUDA graph"

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def warm_up(self, run: Run) -> Any:
        """The output of a call on the stream of the capture, where libraries then have their workspaces."""
        calling = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(calling)
        with torch.cuda.stream(self.stream):
            output = run()
        calling.wait_stream(self.stream)
        return output

    def record(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            output = run()

        def replay() -> Any:
            graph.replay()
            return output

        return replay


class Recording:
    """A function of nested inputs and caches, and its replay once there is one.

    function: takes the inputs, and adds one position to each of `caches`. cache: what the host gives to the function.
    """

    def __init__(self, function: Callable[[Any], Any], caches: list[StaticCache], cache: Any) -> None:
        self.function, self.caches, self.cache = function, caches, cache
        self.leaves: list[Any] = []
        self.structure: Hashable = None
        self._copied: dict[int, tuple[ref[Tensor], int]] = {}  # of each leaf: what was copied in last, its version
        self._replay: Run | None = None

    @property
    def is_recorded(self) -> bool:
        return self._replay is not None

    @property
    def nbytes(self) -> int:
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        return sum(states.nbytes for cache in self.caches for states in cache.tensors) + sum(t.nbytes for t in tensors)

    def record(self, inputs: Any, capture: PlainCall | CudaGraph) -> Any:
        """Records the function with inputs like these; returns what it gives for them when it is called."""
        leaves, spec = tree_flatten(inputs)
        self.leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.structure = _structure(leaves, spec)

        def run() -> Any:
            return self.function(tree_unflatten(self.leaves, spec))

        output = capture.warm_up(run)
        self._expect_again()
        self._replay = capture.record(run)
        return output

    def forget(self) -> None:
        """Not to be replayed any more; whatever was tried last, the position that it was to add is added next."""
        self._replay = None
        self._expect_again()

    def replay(self, inputs: Any) -> Any:
        """The output for these inputs, which the next replay overwrites; None if none of such inputs was recorded."""
        if self._replay is None or not self._takes(inputs):
            self.forget()
            return None
        return self._replay()

    def _takes(self, inputs: Any) -> bool:
        """Copies the inputs in; False if they are not like those of the recording."""
        leaves, spec = tree_flatten(inputs)
        if _structure(leaves, spec) != self.structure:
            return False
        for place, given in enumerate(leaves):
            if isinstance(given, Tensor) and not self._holds(place, given):
                self.leaves[place].copy_(given)
        return True

    def _holds(self, place: int, given: Tensor) -> bool:
        """Whether this very tensor, such as the states of an encoder, is there already; otherwise notes that it is."""
        if given.is_inference():  # does not tell whether it was written since
            return False
        source, version = self._copied.get(place, (lambda: None, 0))
        self._copied[place] = ref(given), given._version
        return source() is given and version == given._version

    def _expect_again(self) -> None:
        for cache in self.caches:
            cache.expect_next()


class Recordings:
    """The recordings of one model on one device, for one call after the other: their graphs share memory.

    A call that holds `in_use` takes recordings and gives them back. refused: why none is to be made any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capture = CudaGraph(device) if device.type == "cuda" else PlainCall()
        self.in_use = threading.Lock()
        self.refused: list[str] = []
        self._state: Any = None
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()  # the latest last

    def __len__(self) -> int:
        return len(self._kept)

    def expect(self, state: Any) -> None:
        """Forgets what was recorded when the model's state was another."""
        if state != self._state:
            self.forget()
            self._state = state

    def take(self, key: Hashable) -> Recording | None:
        return self._kept.pop(key, None)

    def give_back(self, key: Hashable, recording: Recording) -> None:
        """Keeps it for other calls; drops those that were not used for longest, if there are too many."""
        if recording.is_recorded:
            self._kept[key] = recording
        while self._kept and (len(self) > MOST_RECORDINGS or self.nbytes > MOST_BYTES):
            self._kept.popitem(last=False)

    def forget(self) -> None:
        self._kept.clear()

    @property
    def nbytes(self) -> int:
        return sum(recording.nbytes for recording in self._kept.values())


def differs_sync(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether logits of a step differ by more than this part of the largest of them."""
    atol = tolerance * expected.nan_to_num(posinf=0, neginf=0).abs().max().item()
    return found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=atol, equal_nan=True)


def _structure(leaves: list[Any], spec: Any) -> tuple:
    return spec, tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in leaves)
