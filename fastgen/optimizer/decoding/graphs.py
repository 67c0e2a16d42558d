"""Captured decode steps, and the decision whether to capture the steps of a loop.

On a GPU a captured step is a CUDA graph, one launch for all kernels (Seamless, "CUDA Graph"). On a CPU the kernels are
called without the Python in between (fastgen/ops/cpu_graph.py). This module knows no host library.

Tests: tests/optimizer/decoding/test_graphs.py, tests/optimizer/test_cuda_twin.py, tests/gpu/
"""

from __future__ import annotations

import gc
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastgen.config import CONFIG
from fastgen.ops import cpu_graph
from fastgen.ops.kernel import tolerance
from fastgen.ops.tracing import Diverged, NotRepeatable, is_transformed, is_watched, memory_of, no_waiting
from fastgen.optimizer.decoding.call import GenerateCall
from fastgen.optimizer.decoding.cost_model import first_weight, size_of
from fastgen.optimizer.decoding.report import MODES, STEPS, Reason, check, that_hold
from fastgen.optimizer.decoding.static_kv_cache import KVContent, StaticKVCache

# The most graphs of one model between two calls, and the most bytes of all together: less on a CPU, whose memory
# programs need for themselves.
MOST_GRAPHS = 16
MOST_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}

# Larger logits belong to tokens that a model rules out.
HUGE = 1e4

Run = Callable[[], Any]
Reads = Callable[[Tensor], bool]

_nbytes = attrgetter("nbytes")


class CpuCapture:
    """Captures the kernels that a function calls on a CPU."""

    name = "decode step, captured"

    def capture(self, run: Run, rewind: Callable[[], None]) -> tuple[Any, Run, int, Reads]:
        """Returns a replay's output, which the next one overwrites, the replay, the bytes that it holds, and its reads.

        rewind: undoes what the function counts.
        """
        replay, nbytes, read = cpu_graph.capture(run)
        rewind()
        output = replay()  # the function's kernels may round differently
        rewind()
        return output, replay, nbytes, lambda tensor: memory_of(tensor) in read


class CudaCapture:
    """Captures CUDA graphs in one memory pool, which they can share because no two replays overlap.

    cuBLAS has a workspace for each stream. If it is first requested within a capture, it belongs to the pool, and torch
    frees it with any graph of that stream (pytorch#193402); so no other live capture shares the stream.
    """

    name = "decode step, CUDA graph"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _unused_stream(device)
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        _captures.add(self)

    def capture(self, run: Run, rewind: Callable[[], None]) -> tuple[Any, Run, int, Reads]:
        """Returns the same as `CpuCapture`, with the output of a warm-up call, which compiles and loads kernels.

        Graphs share the memory of the pool. Raises NotRepeatable for operations that the host would wait for.
        """
        with _capture_lock, torch.cuda.device(self.device):
            first = run()
            rewind()
            if not self._graphs:  # torch frees a pool without graphs
                self._pool = torch.cuda.graph_pool_handle()
            graph, calling = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self.stream.wait_stream(calling)
            was_collecting = gc.isenabled()
            gc.disable()  # if the collector destroyed another graph, for example, the capture would end
            try:
                with torch.cuda.stream(self.stream):
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:  # the warm-up may wait: the library reads some masks if no stream is capturing
                        with no_waiting() as watched:
                            output = run()
                    except BaseException:
                        with suppress(RuntimeError):  # the capture was interrupted
                            graph.capture_end()
                        raise
                    graph.capture_end()
            finally:
                if was_collecting:
                    gc.enable()
            calling.wait_stream(self.stream)
            self._graphs.add(graph)
            rewind()

        def replay() -> Any:
            graph.replay()
            return output

        # Only states of an encoder are large; a mask or token could be given to a kernel that is no operation of torch.
        return first, replay, 0, lambda tensor: not tensor.is_floating_point() or watched.has_read(tensor)


_capture_lock = threading.Lock()  # torch allows one capture at a time in a process
_captures: WeakSet[CudaCapture] = WeakSet()


