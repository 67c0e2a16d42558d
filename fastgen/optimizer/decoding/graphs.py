"""Captured decode steps.

On a GPU a captured step is a CUDA graph, one launch for all kernels (Seamless, "CUDA Graph"). On a CPU the kernels are
called without the Python in between (fastgen/ops/cpu_graph.py). When steps are captured, and which captures of earlier
calls are used, is decided in captures.py. This module knows no host library.

Tests: tests/optimizer/decoding/test_graphs.py, tests/optimizer/test_cuda_twin.py, tests/gpu/
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from enum import Enum
from operator import attrgetter
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fastgen.config import CONFIG
from fastgen.ops import cpu_graph
from fastgen.ops.kernel import tolerance
from fastgen.ops.tracing import Diverged, NoData, NotRepeatable, NoWaiting, memory_of
from fastgen.optimizer.decoding.report import Reason
from fastgen.optimizer.decoding.static_kv_cache import KVContent, StaticKVCache

# Larger logits belong to tokens that a model rules out.
HUGE = 1e4

EXPECTED = NotRepeatable, Diverged, torch.cuda.OutOfMemoryError  # expected errors of a capture: no warning

Run = Callable[[], Any]
Reads = Callable[[Tensor], bool]


class CpuCapture:
    """Captures the kernels that a function calls on a CPU."""

    name = "decode step, captured"

    def capture(self, run: Run, rewind: Callable[[], None]) -> tuple[Any, Run, int, Reads]:
        """Returns a replay's output, which the next one overwrites, the replay, the bytes that it holds, and its reads.

        rewind: undoes a run of the function.
        """
        replay, nbytes, read = cpu_graph.capture(run)
        rewind()
        output = replay()  # the function's kernels may round differently
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

        Graphs share the memory of the pool. Only the warm-up computes, so nothing is rewound. Raises NotRepeatable for
        operations that the host would wait for.
        """
        with _capture_lock, torch.cuda.device(self.device):
            first = run()
            if not self._graphs:  # torch frees a pool without graphs
                self._pool = torch.cuda.graph_pool_handle()
            graph, calling = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self.stream.wait_stream(calling)
            was_collecting = gc.isenabled()
            gc.disable()  # if the collector destroyed another graph, for example, the capture would end
            try:
                with torch.cuda.stream(self.stream):
                    self._begin(graph)
                    try:  # the warm-up may wait: the library reads some masks if no stream is capturing
                        with NoData(), NoWaiting() as watched:
                            output = run()
                        graph.capture_end()
                    except BaseException:
                        self._abandon(graph)
                        raise
            finally:
                if was_collecting:
                    gc.enable()
            calling.wait_stream(self.stream)
            self._graphs.add(graph)

        def replay() -> Any:
            graph.replay()
            return output

        # Only states of an encoder are large; a mask or token could reach a kernel that is not an operation of torch.
        return first, replay, 0, lambda tensor: not tensor.is_floating_point() or watched.has_read(tensor)

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Begins a capture with a copy of the default generator's state.

        torch marks the state as capturing: draws of other threads would raise an error meanwhile, and all later draws
        if CUDA ended the capture with an error, after which torch leaves the mark. A captured step draws nothing.
        """
        generator = torch.cuda.default_generators[self.device.index or 0]
        state = generator.graphsafe_get_state()
        generator.graphsafe_set_state(generator.clone_state())
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        finally:
            generator.graphsafe_set_state(state)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture after an error, in which torch before 2.12 leaves its allocator capturing (pytorch#180395)."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError, AttributeError):  # it has ended
            torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)


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


class StepState(Enum):
    """The state of a `CapturedStep`, which determines whether and how its output is trusted."""

    NEW = "not captured yet"
    CAPTURED = "the next run replays, and compares with the function"
    PROVEN = "replayed: a replay gave the function's output for other inputs than those of the capture"
    DROPPED = "not captured or replayed for the rest of the call"


class Replay:
    """One capture of a function: copies inputs to static buffers, and runs the captured kernels.

    inputs: nested; a replay's must have the same shapes and types. nbytes: what the capture and its buffers hold.
    may_diverge: whether a replay may break off because the function would take another branch.
    """

    def __init__(self, inputs: Any) -> None:
        leaves, self._structure = tree_flatten(inputs)
        self._buffers: list[Any] = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._unread: dict[int, Tensor] = {}  # leaves that no kernel reads, but that outputs may be
        self._copied: dict[int, tuple[Any, int | None]] = {}  # for each leaf, the tensor last copied and its version
        self._run: Run = tuple
        self.nbytes = 0
        self.may_diverge = False

    def capture(
        self, function: Callable[[Any], Any], inputs: Any, backend: CpuCapture | CudaCapture, rewind: Callable[[], None]
    ) -> Any:
        """Captures the function's kernels, and returns its output for these inputs. rewind: undoes what it counts."""
        output, self._run, self.nbytes, reads = backend.capture(
            lambda: function(tree_unflatten(self._buffers, self._structure)), rewind
        )
        self.may_diverge = bool(getattr(self._run, "may_diverge", False))
        for index, (leaf, buffer) in enumerate(zip(tree_leaves(inputs), self._buffers)):
            if isinstance(buffer, Tensor) and reads(buffer):
                self.nbytes += buffer.nbytes
            elif isinstance(buffer, Tensor):
                self._unread[index] = buffer
                buffer.set_(leaf)
        return output

    def fitting_leaves(self, inputs: Any) -> Any:
        """Returns the leaves of these inputs; None if the capture had inputs of other shapes or types."""
        leaves, structure = tree_flatten(inputs)
        if structure != self._structure:
            return None
        for leaf, buffer in zip(leaves, self._buffers):
            if isinstance(leaf, Tensor) and isinstance(buffer, Tensor):
                if leaf.shape != buffer.shape or leaf.dtype != buffer.dtype or leaf.device != buffer.device:
                    return None
            elif type(leaf) is not type(buffer) or leaf != buffer:
                return None
        return leaves

    def run(self, leaves: Any) -> Any:
        """Returns the output for these leaves, which the next replay overwrites."""
        for index, (leaf, buffer) in enumerate(zip(leaves, self._buffers)):
            if index in self._unread:
                buffer.set_(leaf)
            elif isinstance(leaf, Tensor):  # the same tensor, such as encoder states, may be in the buffer already
                version = None if leaf.is_inference() else leaf._version  # tells whether it was written since
                copied, copied_version = self._copied.get(index, (None, None))
                if version is None or version != copied_version or copied() is not leaf:
                    self._copied[index] = ref(leaf), version
                    buffer.copy_(leaf)
        return self._run()

    def release(self) -> None:
        """Releases the caller's tensors."""
        for buffer in self._unread.values():
            buffer.set_(buffer.new_empty(1).expand(buffer.shape))


