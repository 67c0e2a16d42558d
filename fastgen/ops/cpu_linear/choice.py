"""Which of BLAS and oneDNN is faster, measured once for each kind of product and kept.

No rule tells it. AMD EPYC (family 25), one thread, ms, BLAS and oneDNN: 64 × [768 → 3072] as GPT-2 keeps its weights,
8.3 and 10.2; 2 × [768 → 50257] 28 and 24; with two threads 4.8 and 5.2; 30 and 14.
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
SECONDS = 0.005  # after which no further round begins


_known: dict[Kind, bool] = {}


def is_faster(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `cpu_linear` is faster than BLAS for a product that `can_multiply` takes.

    What is not known yet is measured: the first product of a kind takes some milliseconds longer. The answer stays the
    same from then on, in later processes too, so that they compute the same bits.
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
    rows = weight.new_ones(kind.rows, kind.in_features)
    with_blas = with_onednn = float("inf")
    end = time.perf_counter() + SECONDS
    for _ in range(ROUNDS):
        with_blas = min(with_blas, _seconds(functional.linear, rows, weight, bias))
        with_onednn = min(with_onednn, _seconds(cpu_linear, rows, weight, bias))
        if time.perf_counter() > end:
            break
    return with_blas > GAIN * with_onednn


def _seconds(product: Callable[..., Tensor], *tensors: Tensor | None) -> float:
    start = time.perf_counter()
    product(*tensors)
    return time.perf_counter() - start