def _unused_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream on which no live `CudaCapture` captures; torch hands out 32 streams of a priority in turn."""
    used = {capture.stream.cuda_stream for capture in _captures}
    for _ in range(32):
        stream = torch.cuda.Stream(device, priority=-1)  # programs rarely use this priority
        if stream.cuda_stream not in used:
            break
    return stream


class GraphState(Enum):
    """The state of a `CapturedGraph`, which determines whether and how its output is trusted."""

    NEW = "not captured yet"
    CAPTURED = "replayed, and compared with the function"
    PROVEN = "replayed: a replay gave the function's output for other inputs than those of the capture"
    DROPPED = "never replayed again"


class CapturedGraph:
    """One captured step: copies its inputs to static buffers, and replays.

    It owns no KV buffers: these belong to `cache`, which it keeps alive, but does not create, fill, move or grow; a
    replay appends to it, and `capture` and `drop` reset its write position. It decides nothing: `DecodeStep` says when
    to capture, replay or drop it, and whether its output can be trusted.

    function: takes nested inputs and adds positions to `cache`. view: the host's view of `cache`.
    """

    def __init__(self, function: Callable[[Any], Any], cache: StaticKVCache, view: Any = None) -> None:
        self.function, self.cache, self.view = function, cache, view
        self.state, self._own_bytes = GraphState.NEW, 0
        self.buffers: list[Any] = []  # the leaves of the inputs
        self._structure: Any = None  # how the leaves are nested in the inputs
        self._unread: set[int] = set()  # leaves that no kernel reads, but outputs may be: the buffer is the caller's
        self._copied: dict[int, tuple[Any, int | None]] = {}  # for each leaf, the tensor last copied and its version
        self._replay: Run | None = None
        self._of_sizes: dict[int, CapturedGraph] = {}
        self.wanted: Counter[int] = Counter()  # for each number of tokens, how often a graph would have been used

    def of_size(self, size: int) -> CapturedGraph:
        """Returns the graph of a step of so many tokens, over the same cache; a new one in place of a dropped one."""
        graph = self if size == 1 else self._of_sizes.get(size)
        if graph is None or (size > 1 and graph.state is GraphState.DROPPED):
            graph = self._of_sizes[size] = CapturedGraph(self.function, self.cache, self.view)
        return graph

    def forget_sizes(self) -> None:
        """Forgets the graphs of several tokens."""
        self._of_sizes.clear()

    @property
    def is_captured(self) -> bool:
        """Whether a step of any size is captured."""
        states = {graph.state for graph in (self, *self._of_sizes.values())}
        return bool(states & {GraphState.CAPTURED, GraphState.PROVEN})

    @property
    def nbytes(self) -> int:
        """The bytes of the cache, and of what the graphs of all sizes hold."""
        return self.cache.nbytes + self._own_bytes + sum(graph._own_bytes for graph in self._of_sizes.values())

    def capture(self, inputs: Any, capture: CpuCapture | CudaCapture) -> Any:
        """Captures the function with inputs like these, replacing an earlier capture; returns its output for them."""
        self.state = GraphState.DROPPED  # in case of an interruption
        leaves, structure = tree_flatten(inputs)
        self._structure, self._unread, self._copied = structure, set(), {}
        self.buffers = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        output, self._replay, bytes_of_replay, reads = capture.capture(
            lambda: self.function(tree_unflatten(self.buffers, structure)), partial(self.cache.advance, 0)
        )
        self.state = GraphState.CAPTURED
        self._own_bytes = bytes_of_replay
        for index, (leaf, buffer) in enumerate(zip(leaves, self.buffers)):
            if isinstance(buffer, Tensor) and reads(buffer):
                self._own_bytes += buffer.nbytes
            elif isinstance(buffer, Tensor):
                self._unread.add(index)
                buffer.set_(leaf)
        return output

    def drop(self) -> None:
        """Ends all replays, and resets the write position, so that a discarded attempt leaves no trace."""
        self.state, self._replay = GraphState.DROPPED, None
        self._of_sizes.clear()
        self.cache.advance(0)

    def fitting_leaves(self, inputs: Any) -> Any:
        """Returns the leaves of these inputs; None if the graph was captured with inputs of other shapes or types."""
        leaves, structure = tree_flatten(inputs)
        if structure != self._structure:
            return None
        for leaf, buffer in zip(leaves, self.buffers):
            if isinstance(leaf, Tensor) and isinstance(buffer, Tensor):
                if leaf.shape != buffer.shape or leaf.dtype != buffer.dtype or leaf.device != buffer.device:
                    return None
            elif type(leaf) is not type(buffer) or leaf != buffer:
                return None
        return leaves

    def replay(self, inputs: Any) -> Any:
        """Returns the output for these inputs, which the next replay overwrites; None if `fitting_leaves` is None."""
        leaves = self.fitting_leaves(inputs)
        if self._replay is None or leaves is None:
            self.drop()
            return None
        for index, (leaf, buffer) in enumerate(zip(leaves, self.buffers)):
            if index in self._unread:
                buffer.set_(leaf)
            elif isinstance(leaf, Tensor):  # the same tensor, such as encoder states, may be in the buffer already
                version = None if leaf.is_inference() else leaf._version  # tells whether it was written since
                copied, copied_version = self._copied.get(index, (None, None))
                if version is None or version != copied_version or copied() is not leaf:
                    self._copied[index] = ref(leaf), version
                    buffer.copy_(leaf)
        return self._replay()

    def end_call(self) -> None:
        """Releases the caller's tensors."""
        for graph in self._of_sizes.values():
            graph.end_call()
        for index in self._unread:
            buffer = self.buffers[index]
            buffer.set_(buffer.new_empty(1).expand(buffer.shape))


