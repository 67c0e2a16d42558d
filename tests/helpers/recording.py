"""Recorded steps for models of any size and calls of a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fastgen.config import CONFIG
from fastgen.optimizer.decoding import recordable, static_cache
from fastgen.optimizer.report import Report

RECORDED = "decode step, recorded"


@contextmanager
def recording(cuda_graphs: str = "on", smallest_capacity: int = 8) -> Iterator[None]:
    """As under FASTGEN_CUDA_GRAPHS; buffers begin so small that calls outgrow them."""
    with (
        mock.patch.object(CONFIG, "cuda_graphs", cuda_graphs),
        mock.patch.object(recordable, "MIN_STEPS", 1),
        mock.patch.object(recordable, "STEPS_BEFORE", 1),
        mock.patch.object(static_cache, "SMALLEST_CAPACITY", smallest_capacity),
    ):
        yield


def replays(report: Report) -> int:
    return report.kernels[RECORDED]


def not_recorded_because(report: Report, reason: str) -> bool:
    because = f"decode steps are not recorded: {reason}"
    return not replays(report) and any(fallback.startswith(because) for fallback in report.fallbacks)
