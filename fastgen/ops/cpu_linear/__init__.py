"""Products of rows with large weights on a CPU by the fastest of the GEMM backends, and their autotuning.
skinny_gemm.py has one of the backends, products of few rows written in C++.

No rule tells which is the fastest, see skinny_gemm.py for what was measured: that is measured once for each shape, and
remembered for later processes in a file of the user's cache folder, a line of JSON each. Lines are only added, each in
one write: of processes that measure the same at the same time, the first one's counts. Whatever the file and its folder
are, `generate` goes on: what cannot be read or written is measured by each process.

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
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fastgen.config import CONFIG
from fastgen.ops import x86
from fastgen.ops.cpu_linear import skinny_gemm
from fastgen.ops.kernel import Kernel, tolerance
from fastgen.ops.tracing import is_transformed

logger = logging.getLogger("fastgen")

# Finding the fastest way and calling it take some 10 microseconds.
MIN_ELEMENTS = 1 << 17

DTYPES = x86.DTYPES

BLAS, ONEDNN, SKINNY_GEMM = "BLAS", "oneDNN", "skinny GEMM"

# Of the measurements: products of more rows are bound by arithmetic, they are as those of so many.
MOST_ROWS = 256
# Another way has to be so much faster than BLAS, or what is measured is chance.
GAIN = 1.1
LEAST_ROUNDS, ROUNDS = 3, 9
SECONDS = 0.04  # after which no round beyond the least begins

# Of /proc/cpuinfo: what tells one CPU from another where virtual machines call all of them the same.
CPU_FIELDS = ("model name", "cpu family", "model", "stepping")

MAX_BYTES = 1 << 22  # of the file, some 20,000 measurements


@functools.cache
def machine_reasons() -> list[str]:
    """Why this machine has no use for it; empty if it has."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return ["this build of torch has no oneDNN"]
    try:
        is_transformed()
    except AttributeError as error:
        return [f"this version of torch does not tell whether products are recorded ({error})"]
    return []