class GraphCache:
    """The captured steps of one model in one dtype on one device; the least recently used is dropped first.

    It decides nothing either. A call that holds `in_use` takes graphs out of `entries` and puts them back, so that
    calls with the same shapes take turns. refused: why no more graphs are captured. has_exact_lengths: whether prompts
    are never padded to a common length: on a CPU in half precision, masked padding could change which of two close
    logits is larger. steps_without: for each number of rows, the steps of earlier calls that had too few for a graph.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.most_bytes = device, dtype, MOST_BYTES[device.type]
        self.capture = CudaCapture(device) if device.type == "cuda" else CpuCapture()
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

    def key_of(self, content: KVContent, most: int, exact_lengths: bool, variant: Hashable) -> tuple[Any, ...]:
        """Returns the key of a step with `most` positions per row; its last item is the spec of the cache."""
        return variant, torch_settings(), content.spec(most, exact_lengths or self.has_exact_lengths)

    @property
    def most_bytes_of_call(self) -> int:
        """The most bytes of a static cache: half of the free memory, because filling it copies the content."""
        if self.device.type != "cuda":
            return self.most_bytes
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free + unused) // 2

    def put(self, key: Hashable, graph: CapturedGraph) -> None:
        """Stores a graph for other calls; drops the least recently used ones if there are too many."""
        if graph.is_captured and graph.nbytes <= self.most_bytes:
            graph.end_call()
            self.entries[key] = graph
        while len(self.entries) > MOST_GRAPHS or sum(map(_nbytes, self.entries.values())) > self.most_bytes:
            self.entries.popitem(last=False)


_graph_caches: WeakKeyDictionary[nn.Module, GraphCache] = WeakKeyDictionary()


def graphs_of(model: nn.Module, weight: Tensor) -> GraphCache:
    """Returns a model's graph cache; drops graphs captured with another dtype or device, which would hold old weights.

    weight: any weight that a step reads.
    """
    cache = _graph_caches.get(model)
    if cache is None or (cache.device, cache.dtype) != (weight.device, weight.dtype):
        cache = _graph_caches[model] = GraphCache(weight.device, weight.dtype)
    return cache


def torch_settings() -> tuple[Any, ...]:
    """Returns torch's settings that determine which kernels run, and who may write tensors (inference mode)."""
    cuda = torch.backends.cuda
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    modes = torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
    types = torch.get_default_dtype(), torch.get_num_threads()
    backends: Any = torch.backends
    if hasattr(backends, "fp32_precision"):  # one per operation: reading the common one may raise if they differ
        operations = backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv
        precisions = tuple(map(attrgetter("fp32_precision"), operations))
    else:  # before torch 2.9
        precisions = (torch.get_float32_matmul_precision(),)
    return *modes, CONFIG.cuda_kernels, *precisions, *types, *attention