class CapturedStep:
    """A forward of some number of tokens per row: `run` captures, compares, replays or falls back to the function.

        NEW ──run: capture──> CAPTURED ──run: replay, compared with the function──> PROVEN ──run: replay──> PROVEN

    An error, another output, or inputs that do not fit make it DROPPED; but what an earlier call has captured is
    captured anew if inputs do not fit, or if the function takes another branch.

    function: takes nested inputs and adds positions to `cache`, whose write position is reset if a run is discarded.
    is_used: whether this call has captured or replayed it.
    """

    def __init__(self, function: Callable[[Any], Any], cache: StaticKVCache) -> None:
        self.function, self.cache = function, cache
        self.state = StepState.NEW
        self.is_used = False
        self.replay: Replay | None = None

    def run(self, inputs: Any, captures: Any) -> Any:
        """Returns the outputs for these inputs; the next run overwrites them. captures: the loop's `Captures`."""
        outputs = self.attempt(inputs, captures)
        return self.function(inputs) if outputs is None else outputs

    def attempt(self, inputs: Any, captures: Any) -> Any:
        """Returns the same, or None if there is neither a capture nor a replay.

        After an error that nobody expects, the outputs are the function's.
        """
        state = self.state
        if state is StepState.DROPPED or captures.graphs.refused:
            return None
        try:
            return self._captured_or_replayed(inputs, captures)
        except Exception as error:
            if not self.cache.can_rewind:  # the states of a proven replay were not saved: the loop starts again
                raise
            self.drop()
            # If the function raises as well, the caller gets the error.
            outputs = None if isinstance(error, EXPECTED) else self.function(inputs)
            # Another branch of the function drops only a step that was right before; other errors refuse the model.
            was_right = captures.remembers and state is StepState.PROVEN
            if not (was_right and isinstance(error, (NotRepeatable, Diverged))):
                captures.refuse(error)
            return outputs

    def _captured_or_replayed(self, inputs: Any, captures: Any) -> Any:
        is_earlier = not self.is_used
        self.is_used = True
        replay, backend = self.replay, captures.graphs.backend
        leaves = None if replay is None else replay.fitting_leaves(inputs)
        if replay is None or (leaves is None and is_earlier):
            return self.capture(inputs, backend)
        if leaves is None:
            self.drop()
            return None
        is_proven = self.state is StepState.PROVEN
        if self.cache.states and (replay.may_diverge or not is_proven):  # the run may be discarded
            self.cache.save_states()
        try:
            outputs = replay.run(leaves) if is_proven else self._prove(replay, leaves, inputs, captures)
        except Diverged:
            if not is_earlier:
                raise
            self.drop()
            return self.capture(inputs, backend)  # the earlier call took another branch
        if outputs is not None:
            captures.call.report.kernels[backend.name] += 1
        return outputs

    def capture(self, inputs: Any, backend: CpuCapture | CudaCapture) -> Any:
        """Captures the function with inputs like these, replacing an earlier capture; returns its output for them."""
        self.state, self.replay = StepState.DROPPED, None  # in case of an interruption
        self.cache.save_states()
        replay = Replay(inputs)
        output = replay.capture(self.function, inputs, backend, self.cache.rewind)
        self.state, self.replay = StepState.CAPTURED, replay
        return output

    def _prove(self, replay: Replay, leaves: Any, inputs: Any, captures: Any) -> Any:
        """Returns the outputs of the first replay if the function gives the same logits, otherwise None."""
        expected = captures.loop.logits_of(self.function(inputs))
        self.cache.rewind()
        outputs = replay.run(leaves)
        if differs_sync(captures.loop.logits_of(outputs), expected):
            self.drop()
            captures.refuse("a replay gave other logits than the forward")
            return None
        self.state = StepState.PROVEN
        return outputs

    def drop(self) -> None:
        """Ends all replays, and rewinds the cache, so that a discarded attempt leaves no trace."""
        self.state, self.replay = StepState.DROPPED, None
        self.cache.rewind()


