"""Autotuning: which way of multiplying is the fastest, measured once for each kind of product.

No rule tells it, see few_rows.py for what was measured.

Tests: tests/ops/test_cpu_linear.py
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fastgen.ops.cpu_linear import few_rows
from fastgen.ops.cpu_linear.autotune_cache import AutotuneCache, GemmShape
from fastgen.ops.cpu_linear.product import BLAS, FEW_ROWS, ways
from fastgen.ops.tolerances import tolerance

logger = logging.getLogger("fastgen")

# Products of more rows are bound by arithmetic: they are as those of so many.
MOST_ROWS = 256
# Another way has to be so much faster than BLAS, or what is measured is chance.
GAIN = 1.1
ROUNDS = 3
SECONDS = 0.04  # after which no further round begins


def kind_of(rows: Tensor, weight: Tensor, bias: Tensor | None) -> GemmShape:
    """The kind of a product that `can_multiply` takes."""
    out_features, in_features = weight.shape
    count = min(1 << (rows.numel() // in_features - 1).bit_length(), MOST_ROWS)
    transposed, dtype, threads = not weight.is_contiguous(), str(weight.dtype), torch.get_num_threads()
    return GemmShape(count, in_features, out_features, transposed, bias is not None, dtype, threads)


@functools.cache
def cache_of(dtype: torch.dtype) -> AutotuneCache:
    """For rows of this type, among the ways that there are."""
    return AutotuneCache(tuple(ways(dtype)))


def fastest(kind: GemmShape, weight: Tensor, bias: Tensor | None, others: Callable[[], Sequence[Tensor]]) -> str:
    """The name of the fastest of `ways` for products of this kind.

    What is not known yet is measured, for some 30 milliseconds. The answer stays the same from then on, in later
    processes too, so that they compute the same bits. others: what a model reads between two products with this weight.
    """
    cache = cache_of(weight.dtype)
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
    found = {name: way for name, way in ways(weight.dtype).items() if is_few or name != FEW_ROWS}
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
