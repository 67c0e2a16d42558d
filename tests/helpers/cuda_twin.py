"""A twin of a GPU, for machines without one: `torch.cuda` as far as fastgen and its tests use it.

Tensors say `cuda:0`, and torch's kernels for the CPU compute them (cuda_twin.cpp). Launches and waits of the host are
counted; graphs are recorded kernel by kernel and replayed into the same memory. As in torch, a wait within a capture
raises, and so does a capture during another one, in any thread, or into a pool whose graphs are gone.
It shows neither the order of streams nor the memory of pools, the rounding of a GPU's kernels, or several devices.
fastgen's own CUDA and Triton kernels do not run on it, nor do Liger's; `attend_in_one_kernel` and `with_liger` put
operations in their place.

It changes torch for the whole process: `python -m pytest -p cuda_twin tests/gpu/...` with this folder in PYTHONPATH.
CUDA_TWIN is the compiled library, if there is one. CUDA_TWIN_KERNELS=1: attention is one kernel, in fp32 as well.

Tests: tests/optimizer/test_cuda_twin.py
"""

from __future__ import annotations

import ctypes
import itertools
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch

DEVICE = torch.device("cuda", 0)

_library: Any = None


def pytest_configure(config: Any) -> None:
    """Installs the twin before the tests are imported: they ask whether there is a GPU."""
    if "CUDA_TWIN" in os.environ:
        install(os.environ["CUDA_TWIN"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            install(compiled(Path(folder)))
    if os.environ.get("CUDA_TWIN_KERNELS") == "1":
        attend_in_one_kernel(True)


def compiled(folder: Path) -> Path:
    """Compiles cuda_twin.cpp for this build of torch; returns the library's path."""
    from host_compiler import compile_cpp  # which imports fastgen

    root = Path(torch.__file__).parent
    flags = ("-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-shared", "-fPIC")
    libraries = ("-isystem", root / "include", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu")
    return compile_cpp(folder / "libcuda_twin.so", *flags, Path(__file__).with_suffix(".cpp"), *libraries)


def install(path: Path | str) -> None:
    """Makes the twin this process's only GPU. path: of the compiled cuda_twin.cpp."""
    global _library
    _library = ctypes.CDLL(str(path))
    _library.twin_counts.restype = ctypes.c_char_p
    for name, value in _attributes().items():
        setattr(torch.cuda, name, _in_torch(value) if isinstance(value, FunctionType) else value)
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor.clone()
    torch.Tensor.__deepcopy__ = _copying(torch.Tensor.__deepcopy__)

    attend_in_one_kernel(False)  # imports fastgen, after torch.cuda is changed
    from fastgen.ops import liger

    liger.unsupported_reasons = lambda: ["its kernels need a GPU"]


def attend_in_one_kernel(does: bool) -> None:
    """Puts one kernel, with the definition's results, in the place of those in Triton, or makes Triton unsupported."""
    from fastgen.ops import cpu_attention, shared_attention

    def can_attend(query: torch.Tensor, keys: Any, values: Any, mask: torch.Tensor | None) -> bool:
        return type(mask) in (type(None), torch.Tensor) and cpu_attention.are_plain(query, keys, values)

    def attention(query: torch.Tensor, *others: Any) -> torch.Tensor:
        *arguments, bounds = others
        return torch.ops.cuda_twin.attention(query, *arguments, None if bounds is None else bounds.ancestors)

    kernels = SimpleNamespace(
        DTYPES=(torch.float32, torch.float16, torch.bfloat16),
        LARGEST_WIDTH=256,
        can_attend=can_attend,
        attention=attention,
    )
    shared_attention._triton_attention = lambda device: kernels if does else None


def _attention(
    query: torch.Tensor, keys: Any, values: Any, mask: Any, scale: float, ancestors: torch.Tensor | None
) -> torch.Tensor:
    from fastgen.ops.shared_attention import Bounds, attention_by_products, follow_ancestors

    bounds = Bounds(query, query, ancestors)
    return attention_by_products(query, follow_ancestors(keys, bounds), follow_ancestors(values, bounds), mask, scale)


@contextmanager
def with_liger() -> Iterator[None]:
    """Puts one kernel each, with the definitions' results, in the place of Liger's."""
    from fastgen.ops import liger

    operations = torch.ops.cuda_twin
    replaced = {name: getattr(operations, name) for name in ("rms_norm", "rotated", "gated")}
    with mock.patch.multiple(liger, unsupported_reasons=list, **replaced):
        yield


def _rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds: str) -> torch.Tensor:
    scaled = rows.float() * torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + epsilon)
    if rounds == "llama":
        return (offset + weight) * scaled.to(rows.dtype)
    return ((offset + weight.float()) * scaled).to(rows.dtype)


def _rotated(
    queries: torch.Tensor, keys: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def turned(states: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, dim=-1)
        return states * cosines[:, None] + torch.cat([-second, first], dim=-1) * sines[:, None]

    return turned(queries), turned(keys)


def _gated(gate: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * product


_of_twin = torch.library.Library("cuda_twin", "DEF")
_of_twin.define(
    "attention(Tensor query, Tensor[] keys, Tensor[] values, Tensor? mask, float scale, Tensor? table) -> Tensor"
)
_of_twin.impl("attention", _attention, "CPU")
_of_twin.define("rms_norm(Tensor rows, Tensor weight, float epsilon, float offset, str rounds) -> Tensor")
_of_twin.impl("rms_norm", _rms_norm, "CPU")
_of_twin.define("rotated(Tensor queries, Tensor keys, Tensor cosines, Tensor sines) -> (Tensor, Tensor)")
_of_twin.impl("rotated", _rotated, "CPU")
_of_twin.define("gated(Tensor gate, Tensor product) -> Tensor")
_of_twin.impl("gated", _gated, "CPU")


def counts(of: str) -> Counter[str]:
    """Returns how often each kernel was launched, or the host waited for each reason: "launches" or "waits"."""
    lines = _library.twin_counts(of.encode()).decode().splitlines()
    return Counter({name: int(number) for name, number in (line.rsplit(" ", 1) for line in lines)})


def _in_torch(function: FunctionType) -> FunctionType:
    """Returns the function as one of a module of torch: models that run user code are left to the library."""
    names = {**function.__globals__, "__name__": "torch.cuda"}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def _copying(deepcopy: Callable[[Any, dict], Any]) -> Callable[[Any, dict], Any]:
    """Wraps `deepcopy` of a tensor: storages of the device, of which torch knows nothing, are cloned instead."""

    def copy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not tensor.is_cuda:
            return deepcopy(tensor, memo)
        return memo.setdefault(id(tensor), tensor.detach().clone())

    return copy


def synchronize(device: Any = None) -> None:
    """Waits for the device, as far as counts and captures are concerned."""
    if _library.twin_is_capturing():
        _library.twin_fail_capture()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing (synchronize)")


class Stream:
    """A stream that has always finished its work."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.cuda_stream = DEVICE, next(_numbers)

    def wait_stream(self, other: Stream) -> None:
        """Changes nothing: kernels run in the order of the calls."""

    def synchronize(self) -> None:
        synchronize()


class Event:
    """An event that has happened: a host that waits for the previous step's event does not hold up the device."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Records the time of the host."""
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Returns immediately."""

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds until `end`."""
        return (end.seconds - self.seconds) * 1e3


class Generator:
    """A generator of random numbers, whose state is marked during a capture that has begun with it.

    Outside of the capture a marked state cannot be drawn from. The numbers are those of torch's generator for a CPU.
    """

    def __init__(self, state: SimpleNamespace | None = None) -> None:
        self._state = state or SimpleNamespace(is_capturing=False)
        self.get_state, self.set_state = torch.default_generator.get_state, torch.default_generator.set_state

    def clone_state(self) -> Generator:
        """Returns a generator with a state of its own."""
        return Generator()

    def graphsafe_get_state(self) -> Generator:
        """Returns a generator with the same state."""
        return Generator(self._state)

    def graphsafe_set_state(self, other: Generator) -> None:
        """Takes over the state of another generator."""
        self._state = other._state
        _library.twin_mark_generator(self._state.is_capturing)

    def mark(self, is_capturing: bool) -> SimpleNamespace:
        """Marks the state, and returns it."""
        self._state.is_capturing = is_capturing
        _library.twin_mark_generator(is_capturing)
        return self._state


class CUDAGraph:
    """A graph, whose kernels are called in turn."""

    def __init__(self) -> None:
        self._number = ctypes.c_int64(next(_numbers))
        self._random: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if pool in _pools and not _pools[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: torch has freed this pool with its last graph")
        if not current_stream().cuda_stream or not _capturing.acquire(blocking=False):
            raise RuntimeError("CUDA error: a capture begins on the default stream, or during another capture")
        if pool is not None:
            _pools.setdefault(pool, WeakSet()).add(self)
        self._random = _generator.mark(True)
        _library.twin_begin_capture()

    def capture_end(self) -> None:
        """Ends the capture; after an error in it torch raises before it takes back the mark of the random state."""
        is_right = _library.twin_end_capture(self._number)
        with suppress(RuntimeError):  # released
            _capturing.release()
        if not is_right:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._random.is_capturing = False
        _generator.graphsafe_set_state(_generator)

    def replay(self) -> None:
        _library.twin_replay(self._number)

    def __del__(self) -> None:
        _library.twin_drop(self._number)


_numbers = itertools.count(1)  # of streams, graphs and pools
_capturing = threading.Lock()  # held during a capture
_pools: dict[Any, WeakSet[CUDAGraph]] = {}  # the graphs of each handle that captures have used
_generator = Generator()
_default_stream = Stream()
_default_stream.cuda_stream = 0
_current = threading.local()


def current_stream(device: Any = None) -> Stream:
    """Returns the current stream of this thread."""
    return getattr(_current, "stream", _default_stream)


@contextmanager
def stream(other: Stream) -> Iterator[None]:
    """Makes the other stream current inside."""
    before, _current.stream = current_stream(), other
    try:
        yield
    finally:
        _current.stream = before


def _attributes() -> dict[str, Any]:
    """Returns the new attributes of `torch.cuda` by their names."""
    generator = torch.default_generator
    nothing, zero = lambda *args, **kwargs: None, lambda *args, **kwargs: 0
    return {
        **dict.fromkeys(("_lazy_init", "empty_cache", "reset_peak_memory_stats"), nothing),
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), zero),
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated"), zero),
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "current_device": lambda: DEVICE,  # torch does not find it by its number
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "twin of a GPU",
        "mem_get_info": lambda device=None: (1 << 36, 1 << 36),
        "default_generators": (_generator,),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "synchronize": synchronize,
        "set_sync_debug_mode": lambda mode: _library.twin_waiting_is_an_error(mode == "error"),
        "is_current_stream_capturing": lambda: bool(_library.twin_is_capturing()),
        "current_stream": current_stream,
        "stream": stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": lambda: (0, next(_numbers)),
    }