class CapturedGraph:
    """The captured steps over one static cache, by their number of tokens per row.

    It owns no KV buffers: these belong to `cache`, which it keeps alive, but does not create, move or grow; a step
    appends to it, and whatever is discarded resets its write position.

    function: of its steps, see `CapturedStep`. view: the host's view of `cache`. key: of the graph in a `GraphCache`.
    wanted: for each number of tokens per row, how often a step would have been replayed.
    """

    def __init__(
        self, function: Callable[[Any], Any], cache: StaticKVCache, view: Any = None, key: Hashable = None
    ) -> None:
        self.function, self.cache, self.view, self.key = function, cache, view, key
        self.wanted: Counter[int] = Counter()
        self._steps: dict[int, CapturedStep] = {}

    def begin(self, content: KVContent) -> None:
        """Copies the content into the cache; what was captured before counts as an earlier call's."""
        self.cache.load(content)
        for size, step in list(self._steps.items()):
            step.is_used = False
            if step.state is StepState.DROPPED:
                del self._steps[size]

    def step(self, size: int) -> CapturedStep:
        """Returns the step of `size` tokens per row."""
        if size not in self._steps:
            self._steps[size] = CapturedStep(self.function, self.cache)
        return self._steps[size]

    def drop(self) -> None:
        """Ends the replays of all steps; a forward that is running counts."""
        for step in self._steps.values():
            step.state, step.replay = StepState.DROPPED, None

    def forget_drafts(self) -> None:
        """Forgets the steps of several tokens."""
        self._steps = {1: self.step(1)}

    @property
    def replays(self) -> list[Replay]:
        """The captures of all its steps."""
        return [step.replay for step in self._steps.values() if step.replay is not None]

    @property
    def is_useful(self) -> bool:
        """Whether later calls may use it: a step is captured, and the step of one token was not dropped."""
        return bool(self.replays) and self.step(1).state is not StepState.DROPPED

    @property
    def nbytes(self) -> int:
        """The bytes of the cache, and of what the captures hold."""
        return self.cache.nbytes + sum(replay.nbytes for replay in self.replays)

    def end_call(self) -> None:
        """Releases the caller's tensors."""
        for replay in self.replays:
            replay.release()


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


def reason_of(cause: Exception | str, model: nn.Module) -> Reason:
    """Returns why steps are not captured after an error of the capture or of the host's code for static caches."""
    if isinstance(cause, torch.cuda.OutOfMemoryError):
        return Reason("OUT_OF_MEMORY", "out of memory for static buffers")
    is_expected = isinstance(cause, (str, NotRepeatable, Diverged))
    text = str(cause) if is_expected else f"{type(cause).__name__}: {cause}"
    text = f"{type(model).__name__}: {text}"
    return Reason(cause.code, text) if isinstance(cause, NotRepeatable) else Reason("CAPTURE_REFUSED", text)
