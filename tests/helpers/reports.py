"""Questions to fastgen's report of a call: what was shared, which steps were captured, and why others were not."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hooks import costs, limits

from fastgen.optimizer.decoding.cost_model import CPU, CPU_CAPTURES, GPU_CAPTURES
from fastgen.optimizer.decoding.graphs import CpuCapture
from fastgen.optimizer.decoding.report import MATERIALIZED, STEPS, Report
from fastgen.optimizer.decoding.segmented_kv import OPERATIONS
from fastgen.testing import configured

PREFILL = "prefill: one row per input"
PROMPT = "the prompt's keys and values: once per input"
CROSS = "cross-attention keys and values: once per input"
LEFT = "finished inputs: removed from the batch"
CAPTURED = CpuCapture.name

# Rates with which prefills and forwards cost nothing, so that each saved token is a gain.
FREE = replace(CPU, module=0.0, bytes=float("inf"), multiply_adds=float("inf"))


def is_shared(report: Report, *what: str) -> bool:
    """Returns whether the prefill ran once per input, and each of `what` (PROMPT, CROSS) is stored once as segments."""
    is_stored_once = all(any(item.startswith(wanted) for item in report.shared) for wanted in what)
    is_used = not report.kernels.keys().isdisjoint(OPERATIONS) and not is_materialized(report)
    return PREFILL in report.shared and is_stored_once and (not what or is_used)


def is_materialized(report: Report) -> bool:
    """Returns whether something needed shared keys in one piece."""
    return any(name.startswith(MATERIALIZED) for name in report.kernels)


def left_alone_because(report: Report, code: str, names: str = "") -> bool:
    """Returns whether nothing was shared, for a reason with this code and these names in its text."""
    return not report.shared and any(reason.code == code and names in reason.text for _, reason in report.not_done)


@contextmanager
def capturing(
    cuda_graphs: str = "on", smallest_capacity: int = 8, steps_before: int = 1, drafts: str = "off"
) -> Iterator[None]:
    """Captures the steps of models and calls of any size; buffers begin so small that calls outgrow them."""
    cpu, gpu = (each._replace(eager_forwards=steps_before, least=1) for each in (CPU_CAPTURES, GPU_CAPTURES))
    with (
        configured(cuda_graphs=cuda_graphs, drafts=drafts),
        costs(cpu_captures=cpu, gpu_captures=gpu, min_computed=0.0),
        limits(smallest_capacity=smallest_capacity),
    ):
        yield


def replays(report: Report) -> int:
    return report.kernels[CAPTURED]


def not_captured_because(report: Report, code: str, names: str = "") -> bool:
    """Returns whether no step was replayed, for a reason with this code and these names in its text."""
    reasons = [reason for part, reason in report.not_done if part == STEPS]
    return not replays(report) and any(reason.code == code and names in reason.text for reason in reasons)
