"""A step of a decoding loop at fixed addresses, recorded once and then replayed: on a GPU as a CUDA graph.

Seamless, "CUDA Graph": one launch for all kernels of the text decoder's step. On a CPU the kernels are called one after
the other, without the Python in between (fastgen/ops/cpu_graph). The buffers belong to the recording, and calls with
the same shapes use it one after the other. Not yet run on a GPU. Knows no host library.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fastgen.ops.cpu_graph.graph import CpuGraph
from fastgen.optimizer.decoding.static_cache import StaticCache

# What one model's recordings may hold between two calls, and the bytes of one: less in the memory of a CPU, of which
# programs hold more for themselves.
MOST_RECORDINGS = 16
MOST_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}

# The largest difference of logits that rounding explains, as a part of the largest of them.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}

# Logits beyond it are those of tokens that a model rules out.
HUGE = 1e4

Run = Callable[[], Any]


class CpuCapture:
    """Records what a function calls on a CPU while it runs."""

    name = "decode step, recorded"

    def record(self, run: Run, expect_again: Callable[[], None]) -> tuple[Any, Run, int]:
        """The output of the function, its replay, and the bytes that this keeps.

        expect_again: undoes what the function counts.
        """
        graph = CpuGraph(run)
        expect_again()
        return tree_map_only(Tensor, Tensor.clone, graph.output), graph.replay, graph.nbytes


class CudaCapture:
    """Captures CUDA graphs on a stream of its own, in one pool of memory: they are replayed one after the other."""

    name = "decode step, CUDA graph"

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, run: Run, expect_again: Callable[[], None]) -> tuple[Any, Run, int]:
        """As `CpuCapture`; the output is that of a call on the capture's stream, where libraries get their workspaces.

        The memory of graphs is the pool's, which they share.
        """
        calling = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(calling)
        with torch.cuda.stream(self.stream):
            first = run()
        calling.wait_stream(self.stream)
        expect_again()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            output = run()
        expect_again()

        def replay() -> Any:
            graph.replay()
            return output

        return first, replay, 0


class Recording:
    """A function of nested inputs and caches, and its replay once there is one.

    function: takes the inputs, and adds one position to the first of `caches`. cache: what the host gives to the
    function. is_proven: a replay gave the function's output for inputs that were not those of the recording.
    """

    def __init__(self, function: Callable[[Any], Any], caches: list[StaticCache], cache: Any) -> None:
        self.function, self.caches, self.cache = function, caches, cache
        self.leaves: list[Any] = []
        self.structure: Hashable = None
        self._copied: dict[int, tuple[ref[Tensor], int]] = {}  # of each leaf: what was copied in last, its version
        self._replay: Run | None = None
        self._bytes_of_replay = 0
        self.is_proven = False

    @property
    def is_recorded(self) -> bool:
        return self._replay is not None

    @property
    def nbytes(self) -> int:
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        tensors += [states for cache in self.caches for states in cache.tensors]
        return sum(tensor.nbytes for tensor in tensors) + self._bytes_of_replay

    def record(self, inputs: Any, capture: CpuCapture | CudaCapture) -> Any:
        """Records the function with inputs like these; returns what it gives for them."""
        leaves, spec = tree_flatten(inputs)
        self.leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.structure = _structure(leaves, spec)
        run = lambda: self.function(tree_unflatten(self.leaves, spec))  # noqa: E731
        output, self._replay, self._bytes_of_replay = capture.record(run, self.expect_again)
        return output

    def forget(self) -> None:
        """Not to be replayed any more."""
        self._replay = None
        self.expect_again()

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

    def expect_again(self) -> None:
        """Whatever was tried, the position that it was to add is added next."""
        for cache in self.caches:
            cache.expect_next()


class Recordings:
    """The recordings of one model of one type on one device, for one call after the other: their graphs share memory.

    A call that holds `in_use` takes recordings and gives them back. refused: why none is to be made any more.
    has_exact_lengths: no masks hide what makes other lengths equal. steps_without: by the number of rows, steps of
    earlier calls that were too few for a recording of their own.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.most_bytes = device, dtype, MOST_BYTES[device.type]
        self.capture = CudaCapture(device) if device.type == "cuda" else CpuCapture()
        self.in_use = threading.Lock()
        self.refused: list[str] = []
        self.has_exact_lengths = False
        self.steps_without: Counter[int] = Counter()
        self._state: Any = None
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()  # the latest last

    def __len__(self) -> int:
        return len(self._kept)

    def expect(self, state: Any) -> None:
        """Forgets what was recorded when the model's state was another."""
        if state != self._state:
            self.forget()
            self._state = state

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def take(self, key: Hashable) -> Recording | None:
        return self._kept.pop(key, None)

    def give_back(self, key: Hashable, recording: Recording) -> None:
        """Keeps it for other calls; drops those that were not used for longest, if there are too many."""
        if recording.is_recorded and recording.nbytes <= self.most_bytes:
            self._kept[key] = recording
        while self._kept and (len(self) > MOST_RECORDINGS or self.nbytes > self.most_bytes):
            self._kept.popitem(last=False)

    def forget(self) -> None:
        self._kept.clear()

    @property
    def nbytes(self) -> int:
        return sum(recording.nbytes for recording in self._kept.values())


def differs_sync(found: Tensor, expected: Tensor) -> bool:
    """Whether logits of a step differ by more than rounding explains; what is set to a huge number only has to be."""
    tolerance = TOLERANCES.get(expected.dtype, TOLERANCES[torch.float32])
    found, expected = found.clamp(-HUGE, HUGE), expected.clamp(-HUGE, HUGE)
    atol = tolerance * expected.masked_fill(expected.abs() == HUGE, 0).nan_to_num().abs().max().item()
    return found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=atol, equal_nan=True)


def _structure(leaves: list[Any], spec: Any) -> tuple:
    return spec, tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in leaves)
