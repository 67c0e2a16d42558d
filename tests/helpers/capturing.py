"""Captured steps for models of any size and calls of a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastgen.optimizer.decoding.graphs import CpuCapture
from fastgen.optimizer.decoding.report import STEPS, Report
from fastgen.testing import configured, costs, limits

CAPTURED = CpuCapture.name


@contextmanager
def capturing(cuda_graphs: str = "on", smallest_capacity: int = 8, steps_before: int = 1) -> Iterator[None]:
    """As under FASTGEN_CUDA_GRAPHS; buffers begin so small that calls outgrow them."""
    thresholds = {
        "min_capture_steps": 1,
        "min_replays_on_gpu": 1,
        "steps_before_capture": steps_before,
        "steps_before_capture_on_gpu": steps_before,
    }
    with configured(cuda_graphs=cuda_graphs), costs(**thresholds), limits(smallest_capacity=smallest_capacity):
        yield


def replays(report: Report) -> int:
    return report.kernels[CAPTURED]


def not_captured_because(report: Report, code: str, names: str = "") -> bool:
    """Whether no step was replayed, for a reason with this code whose text names what is in the way."""
    reasons = [one for part, one in report.not_done if part == STEPS]
    return not replays(report) and any(one.code == code and names in one.text for one in reasons)
