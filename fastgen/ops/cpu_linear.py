"""Products of rows with large weights on a CPU: the skinny GEMM, and the choice of the fastest backend.

The skinny GEMM (`csrc/skinny_gemm.cpp`) is for few rows in fp32, bf16 or fp16, and reads each weight once, unpacked. In
bf16 and fp16 sums are in fp32 and rounded once. bf16 has dot products of pairs where there is AVX512_BF16 (VDPBF16PS);
elsewhere, as in fp16, weights are widened in registers, which halves the bytes that a row waits for.

AMD EPYC (family 25, AVX2), two threads, weights not in a cache, ms, BLAS, oneDNN, oneDNN with a packed weight, these:
1 × [768 → 3072] 0.72, 0.52, 0.52, 0.47; 4 × 1.65, 0.98, 0.60, 0.45; 16 × 1.57, 1.33, 0.96, 0.81; 32 × 1.84, 1.52, 1.29,
1.18; 16 × [768 → 50265] 33, 17, 13, 10. Transposed, as in GPT-2: 2 × [768 → 3072] 0.98, 0.65, 0.45, 0.38; 16 × 1.69,
1.58, 0.97, 0.89; 256 × 11.6, 17.0, 9.3, 13.8. AMD EPYC (model 17, AVX-512), GFLOP/s of BLAS, oneDNN and these:
[768 → 3072] 4 × 17, 35, 67; 16 × 66, 93, 183; 32 × 96, 131, 203; in bf16 54, 55, 136; 159, 161, 344; 196, 203, 367;
[384 → 51865] 40 × 76, 131, 184; in bf16 234, 249, 340. AMD EPYC (family 26, model 2), µs of BLAS and these in fp16:
[1024 → 4096] 1 × 161, 115; 4 × 631, 113; 16 × 2,700, 332; 64 × 9,991, 1,286; 1024 × 156,082, 20,581.

No rule predicts the fastest backend. So each shape is measured once, and the results are stored for later processes,
see fastgen/ops/measurements.py.

Tests: tests/ops/test_skinny_gemm.py, tests/ops/test_cpu_linear.py
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fastgen.ops import measurements, simd
from fastgen.ops.activations import ACTIVATIONS, GELU, RELU
from fastgen.ops.fusion import Fusion, Name, Op, Values
from fastgen.ops.kernel import Kernel, tolerance
from fastgen.ops.tracing import TracedCall, is_transformed

logger = logging.getLogger("fastgen")

# The skinny GEMM.

# With more rows, a weight is read several times.
MOST_SKINNY_ROWS = 64

_ARGUMENTS = (*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 3, *[ctypes.c_int32] * 3)


def skinny_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `rows @ weight.T + bias` on at most `torch.get_num_threads()` threads.

    rows `[…, in_features]`, bias `[out_features]`, both contiguous; weight `[out_features, in_features]`, contiguous or
    a transposed view; all of one of `simd.DTYPES`, on a CPU. The bits do not depend on the number of rows or threads.
    """
    if torch._C._len_torch_dispatch_stack():
        return torch.ops.fastgen.skinny_linear(rows, weight, bias)
    output = rows.new_empty((*rows.shape[:-1], weight.shape[0]))
    product_into(output, rows, weight, bias, address_of=Tensor.data_ptr)()
    return output


def product_into(
    output: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: Tensor | None = None,
    activation: str = "",
    address_of: Callable[[Tensor], Any] = simd.Address,
) -> partial[None]:
    """Returns a call that writes the product into `output`, `[…, out_features]`.

    activation: one of `ACTIVATIONS`, applied to the product. added: a contiguous tensor of the output's shape, added to
    it at the end.
    address_of: returns the address of weight or bias, which may move between two replays, but not change.
    """
    out_features, in_features = weight.shape
    function = simd.function("skinny_gemm", rows.dtype, _ARGUMENTS)
    parameters = address_of(weight), None if bias is None else address_of(bias)
    added_address = None if added is None else added.data_ptr()
    outputs = output.data_ptr()
    sizes = rows.numel() // in_features, in_features, out_features
    options = not weight.is_contiguous(), ACTIVATIONS.index(activation), torch.get_num_threads()
    return partial(function, rows.data_ptr(), *parameters, added_address, outputs, *sizes, *options)


_skinny_linear = simd.operation(
    "skinny_linear(Tensor rows, Tensor weight, Tensor? bias, Tensor? added=None, str activation='')",
    product_into,
    lambda rows, weight, *rest: rows.new_empty((*rows.shape[:-1], weight.shape[0])),
)


# Operations of torch without an argument that are an activation.
_ACTIVATIONS = {torch.ops.aten.relu.default: RELU, torch.ops.aten.gelu.default: GELU}


