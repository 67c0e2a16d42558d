"""Autotuning: which GEMM backend is the fastest, measured once for each shape, and remembered for later processes.

No rule tells it, see few_rows.py for what was measured. The answers are in a file of the user's cache folder, a line of
JSON each. Lines are only added, each in one write: of processes that measure the same at the same time, the first one's
counts. Whatever the file and its folder are, `generate` goes on: what cannot be read or written is measured by each
process.

Tests: tests/ops/test_cpu_linear.py
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fastgen.config import CONFIG
from fastgen.ops.cpu_linear import few_rows
from fastgen.ops.cpu_linear.product import BLAS, FEW_ROWS, ways
from fastgen.ops.tolerances import tolerance

logger = logging.getLogger("fastgen")

# Products of more rows are bound by arithmetic: they are as those of so many.
MOST_ROWS = 256
# Another way has to be so much faster than BLAS, or what is measured is chance.
GAIN = 1.1
ROUNDS = 3
SECONDS = 0.04  # after which no further round begins

# Of /proc/cpuinfo: what tells one CPU from another where virtual machines call all of them the same.
CPU_FIELDS = ("model name", "cpu family", "model", "stepping")

MAX_BYTES = 1 << 22  # of the file, some 20,000 measurements
# A pipe must not block, and a link leads to a file that is not ours. Windows has neither flag.
OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class GemmShape(NamedTuple):
    """Products that take as long. rows: rounded up to a power of two. transposed: how the weight lies in memory."""

    rows: int
    in_features: int
    out_features: int
    transposed: bool
    bias: bool
    dtype: str
    threads: int


class AutotuneCache:
    """The fastest of these backends for each GEMM shape, as measured by this process and earlier ones."""

    def __init__(self, backends: tuple[str, ...]) -> None:
        self.backends, self.field = backends, f"fastest of {', '.join(backends)}"
        self.fastest: dict[GemmShape, str] = {}
        self.is_loaded = False

    def __contains__(self, shape: GemmShape) -> bool:
        if not self.is_loaded:
            self.fastest.update(self.load())
            self.is_loaded = True
        return shape in self.fastest

    def load(self) -> dict[GemmShape, str]:
        """The measurements in the file, without those that cannot be read."""
        found: dict[GemmShape, str] = {}
        with suppress(OSError), _opened(os.O_RDONLY) as file:
            for line in os.read(file, MAX_BYTES).splitlines():
                with suppress(ValueError, TypeError, KeyError, RecursionError):  # the last: many brackets
                    values = json.loads(line)
                    if values[self.field] in self.backends:
                        found.setdefault(GemmShape(**values["product"]), values[self.field])
        return found

    def add(self, shape: GemmShape, backend: str) -> None:
        """Stores a measurement, here and for later processes, unless another thread was first."""
        if self.fastest.setdefault(shape, backend) is not backend:
            return
        line = json.dumps({"product": shape._asdict(), self.field: backend}) + "\n"
        with suppress(OSError):
            path().parent.mkdir(parents=True, exist_ok=True)
            with _opened(os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
                os.write(file, line.encode())


@contextmanager
def _opened(flags: int) -> Iterator[int]:
    """The descriptor of the file; OSError where it is no regular file, or has grown beyond `MAX_BYTES`."""
    file = os.open(path(), flags | OPEN_FLAGS, 0o666)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise OSError(f"{path()} is no regular file of at most {MAX_BYTES} bytes")
        yield file
    finally:
        os.close(file)


def path() -> Path:
    """The file; another CPU or another version of torch has another one. OSError where the user has no home folder."""
    folder = CONFIG.cache or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fastgen")
    try:
        return Path(folder).expanduser() / f"products-torch-{torch.__version__}-{_cpu()}.jsonl"
    except RuntimeError as error:
        raise FileNotFoundError(f"{folder}: {error}") from error


@functools.cache
def _cpu() -> str:
    name = platform.processor() or platform.machine()
    with suppress(OSError):  # only Linux has it
        pairs = [line.partition(":") for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines()]
        values = {key.strip(): value.strip() for key, _, value in pairs}
        name = " ".join(values[field] for field in CPU_FIELDS if field in values) or name
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def kind_of(rows: Tensor, weight: Tensor, bias: Tensor | None) -> GemmShape:
    """The kind of a product that `can_multiply` takes."""
    out_features, in_features = weight.shape
    count = min(1 << (rows.numel() // in_features - 1).bit_length(), MOST_ROWS)
    transposed, dtype, threads = not weight.is_contiguous(), str(weight.dtype), torch.get_num_threads()
    return GemmShape(count, in_features, out_features, transposed, bias is not None, dtype, threads)


@functools.cache
def autotune_cache() -> AutotuneCache:
    """Among the ways that there are."""
    return AutotuneCache(tuple(ways()))


def fastest(kind: GemmShape, weight: Tensor, bias: Tensor | None, others: Callable[[], Sequence[Tensor]]) -> str:
    """The name of the fastest of `ways` for products of this kind.

    What is not known yet is measured, for some 30 milliseconds. The answer stays the same from then on, in later
    processes too, so that they compute the same bits. others: what a model reads between two products with this weight.
    """
    cache = autotune_cache()
    if kind not in cache:
        with _disable_current_modes():  # nobody is to note what is only measured
            cache.add(kind, _measured(kind, weight, bias, others()))
    return cache.fastest[kind]


def _measured(kind: GemmShape, weight: Tensor, bias: Tensor | None, others: Sequence[Tensor]) -> str:
    """Before each product the others are read, as in a model: the weight comes from where it comes from there."""
    numbers = torch.arange(kind.rows * kind.in_features) % 13 - 6
    rows = numbers.to(weight.dtype).view(kind.rows, kind.in_features)
    if not functional.linear(rows, weight, bias).isfinite().all():  # such weights say nothing of a way's correctness
        weight, bias = _random_like(weight), None if bias is None else _random_like(bias)
    multiply = _right_ways(rows, weight, bias)
    seconds = dict.fromkeys(multiply, float("inf"))
    end = time.perf_counter() + SECONDS
    for _ in range(ROUNDS):
        for name in seconds:
            for other in others:
                other.sum()
            seconds[name] = min(seconds[name], seconds_of(multiply[name], rows, weight, bias))
        if time.perf_counter() > end:
            break
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[BLAS] > GAIN * seconds[best] else BLAS


def _random_like(tensor: Tensor) -> Tensor:
    """Numbers from -1 to 1 that lie in memory as the tensor does."""
    return torch.empty_like(tensor).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))


def _right_ways(rows: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Callable[..., Tensor]]:
    """The ways that are meant for so many rows and give them the numbers of BLAS."""
    is_few = len(rows) <= few_rows.MOST_ROWS
    found = {name: way for name, way in ways().items() if is_few or name != FEW_ROWS}
    expected = found[BLAS](rows, weight, bias)
    most = tolerance("product", weight.dtype) * expected.abs().max()
    right = {name: way for name, way in found.items() if (way(rows, weight, bias) - expected).abs().max() <= most}
    for name in found.keys() - right.keys():
        logger.warning("products of the kind %r are wrong for %s and not used", name, tuple(weight.shape))
    return {BLAS: found[BLAS], **right}


def seconds_of(product: Callable[..., Tensor], *tensors: Tensor | None) -> float:
    """What one product takes."""
    start = time.perf_counter()
    product(*tensors)
    return time.perf_counter() - start
