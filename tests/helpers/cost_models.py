"""Other thresholds for the calls of a test: its models are too small, and its calls too short, to gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from fastgen.optimizer.decoding import cost_model
from fastgen.optimizer.decoding.cost_model import CostModel


@contextmanager
def costs(kind: type[CostModel] = CostModel, **thresholds: float) -> Iterator[None]:
    """Calls that begin inside, in any thread, have a cost model of this class with these thresholds, else as before."""
    before = cost_model.DEFAULT
    cost_model.DEFAULT = kind(**dataclasses.asdict(before) | thresholds)
    try:
        yield
    finally:
        cost_model.DEFAULT = before


# Every model is so large that its products are looked at.
ANY_SIZE = {"min_large_per_module": 0, "min_large": 0}
