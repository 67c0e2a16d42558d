"""Packed copies of weights, in the order in which oneDNN reads them, and after how many products one pays.

AMD EPYC (family 25), two threads, weights not in a cache, ms, oneDNN without and with a packed weight: 4 × [768 → 3072]
0.9 and 0.7, 16 × 1.3 and 1.1, 256 × 9.3 and 9.0; as GPT-2 keeps it 0.8 and 0.6, 1.7 and 1.2, 16 and 8.6; packing takes
6 and 10. 4 × [768 → 50257] 11 and 7.5, 16 × 16 and 13.5; packing takes 90. The bits were the same from two rows on.

Tests: tests/optimizer/decoding/test_packed_weights.py
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from fastgen.ops.cpu_linear.autotune import seconds_of
from fastgen.ops.cpu_linear.autotune_cache import AutotuneCache, Kind
from fastgen.ops.cpu_linear.product import onednn_linear, ways

# Of one kind, with one weight, in one call. Known from earlier or not: no copy is used before so many, so that the call
# that finds out computes the same bits as those after it.
MIN_PRODUCTS = 12
ROUNDS = 3
TRIAL_AFTER = MIN_PRODUCTS - ROUNDS - 1  # products; so calls of a few tokens pay nothing for it
MAX_TRIAL_ELEMENTS = 1 << 22
# A copy has to be so much faster, for it takes memory, and competes with the weights for the caches, which a trial does
# not see: with products faster by 1.1 to 1.5, calls of GPT-2 and T5 on AMD EPYC took as long as without, or 8 % longer.
GAIN = 1.5

ANSWERS = AutotuneCache("products after which packing pays", lambda answer: type(answer) in (int, type(None)))


class PackedWeight:
    """A packed copy of a weight.

    Within a call it is taken for good as long as the weight is the same as far as torch tells, which is of every change
    but those through `.data`. Between calls only the numbers tell. A tensor that was made in inference mode tells
    nothing and must not come here.
    """

    def __init__(self, weight: Tensor) -> None:
        self.nbytes = weight.nbytes
        # From a transposed weight oneDNN packs slowly.
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._take(weight, _fingerprint(weight))

    def _take(self, weight: Tensor, fingerprint: Tensor | None) -> None:
        self.state, self.fingerprint = _state(weight), fingerprint
        self.held: Tensor | None = weight.detach()  # so that nothing else can have its address

    def is_of(self, weight: Tensor) -> bool:
        """Whether this is still the weight that was packed, unchanged since it was looked at."""
        return self.held is not None and self.state == _state(weight)

    def look_at(self, weight: Tensor) -> None:
        """Reads all of the weight; from now on this is a copy of it if its numbers are those that were packed."""
        fingerprint = _fingerprint(weight)
        if self.fingerprint is not None and torch.equal(fingerprint, self.fingerprint):
            self._take(weight, fingerprint)
        else:
            self.held = None

    def let_go(self) -> bool:
        """Holds the weight's memory no longer; False if numbers cannot tell later whether it has changed."""
        self.held = None
        return self.fingerprint is not None


def _fingerprint(weight: Tensor) -> Tensor | None:
    """The bits of the weight's product with random numbers: other numbers, or in another order, give others.

    A change too small to show in it is too small to show in other products. None where sums would be rounded to half
    precision.
    """
    if weight.dtype != torch.float32:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.mv(weight.detach(), torch.rand(weight.shape[1], generator=generator)).view(torch.int32)


def _state(weight: Tensor) -> tuple:
    return weight.data_ptr(), weight._version, weight.shape, weight.stride()


def is_known(kind: Kind) -> bool:
    """Whether `pays_after` has an answer."""
    return ANSWERS.knows(kind)


def pays_after(kind: Kind) -> int | None:
    """How many products gain as much as packing costs; at least `MIN_PRODUCTS`, None if they gain nothing."""
    return ANSWERS.known[kind]


class Trial:
    """Finds the answer for one kind, within a call.

    A part of one weight is packed; then `ROUNDS` products of the call are done twice more, to be timed. Between them
    the call reads its other weights, so this one comes from where it usually comes from.
    """

    def __init__(self, kind: Kind, weight: Tensor) -> None:
        self.kind = kind
        # A part of a transposed weight would be strided; those are rarely larger.
        self.rows = weight.shape[0] if kind.transposed else MAX_TRIAL_ELEMENTS // weight.shape[1] + 1
        start = time.perf_counter()
        self.packed = PackedWeight(weight[: self.rows])
        self.packing = time.perf_counter() - start
        self.seconds: list[tuple[float, float]] = []  # without and with the copy

    def time(self, rows: Tensor, weight: Tensor, bias: Tensor | None, fastest: str) -> None:
        """Times a product, which would go the `fastest` of `ways`; keeps the answer after the last one."""
        part, bias = weight[: self.rows], None if bias is None else bias[: self.rows]
        plain = seconds_of(ways(weight.dtype)[fastest], rows, part, bias)
        self.seconds.append((plain, seconds_of(onednn_linear, rows, self.packed.tensor, bias)))
        if len(self.seconds) == ROUNDS:
            plain, packed = map(min, zip(*self.seconds))
            pays = plain > GAIN * packed
            answer = max(math.ceil(self.packing / (plain - packed)), MIN_PRODUCTS) if pays else None
            ANSWERS.add(self.kind, answer)