def differs_sync(logits: Tensor, expected: Tensor) -> bool:
    """Whether a step's logits differ by more than rounding explains; numbers beyond `HUGE` need not be equal."""
    logits, expected = logits.clamp(-HUGE, HUGE), expected.clamp(-HUGE, HUGE)
    largest = expected.masked_fill(expected.abs() == HUGE, 0).nan_to_num().abs().max().item()
    atol = tolerance("logits", expected.dtype) * largest
    return logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=0, atol=atol, equal_nan=True)


# The decision whether to capture the steps of a loop.


def reason_of(cause: Exception | str, model: nn.Module) -> Reason:
    """Returns why steps stay eager after an error of the capture or of the host's code for static caches."""
    if isinstance(cause, torch.cuda.OutOfMemoryError):
        return Reason("OUT_OF_MEMORY", "out of memory for static buffers")
    is_expected = isinstance(cause, (str, NotRepeatable, Diverged))
    text = str(cause) if is_expected else f"{type(cause).__name__}: {cause}"
    text = f"{type(model).__name__}: {text}"
    return Reason(cause.code, text) if isinstance(cause, NotRepeatable) else Reason("CAPTURE_REFUSED", text)


@check(STEPS)
def unwanted_reasons(call: GenerateCall, device: torch.device, steps: int) -> list[Reason]:
    """Returns why so many steps are not captured, whatever the model; empty if they may be."""
    if CONFIG.cuda_graphs == "off":
        return [Reason("CAPTURE_OFF", "FASTGEN_CUDA_GRAPHS=off")]
    if device.type not in ("cuda", "cpu"):
        return [Reason("DEVICE", f"the model is on {device.type} (supported: cuda, cpu)")]
    least = call.costs.captures(device).least
    if steps < least:
        return [Reason("FEW_STEPS", f"the call has fewer than {least} steps", f"at most {max(steps, 0)}")]
    if torch.is_autocast_enabled(device.type):
        return [Reason("AUTOCAST", "autocast keeps copies of weights that a capture would outlive")]
    if is_transformed() or is_watched():
        return [Reason("TORCH_MODE", MODES)]
    if device.type == "cuda" and torch.cuda.current_stream(device).cuda_stream:
        return [Reason("CUDA_STREAM", "user code computes on a stream other than the default")]
    return []


@check(STEPS)
def can_capture(checks: Any, rows: int, steps: int) -> bool:
    """Whether to try capturing a loop of at most so many steps of so many rows; adds to the report why not.

    checks: the host's `CallChecks`. Cheap checks come first, those that look at all modules last: `capture` checks the
    call's arguments, `rows` the model's code. checks.decoder: the model, or the part that a step calls.
    """
    call, decoder = checks.call, checks.decoder
    if (weight := first_weight(decoder)) is None:  # it computes nothing
        return False
    device, size = weight.device, size_of(decoder, checks.known_code)
    reasons = unwanted_reasons(call, device, steps) or graphs_of(checks.model, weight).refused or checks.capture
    if not reasons and not call.costs.should_capture(size, rows, steps, is_captured=True, device=device):
        text = f"{steps} steps of {rows} rows would save less than the capture costs"
        reasons = [Reason("NOT_WORTH_CAPTURING", text)]
    if not (reasons := reasons or checks.rows):
        facts = call.facts_of(checks.model, checks.known_code)
        is_split = len(facts.devices) > 1 and not facts.is_sharded
        reasons = that_hold(
            ("SHARDED", "parts of the model are sharded, and gathered in each step", facts.is_sharded),
            ("SEVERAL_DEVICES", "the model is on several devices", is_split),
        )
    call.report.add_reasons(STEPS, reasons)
    call.will_capture = not reasons
    return not reasons
