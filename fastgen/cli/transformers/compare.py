"""--compare: the unchanged library and fastgen on the same batches, side by side in one run."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch

import fastgen
from fastgen.cli.transformers.stages.generation import Model
from fastgen.cli.transformers.stages.items import Batch, Generated

SAME_SOUND = 1e-4  # of samples between -1 and 1: rounding is that of other kernels


class SideBySide:
    """Generates every batch both ways from the same random state, and returns what fastgen generates.

    Which of the two goes first alternates from batch to batch, so that neither always finds warm caches. The first
    batch is generated once more beforehand, both ways and uncounted.
    """

    def __init__(self, stock: Model, with_fastgen: Model) -> None:
        self.stock = stock
        self.with_fastgen = with_fastgen
        self.device = stock.device
        self.batches = 0
        self.inputs = 0
        self.equal = 0

    def __call__(self, batch: Batch) -> Generated:
        """What fastgen generates for the batch."""
        if self.batches == 0:
            with self._same_random_state():
                self._generate_both(batch)
            self.stock.seconds = self.with_fastgen.seconds = 0.0
        stock, generated = self._generate_both(batch)
        self.batches += 1
        self.inputs += len(batch)
        self.equal += int(_equal_inputs(stock, generated, len(batch)).sum())
        return generated

    def _generate_both(self, batch: Batch) -> tuple[Generated, Generated]:
        if self.batches % 2:
            with self._same_random_state():
                generated = self.with_fastgen(batch)
            return self._generate_stock(batch), generated
        with self._same_random_state():
            stock = self._generate_stock(batch)
        return stock, self.with_fastgen(batch)

    def _generate_stock(self, batch: Batch) -> Generated:
        with fastgen.disabled():
            return self.stock(batch)

    def report(self) -> str:
        """Both speeds, their ratio and the number of inputs whose outputs are equal, as lines to print."""
        counts = f"{self.equal} of {self.inputs} outputs equal"
        if not self.inputs:
            return counts
        rows = [("stock", self.stock.seconds), ("fastgen", self.with_fastgen.seconds)]
        lines = [f"{name:<8}{self.inputs / s:10.2f} inputs/s {s:10.2f} s of generation" for name, s in rows]
        ratio = self.stock.seconds / self.with_fastgen.seconds
        return "\n".join([*lines, f"ratio   {ratio:10.2f}", counts])

    def _same_random_state(self) -> AbstractContextManager[None]:
        """What follows the block draws the same random numbers as the block did; sampling is not comparable without."""
        if self.device.type == "cpu":
            return torch.random.fork_rng(devices=[])
        return torch.random.fork_rng(devices=[self.device], device_type=self.device.type)


def _equal_inputs(stock: Generated, generated: Generated, inputs: int) -> np.ndarray:
    """For each input, whether all of its outputs [B * R, T] have the same tokens, or whether it is the same sound."""
    if stock.sounds is not None and generated.sounds is not None:
        return np.array([_same_sound(*sounds) for sounds in zip(stock.sounds, generated.sounds, strict=True)])
    if stock.sequences.shape != generated.sequences.shape:
        return np.zeros(inputs, bool)
    return (stock.sequences == generated.sequences).reshape(inputs, -1).all(axis=1)


def _same_sound(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.allclose(one, other, rtol=0, atol=SAME_SOUND)