def _replacement(values: Values, last: TracedCall) -> TracedCall | None:
    """Returns a product with the activation, or the sum with other rows, that follows it."""
    product = values["product"]
    added = values.get("added")
    if added is not None:
        is_tensor = isinstance(added, Tensor) and added.shape == product.shape
        if not (is_tensor and added.dtype == product.dtype and added.is_contiguous()):
            return None
    rows, weight, bias = values["rows"], values["weight"], values["bias"]
    read = [tensor for tensor in (rows, weight, bias, added) if tensor is not None]
    activation = values.get("activation", _ACTIVATIONS.get(last.operation, ""))
    arguments = rows, weight, bias, added, activation
    return TracedCall(torch.ops.fastgen.skinny_linear.default, arguments, {}, last.result, read, last.outputs)


def fusions() -> list[Fusion]:
    """Returns how products are fused with the activation, or the sum with other rows, that follows them."""
    aten = torch.ops.aten
    inputs = (Name("rows"), Name("weight"), Name("bias"))
    product = Op((torch.ops.fastgen.skinny_linear.default,), inputs, name="product")
    activated = Op(tuple(_ACTIVATIONS), (product,))
    gelu = Op((torch.ops.fastgen.gelu.default,), (product, Name("activation")))
    added = Op((aten.add.Tensor,), (Name("added"), product), commutes=True)
    return [Fusion(pattern, _replacement) for pattern in (activated, gelu, added)]


# The choice of a backend.

# Weights with fewer numbers are left to torch: looking up the fastest backend takes some 10 microseconds.
MIN_ELEMENTS = 1 << 17

DTYPES = simd.DTYPES

BLAS, ONEDNN, SKINNY_GEMM = "BLAS", "oneDNN", "skinny GEMM"

# The most rows in a measurement: products of more are bound by arithmetic, and rank the same.
MOST_ROWS = 256
# A backend is preferred to BLAS if it is at least this many times as fast; less may be noise.
GAIN = 1.1
LEAST_ROUNDS, ROUNDS = 2, 5
# In a step, products of one backend follow each other. So each round has two turns of a backend: the second finds its
# code in the caches. If the backend changes in each turn, 1 × [768 → 768] takes 1.6× its time with the skinny GEMM, and
# 1.3× with BLAS.
TURNS = 2
SECONDS = 0.04  # no round after the least begins later

# Fields of /proc/cpuinfo that tell CPUs apart, also in virtual machines, where model names are all alike.
CPU_FIELDS = ("model name", "cpu family", "model", "stepping")

KIND = "products"  # of measurements


@functools.cache
def machine_reasons() -> list[str]:
    """Returns why this machine cannot use oneDNN's products; empty if it can."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return ["this build of torch has no oneDNN"]
    return []


def can_multiply(rows: Any, weight: Any, bias: Any) -> bool:
    """Whether `cpu_linear` supports rows `[…, in_features]` and weight `[out_features, in_features]` or its view.

    Called for each product of a step that is not captured, so it must be quick.
    """
    for tensor in (rows, weight) if bias is None else (rows, weight, bias):
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
            return False
        if not tensor.is_cpu or tensor.dtype != rows.dtype or tensor.dtype not in DTYPES:
            return False
    # oneDNN's product has no derivative, no batching rule, no form in TorchScript, and another name. Checked before the
    # sizes, because torch.jit.trace warns about every comparison of them.
    if is_transformed():
        return False
    if weight.dim() != 2 or weight.numel() < MIN_ELEMENTS:
        return False
    fits = rows.dim() > 1 and rows.is_contiguous() and rows.shape[-1] == weight.shape[1] and rows.numel() > 0
    fits = fits and (weight.is_contiguous() or weight.t().is_contiguous())  # oneDNN refuses overlapping strides
    fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))  # it reads no strides
    return fits and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `rows @ weight.T + bias`: rows `[…, in_features]`, weight `[out_features, in_features]`."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def _onednn_has(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in this dtype, for which the CPU needs the instructions."""
    try:
        with torch.no_grad(), _disable_current_modes():
            onednn_linear(*torch.zeros(2, 16, 16, dtype=dtype, device="cpu"))
    except RuntimeError:
        return False
    return True


_TASK = f"products with weights of {MIN_ELEMENTS:,} numbers or more, where it is the fastest"
_kernel = functools.partial(Kernel, device="cpu", task=_TASK)
# All compute `rows @ weight.T + bias`; the fastest is found by measuring.
KERNELS = (
    _kernel(SKINNY_GEMM, simd.machine_reasons, skinny_linear, counted_as=(f"cpu_linear, {SKINNY_GEMM}",)),
    _kernel(ONEDNN, machine_reasons, onednn_linear, supports=_onednn_has, counted_as=(f"cpu_linear, {ONEDNN}",)),
    Kernel(BLAS, list, functional.linear),
)


