"""Packed copies of a model's weights, for the calls of `generate` of this process.

A weight is packed after as many products with it, over all calls, as packing costs. A copy stays with the model; all
copies take at most half of the bytes of its weights. torch does not tell of every change of a weight, so each call
looks at all of a weight before it uses a copy of it, which takes as long as a product with one row.
"""

from __future__ import annotations

import threading
from collections import Counter
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from fastgen.config import CONFIG
from fastgen.ops import cpu_linear
from fastgen.ops.cpu_linear import Kind, PackedWeight, Trial
from fastgen.optimizer.decoding.model_facts import size_of

OTHERS = 12 << 20  # elements; more than caches hold

# From so many products to come it pays to look whether a copy is still that of the weight.
MIN_PRODUCTS_TO_LOOK = 8


class WeightsOfModel:
    """What the copies of one model share: room for half of its weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self.size = size_of(model)
        self.lock = threading.Lock()
        self.room = self.size.bytes // 2 if CONFIG.pack else 0  # bytes
        self.copies: WeakKeyDictionary[nn.Module, WeightCopy] = WeakKeyDictionary()

    def copy_of(self, module: nn.Module) -> WeightCopy:
        return self.copies.get(module) or self.copies.setdefault(module, WeightCopy(self))

    def others(self, weight: Tensor) -> list[Tensor]:
        """What is read between two products with this weight: other weights, as many as caches hold, or all."""
        found, elements = [], 0
        for other in self._model().parameters():
            if elements < OTHERS and other.is_cpu and other.is_contiguous() and other.data_ptr() != weight.data_ptr():
                found.append(other.detach().view(-1)[: OTHERS - elements])
                elements += found[-1].numel()
        return found


_known: WeakKeyDictionary[nn.Module, WeightsOfModel] = WeakKeyDictionary()


def weights_of(model: nn.Module) -> WeightsOfModel:
    """Those of earlier calls, unless the model has changed its type, device or size since."""
    known = _known.get(model)
    if known is None or known.size != size_of(model):
        forget_copies(model)
        known = _known[model] = WeightsOfModel(model)
    return known


def forget_copies(model: nn.Module) -> None:
    """Gives back the memory of a model that has left the CPU, say."""
    if (known := _known.pop(model, None)) is not None:
        known.copies.clear()


class WeightCopy:
    """The packed copy of one module's weight, or the place for it; products: of all calls, by kind."""

    def __init__(self, weights: WeightsOfModel) -> None:
        self.weights = weights
        self.packed: PackedWeight | None = None
        self.products: Counter[Kind] = Counter()

    def has_room(self, weight: Tensor) -> bool:
        return self.packed is not None or weight.nbytes <= self.weights.room

    def of(self, weight: Tensor, look: bool) -> Tensor | None:
        """The copy of this weight, made if there is none and room for one; None also if the weight has changed.

        look: at the whole weight, as the first product of a call has to.
        """
        with self.weights.lock:
            if self.packed is None and self.has_room(weight):
                self.packed = PackedWeight(weight)
                self.weights.room -= self.packed.nbytes
            elif self.packed is not None and look:
                self.packed.look_at(weight)
            if self.packed is None or self.packed.is_of(weight):
                return None if self.packed is None else self.packed.tensor
        self.drop()
        return None

    def end_of_calls(self) -> None:
        """No call uses the copy any more."""
        if self.packed is not None and not self.packed.let_go():
            self.drop()

    def drop(self) -> None:
        with self.weights.lock:
            self.products.clear()
            if self.packed is not None:
                self.weights.room += self.packed.nbytes
                self.packed = None


class CopiesOfCall:
    """Which copies one call uses. steps: how many forwards it makes at most; 0 as long as that is not known."""

    def __init__(self) -> None:
        self.steps = 0
        self.products: Counter[WeightCopy | tuple[WeightCopy, Kind]] = Counter()
        self.used: set[WeightCopy] = set()
        self.trials: dict[Kind, tuple[WeightCopy, Trial]] = {}

    def packed(
        self, copy: WeightCopy, kind: Kind, rows: Tensor, weight: Tensor, bias: Tensor | None, fastest: str
    ) -> Tensor | None:
        """The packed weight for this product, or None; fastest: the way without it."""
        if self.steps < 2 * cpu_linear.MIN_PRODUCTS or weight.is_inference() or not copy.has_room(weight):
            return None
        self.products[copy] += 1
        self.products[copy, kind] += 1
        copy.products[kind] += 1
        if not cpu_linear.is_known(kind):
            self._try(self.products[copy, kind], copy, kind, rows, weight, bias, fastest)
            return None
        pays_after = cpu_linear.pays_after(kind)
        if pays_after is None or not self._pays(copy, copy.products[kind], pays_after):
            return None
        packed = copy.of(weight, look=copy not in self.used)
        if packed is not None:
            self.used.add(copy)
        return packed

    def _pays(self, copy: WeightCopy, done: int, pays_after: int) -> bool:
        """Whether a copy is worth to be looked at in this call, or to be made."""
        left = self.steps - self.products[copy]
        if copy.packed is None:
            return done > pays_after and 2 * left >= pays_after
        return copy in self.used or left >= MIN_PRODUCTS_TO_LOOK

    def _try(
        self, done: int, copy: WeightCopy, kind: Kind, rows: Tensor, weight: Tensor, bias: Tensor | None, fastest: str
    ) -> None:
        """With the first weight of its kind, so late that calls of a few tokens pay nothing."""
        if kind not in self.trials and done == cpu_linear.TRIAL_AFTER:
            self.trials[kind] = copy, Trial(kind, weight)
        elif kind in self.trials and self.trials[kind][0] is copy:
            self.trials[kind][1].time(rows, weight, bias, fastest)
            if cpu_linear.is_known(kind):
                del self.trials[kind]