def can_multiply(rows: Any, weight: Any, bias: Any) -> bool:
    """Whether `cpu_linear` takes these: rows `[…, in_features]`, weight `[out_features, in_features]` or its view.

    Asked for each product of a step that is not captured.
    """
    for tensor in (rows, weight) if bias is None else (rows, weight, bias):
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
            return False
        if not tensor.is_cpu or tensor.dtype != rows.dtype or tensor.dtype not in DTYPES:
            return False
    # oneDNN's product has no derivative, no batching rule, no form in TorchScript, and another name. Asked before the
    # sizes, because torch.jit.trace warns of every comparison of them.
    if is_transformed():
        return False
    if weight.dim() != 2 or weight.numel() < MIN_ELEMENTS:
        return False
    fits = rows.dim() > 1 and rows.is_contiguous() and rows.shape[-1] == weight.shape[1] and rows.numel() > 0
    fits = fits and (weight.is_contiguous() or weight.t().is_contiguous())  # oneDNN refuses overlapping strides
    fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))  # it reads no strides
    return fits and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`: rows `[…, in_features]`, weight `[out_features, in_features]`."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def _onednn_has(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a product of this type: it has none without the CPU's instructions."""
    try:
        with torch.no_grad(), _disable_current_modes():
            onednn_linear(*torch.zeros(2, 16, 16, dtype=dtype, device="cpu"))
    except RuntimeError:
        return False
    return True


_TASK = f"products with weights of {MIN_ELEMENTS:,} numbers or more, where it is the fastest"
_kernel = functools.partial(Kernel, device="cpu", task=_TASK)
# All give `rows @ weight.T + bias`; which is the fastest is measured.
KERNELS = (
    _kernel(SKINNY_GEMM, x86.machine_reasons, skinny_gemm.skinny_linear, counted_as=(f"cpu_linear, {SKINNY_GEMM}",)),
    _kernel(ONEDNN, machine_reasons, onednn_linear, supports=_onednn_has, counted_as=(f"cpu_linear, {ONEDNN}",)),
    Kernel(BLAS, list, functional.linear),
)


@functools.cache
def gemm_backends(dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """The kernels that this machine has for one of `DTYPES`, by name, torch's own first."""
    usable = (kernel for kernel in reversed(KERNELS) if not kernel.unsupported_reasons() and kernel.supports(dtype))
    return {kernel.name: kernel.run for kernel in usable}


class GemmShape(NamedTuple):
    """Products that take as long. rows: rounded up to a power of two. transposed: how the weight lies in memory."""

    rows: int
    in_features: int
    out_features: int
    transposed: bool
    bias: bool
    dtype: str
    threads: int


# The fastest way for each shape that this process has asked for or found in the file.
MEASURED: dict[GemmShape, str] = {}


def fastest(rows: Tensor, weight: Tensor, bias: Tensor | None, others: Callable[[], Sequence[Tensor]]) -> str:
    """The name of the fastest GEMM backend for this product, which `can_multiply` takes, and those of its shape.

    What is not known yet is measured, for some 50 milliseconds. The answer stays the same from then on, in later
    processes too, so that they compute the same bits. others: what a model reads between two products with this weight.
    """
    out_features, in_features = weight.shape
    count = min(1 << (rows.numel() // in_features - 1).bit_length(), MOST_ROWS)
    transposed, dtype, threads = not weight.is_contiguous(), str(weight.dtype), torch.get_num_threads()
    shape = GemmShape(count, in_features, out_features, transposed, bias is not None, dtype, threads)
    if shape not in MEASURED:
        for other, way in stored():
            MEASURED.setdefault(other, way)
    if shape not in MEASURED:
        with _disable_current_modes():  # nobody is to note what is only measured
            found = _measured(shape, weight, bias, others())
        if shape not in MEASURED:  # unless another thread was first
            store(shape, found, gemm_backends(weight.dtype))
            MEASURED.setdefault(shape, next((way for other, way in stored() if other == shape), found))
    return MEASURED[shape]


def stored() -> Iterator[tuple[GemmShape, str]]:
    """The measurements in the file among the backends that there are, without those that cannot be read."""
    dtypes = {str(dtype): dtype for dtype in DTYPES}
    with suppress(OSError):
        for line in _file().read_bytes().splitlines():
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # the last: many brackets
                values = json.loads(line)
                shape = GemmShape(**values["product"])
                backends = gemm_backends(dtypes[shape.dtype])
                if (way := values[_field(backends)]) in backends:
                    yield shape, way


def store(shape: GemmShape, way: str, backends: Collection[str]) -> None:
    """Adds a measurement to the file; backends: those among which the way is the fastest."""
    line = json.dumps({"product": shape._asdict(), _field(backends): way}) + "\n"
    with suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True)
        with _file().open("ab", buffering=0) as file:
            file.write(line.encode())


def _field(backends: Collection[str]) -> str:
    return f"fastest of {', '.join(backends)}, kernels {x86.VERSION}, {torch.backends.cpu.get_cpu_capability()}"


def _file() -> Path:
    """The path of the file; OSError where a link or a pipe is in its place, or it has grown beyond `MAX_BYTES`."""
    if os.path.lexists(file := path()) and (not stat.S_ISREG(file.lstat().st_mode) or file.stat().st_size > MAX_BYTES):
        raise OSError(f"{file} is no regular file of at most {MAX_BYTES} bytes")
    return file


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


def _measured(shape: GemmShape, weight: Tensor, bias: Tensor | None, others: Sequence[Tensor]) -> str:
    """Returns the fastest backend; before each product it reads others, so that caches hold what they do in a model."""
    numbers = torch.arange(shape.rows * shape.in_features) % 13 - 6
    rows = numbers.to(weight.dtype).view(shape.rows, shape.in_features)
    if not functional.linear(rows, weight, bias).isfinite().all():  # such weights say nothing of a way's correctness
        weight, bias = _random_like(weight), None if bias is None else _random_like(bias)
    multiply = _right_backends(rows, weight, bias)
    turns: dict[str, list[float]] = {name: [] for name in multiply}
    end = time.perf_counter() + SECONDS
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for name, found in turns.items():
            for other in others:
                other.sum()
            found.append(seconds_of(multiply[name], rows, weight, bias))
    seconds = {name: statistics.median(found) for name, found in turns.items()}
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[BLAS] > GAIN * seconds[best] else BLAS


def _random_like(tensor: Tensor) -> Tensor:
    """Numbers from -1 to 1 that lie in memory as the tensor does."""
    return torch.empty_like(tensor).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))


def _right_backends(rows: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Callable[..., Tensor]]:
    """The backends that are meant for so many rows and give them the numbers of BLAS.

    For many rows these are libraries, unless oneDNN has nothing for this dtype on this CPU: neither has BLAS then.
    """
    found = dict(gemm_backends(weight.dtype))
    if len(rows) > skinny_gemm.MOST_ROWS and ONEDNN in found:
        found.pop(SKINNY_GEMM, None)
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