@functools.cache
def gemm_backends(dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Returns the kernels that this machine has for one of `DTYPES`, by name, torch's own first."""
    usable = (kernel for kernel in reversed(KERNELS) if not kernel.unsupported_reasons() and kernel.supports(dtype))
    return {kernel.name: kernel.run for kernel in usable}


class GemmShape(NamedTuple):
    """The key of a measurement. rows: rounded up to a power of two. transposed: if the weight is a transposed view."""

    rows: int
    in_features: int
    out_features: int
    transposed: bool
    bias: bool
    dtype: str
    threads: int


# The fastest backend for each shape that this process has measured or read from the file.
MEASURED: dict[GemmShape, str] = {}


def fastest(rows: Tensor, weight: Tensor, bias: Tensor | None, other_tensors: Callable[[], Sequence[Tensor]]) -> str:
    """Returns the name of the fastest GEMM backend for products of this shape, for which `can_multiply` is true.

    A new shape is measured, for some 50 milliseconds. The answer stays the same from then on, in later processes too,
    so that they compute the same bits. `other_tensors`: returns what the model reads between two products with this
    weight.
    """
    out_features, in_features = weight.shape
    count = min(1 << (rows.numel() // in_features - 1).bit_length(), MOST_ROWS)
    transposed = not weight.is_contiguous()
    dtype = str(weight.dtype)
    threads = torch.get_num_threads()
    shape = GemmShape(count, in_features, out_features, transposed, bias is not None, dtype, threads)
    if shape not in MEASURED:
        for other, way in stored():
            MEASURED.setdefault(other, way)
    if shape not in MEASURED:
        with _disable_current_modes():  # the user's modes must not see measurements
            way = _measured(shape, weight, bias, other_tensors())
        if shape not in MEASURED:  # unless another thread was first
            store(shape, way, gemm_backends(weight.dtype))
            MEASURED.setdefault(shape, next((first for other, first in stored() if other == shape), way))
    return MEASURED[shape]


def stored() -> Iterator[tuple[GemmShape, str]]:
    """Yields the file's measurements that compare this machine's backends; skips lines of another form."""
    dtypes = {str(dtype): dtype for dtype in DTYPES}
    for values in measurements.stored(KIND, _cpu()):
        with suppress(ValueError, TypeError, KeyError):
            shape = GemmShape(**values["product"])
            backends = gemm_backends(dtypes[shape.dtype])
            if (way := values[_field(backends)]) in backends:
                yield shape, way


def store(shape: GemmShape, way: str, backends: Collection[str]) -> None:
    """Appends a measurement to the file; backends: the names among which `way` is the fastest."""
    measurements.store(KIND, _cpu(), {"product": shape._asdict(), _field(backends): way})


def _field(backends: Collection[str]) -> str:
    return f"fastest of {', '.join(backends)}, kernels {simd.VERSION}, {torch.backends.cpu.get_cpu_capability()}"


@functools.cache
def _cpu() -> str:
    name = platform.processor() or platform.machine()
    with suppress(OSError):  # only Linux has it
        pairs = [line.partition(":") for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines()]
        values = {key.strip(): value.strip() for key, _, value in pairs}
        name = " ".join(values[field] for field in CPU_FIELDS if field in values) or name
    return name


def _measured(shape: GemmShape, weight: Tensor, bias: Tensor | None, other_tensors: Sequence[Tensor]) -> str:
    """Returns the fastest backend. Reads `other_tensors` before each product: caches hold the same as in a model."""
    numbers = torch.arange(shape.rows * shape.in_features) % 13 - 6
    rows = numbers.to(weight.dtype).view(shape.rows, shape.in_features)
    if not functional.linear(rows, weight, bias).isfinite().all():  # results could not be compared
        weight = _random_like(weight)
        bias = None if bias is None else _random_like(bias)
    multiply = _right_backends(rows, weight, bias)
    turns: dict[str, list[float]] = {name: [] for name in multiply}
    end = time.perf_counter() + SECONDS
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for name in [name for name in turns for _ in range(TURNS)]:
            for tensor in other_tensors:
                tensor.sum()
            turns[name].append(seconds_of(multiply[name], rows, weight, bias))
    seconds = {name: min(times) for name, times in turns.items()}  # other programs only add to them
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[BLAS] > GAIN * seconds[best] else BLAS


def _random_like(tensor: Tensor) -> Tensor:
    """Returns random numbers from -1 to 1 with the tensor's shape, dtype and strides."""
    return torch.empty_like(tensor).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))


def _right_backends(rows: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Callable[..., Tensor]]:
    """Returns the backends that suit this number of rows and agree with BLAS, by name.

    The skinny GEMM suits many rows only if oneDNN has nothing for this dtype on this CPU: neither has BLAS then.
    """
    backends = dict(gemm_backends(weight.dtype))
    if len(rows) > MOST_SKINNY_ROWS and ONEDNN in backends:
        backends.pop(SKINNY_GEMM, None)
    expected = backends[BLAS](rows, weight, bias)
    most = tolerance("product", weight.dtype) * expected.abs().max()
    right = {name: way for name, way in backends.items() if (way(rows, weight, bias) - expected).abs().max() <= most}
    for name in backends.keys() - right.keys():
        logger.warning("products of the kind %r are wrong for %s and not used", name, tuple(weight.shape))
    return {BLAS: backends[BLAS], **right}


def seconds_of(product: Callable[..., Tensor], *tensors: Tensor | None) -> float:
    """Returns the seconds that one product takes."""
    start = time.perf_counter()
    product(*tensors)
    return time.perf_counter() - start
