"""Which of BLAS and oneDNN is faster, measured once for each kind of product and kept.

No rule tells it. AMD EPYC (family 25, 32 MB of L3 cache), two threads, weights as GPT-2 keeps them and not in a cache,
ms, BLAS and oneDNN: 4 × [768 → 3072] 1.8 and 1.0, 8 × [3072 → 768] 1.5 and 2.3 (in the cache 1.4 and 1.2), 64 ×
[768 → 3072] 3.7 and 4.9; with one thread 1.9 and 1.4, 1.5 and 1.3, 4.7 and 7.3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops.cpu_linear.kept import Answers, Kind
from fastgen.ops.cpu_linear.product import cpu_linear

# Products of more rows are bound by arithmetic: they are as those of so many.
MOST_ROWS = 256
# oneDNN has to be so much faster, or what is measured is chance.
GAIN = 1.1
ROUNDS = 3
SECONDS = 0.04  # after which no further round begins

ANSWERS = Answers("oneDNN is faster", (bool,))


def kind_of(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Kind:
    """The kind of a product that `can_multiply` takes."""
    out_features, in_features = weight.shape
    count = min(1 << (rows.numel() // in_features - 1).bit_length(), MOST_ROWS)
    transposed, dtype, threads = not weight.is_contiguous(), str(weight.dtype), torch.get_num_threads()
    return Kind(count, in_features, out_features, transposed, bias is not None, dtype, threads)


def is_faster(kind: Kind, weight: Tensor, bias: Tensor | None, others: Callable[[], Sequence[Tensor]]) -> bool:
    """Whether `cpu_linear` is faster than BLAS for products of this kind.

    What is not known yet is measured, for some 30 milliseconds. The answer stays the same from then on, in later
    processes too, so that they compute the same bits. others: what a model reads between two products with this weight.
    """
    if not ANSWERS.knows(kind):
        ANSWERS.add(kind, _measured(kind, weight, bias, others()))
    return ANSWERS.known[kind]


def _measured(kind: Kind, weight: Tensor, bias: Tensor | None, others: Sequence[Tensor]) -> bool:
    """Before each product the others are read, as in a model: the weight comes from where it comes from there."""
    rows = weight.new_ones(kind.rows, kind.in_features)
    seconds = dict.fromkeys((functional.linear, cpu_linear), float("inf"))
    end = time.perf_counter() + SECONDS
    for _ in range(ROUNDS):
        for product in seconds:
            for other in others:
                other.sum()
            seconds[product] = min(seconds[product], seconds_of(product, rows, weight, bias))
        if time.perf_counter() > end:
            break
    return seconds[functional.linear] > GAIN * seconds[cpu_linear]


def seconds_of(product: Callable[..., Tensor], *tensors: Tensor | None) -> float:
    """What one product takes."""
    start = time.perf_counter()
    product(*tensors)
    return time.perf_counter() - start
