"""Packed copies of a model's weights while calls of `generate` run.

A call packs a weight after as many products with it as packing costs, if twice as many can still follow: then it gains
if it makes all its steps, and otherwise loses little. No copy outlives the calls, because between them a weight may
change and say nothing.

AMD EPYC (family 25), two threads, seconds without and with: GPT-2 small, 4 × 32, 4 beams, 96 new tokens 13.3 and 12.6;
a Llama of 8 layers of 768, 4 × 512, 4 beams, 128 new tokens 13.9 and 13.1.
"""

from __future__ import annotations

import threading
from collections import Counter

from torch import Tensor, nn

from fastgen.config import CONFIG
from fastgen.ops import cpu_linear
from fastgen.ops.cpu_linear import Kind, PackedWeight, Trial
from fastgen.optimizer.decoding.gain import size_of

OTHERS = 12 << 20  # elements; more than caches hold


class WeightsOfModel:
    """What the copies of one model share: room for half of its weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lock = threading.Lock()
        self.room = size_of(model).bytes // 2 if CONFIG.pack else 0  # bytes

    def others(self, weight: Tensor) -> list[Tensor]:
        """What is read between two products with this weight: other weights, as many as caches hold, or all."""
        found, elements = [], 0
        for other in self.model.parameters():
            if elements < OTHERS and other.is_cpu and other.is_contiguous() and other.data_ptr() != weight.data_ptr():
                found.append(other.detach().view(-1)[: OTHERS - elements])
                elements += found[-1].numel()
        return found


class WeightCopy:
    """The packed copy of one module's weight, or the place for it."""

    def __init__(self, weights: WeightsOfModel) -> None:
        self.weights = weights
        self.packed: PackedWeight | None = None

    def has_room(self, weight: Tensor) -> bool:
        return self.packed is not None or weight.nbytes <= self.weights.room

    def of(self, weight: Tensor, make: bool) -> Tensor | None:
        """The copy of this weight, made if there is none and room for one; None also if the weight has changed."""
        with self.weights.lock:
            if self.packed is None and make and self.has_room(weight):
                self.packed = PackedWeight(weight)
                self.weights.room -= weight.nbytes
            if self.packed is None or self.packed.is_of(weight):
                return None if self.packed is None else self.packed.tensor
        self.drop()
        return None

    def drop(self) -> None:
        with self.weights.lock:
            if self.packed is not None:
                self.weights.room += self.packed.source.nbytes
                self.packed = None


class CopiesOfCall:
    """Which copies one call uses. steps: how many forwards it makes at most; 0 as long as that is not known."""

    def __init__(self) -> None:
        self.steps = 0
        self.products: Counter[WeightCopy | tuple[WeightCopy, Kind]] = Counter()
        self.trials: dict[Kind, tuple[WeightCopy, Trial]] = {}

    def packed(
        self, copy: WeightCopy, kind: Kind, rows: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool
    ) -> Tensor | None:
        """The packed weight for this product, or None; onednn: which product is faster without it."""
        # So many products at least come before a copy, and twice as many after it.
        if self.steps < 3 * cpu_linear.MIN_PRODUCTS or weight.is_inference() or not copy.has_room(weight):
            return None
        self.products[copy] += 1
        self.products[copy, kind] += 1
        done = self.products[copy, kind]
        if not cpu_linear.is_known(kind):
            self._try(done, copy, kind, rows, weight, bias, onednn)
            return None
        pays_after = cpu_linear.pays_after(kind)
        if pays_after is None or done <= pays_after:
            return None
        packed = copy.of(weight, make=self.steps - self.products[copy] >= 2 * pays_after)
        if packed is None:
            self.products[copy, kind] = 0  # the weight has changed, or too few products follow
        return packed

    def _try(
        self, done: int, copy: WeightCopy, kind: Kind, rows: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool
    ) -> None:
        """With the first weight of its kind, so late that calls of a few tokens pay nothing."""
        if kind not in self.trials and done == cpu_linear.TRIAL_AFTER:
            self.trials[kind] = copy, Trial(kind, weight)
        elif kind in self.trials and self.trials[kind][0] is copy:
            self.trials[kind][1].time(rows, weight, bias, onednn)
            if cpu_linear.is_known(kind):
                del self.trials[kind]
