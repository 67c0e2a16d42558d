"""--compare: the unchanged library and fastgen on the same batches, side by side in one run."""

from contextlib import AbstractContextManager

import torch

import fastgen
from fastgen.cli.generation import Output, TextGenerator
from fastgen.cli.inputs import Batch


class SideBySide:
    """Generates every batch both ways from the same random state, and returns fastgen's outputs.

    Which of the two goes first alternates from batch to batch, so that neither always finds warm caches. The first
    batch is generated once more beforehand, both ways and uncounted.
    """

    def __init__(self, stock: TextGenerator, with_fastgen: TextGenerator) -> None:
        self.stock = stock
        self.with_fastgen = with_fastgen
        self.batches = 0
        self.inputs = 0
        self.equal = 0

    def __call__(self, batch: Batch) -> list[Output]:
        """fastgen's outputs of the batch's lines, in their order."""
        if self.batches == 0:
            with _same_random_state(batch):
                self._generate_both(batch)
            self.stock.seconds = self.with_fastgen.seconds = 0.0
        stock_outputs, outputs = self._generate_both(batch)
        self.batches += 1
        self.inputs += len(batch)
        self.equal += sum(a.texts == b.texts for a, b in zip(stock_outputs, outputs, strict=True))
        return outputs

    def _generate_both(self, batch: Batch) -> tuple[list[Output], list[Output]]:
        if self.batches % 2:
            with _same_random_state(batch):
                outputs = self.with_fastgen(batch)
            return self._generate_stock(batch), outputs
        with _same_random_state(batch):
            stock_outputs = self._generate_stock(batch)
        return stock_outputs, self.with_fastgen(batch)

    def _generate_stock(self, batch: Batch) -> list[Output]:
        with fastgen.disabled():
            return self.stock(batch)

    def report(self) -> str:
        """Both speeds, their ratio and the number of equal outputs, as lines to print."""
        counts = f"{self.equal} of {self.inputs} outputs equal"
        if not self.inputs:
            return counts
        rows = [("stock", self.stock.seconds), ("fastgen", self.with_fastgen.seconds)]
        lines = [f"{name:<8}{self.inputs / s:10.2f} inputs/s {s:10.2f} s of generation" for name, s in rows]
        ratio = self.stock.seconds / self.with_fastgen.seconds
        return "\n".join([*lines, f"ratio   {ratio:10.2f}", counts])


def _same_random_state(batch: Batch) -> AbstractContextManager[None]:
    """What follows the block draws the same random numbers as the block did; sampling needs that to be comparable."""
    device = batch.input_ids.device
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
