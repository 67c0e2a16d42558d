"""Which of BLAS and oneDNN is faster, measured once for each kind of product and kept.

No rule tells it. AMD EPYC (family 25, 32 MB of L3 cache), two threads, weights as GPT-2 keeps them and not in a cache,
ms, BLAS and oneDNN: 4 × [768 → 3072] 1.8 and 1.0, 8 × [3072 → 768] 1.5 and 2.3 (in the cache 1.4 and 1.2), 64 ×
[768 → 3072] 3.7 and 4.9; with one thread 1.9 and 1.4, 1.5 and 1.3, 4.7 and 7.3.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops.cpu_linear import kept
from fastgen.ops.cpu_linear.kept import Kind
from fastgen.ops.cpu_linear.product import cpu_linear

# Products of more rows are bound by arithmetic: they are as those of so many.
MOST_ROWS = 256
# oneDNN has to be so much faster, or what is measured is chance.
GAIN = 1.1
ROUNDS = 3
SECONDS = 0.04  # after which no further round begins
OTHER_WEIGHTS = 12 << 20  # in float32; more than caches hold


_known: dict[Kind, bool] = {}


def is_faster(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `cpu_linear` is faster than BLAS for a product that `can_multiply` takes.

    What is not known yet is measured, for some 40 milliseconds. The answer stays the same from then on, in later
    processes too, so that they compute the same bits.
    """
    kind = _kind(rows, weight, bias)
    if not _known:
        _known.update(kept.load())
    if kind not in _known:
        faster = _measured(kind, weight, bias)
        if _known.setdefault(kind, faster) is faster:  # no other thread was first
            kept.add(kind, faster)
    return _known[kind]


def _kind(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Kind:
    out_features, in_features = weight.shape
    count = min(1 << (rows.numel() // in_features - 1).bit_length(), MOST_ROWS)
    return Kind(count, in_features, out_features, not weight.is_contiguous(), bias is not None, torch.get_num_threads())


def _measured(kind: Kind, weight: Tensor, bias: Tensor | None) -> bool:
    """Before each product other weights are read, as in a model: the weight comes from memory and not from a cache."""
    rows, others = weight.new_ones(kind.rows, kind.in_features), weight.new_ones(OTHER_WEIGHTS)
    seconds = dict.fromkeys((functional.linear, cpu_linear), float("inf"))
    end = time.perf_counter() + SECONDS
    for _ in range(ROUNDS):
        for product in seconds:
            others.sum()
            seconds[product] = min(seconds[product], _seconds(product, rows, weight, bias))
        if time.perf_counter() > end:
            break
    return seconds[functional.linear] > GAIN * seconds[cpu_linear]


def _seconds(product: Callable[..., Tensor], *tensors: Tensor | None) -> float:
    start = time.perf_counter()
    product(*tensors)
    return time.perf_counter() - start
