"""OpenMP settings of the commands: how long a thread spins while it waits, and how many threads there are.

libgomp, the OpenMP in torch's wheels, lets a waiting thread spin 300,000 times before it sleeps. Where other programs
want the same cores, that takes the time of the thread that is waited for: docs/commands.md has figures. Variables that
the user has set stay as they are.

Tests: tests/cli/test_threads.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

SPIN_COUNT = 5000


def set_openmp_variables() -> None:
    """Sets GOMP_SPINCOUNT and, under a CPU quota, OMP_NUM_THREADS in this process's environment, for libgomp to read.

    libgomp reads them when torch loads it, so that nothing is set where torch is imported already.
    """
    if "torch" not in sys.modules:
        set_variables(os.environ, process_cpus(), cpu_quota())


def set_variables(environ: MutableMapping[str, str], cpus: int, quota: float | None) -> None:
    """cpus: how many the process may run on. quota: how many CPUs' time it may use, None for all."""
    if not environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if quota is not None and quota < cpus:
        environ.setdefault("OMP_NUM_THREADS", str(max(1, int(quota))))


def usable_cpus() -> int:
    """How many workers have a CPU each: no more than the process may run on, and than its quota allows; at least 1."""
    quota = cpu_quota()
    return process_cpus() if quota is None else max(1, min(process_cpus(), int(quota)))


def process_cpus() -> int:
    """How many CPUs the process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpus_of_workers(count: int) -> list[list[int]]:
    """The CPUs of each of so many workers, by NUMA nodes and cores; empty where there are fewer CPUs than workers."""
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * count
    cpus = sorted(os.sched_getaffinity(0), key=_node_and_core)
    each = len(cpus) // count
    return [cpus[place * each : (place + 1) * each] for place in range(count)]


def _node_and_core(cpu: int, root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, int, int]:
    folder = root / f"cpu{cpu}"
    nodes = [int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*")]
    return (min(nodes, default=0), int((_words(folder / "topology/core_id") or ["0"])[0]), cpu)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many CPUs' time the container's control group allows, 1.5 for example; None where there is no quota.

    "150000 100000" or "max 100000" in version 2, two files in version 1. A container sees its group as the root.
    """
    group = root / "sys/fs/cgroup"
    words = _words(group / "cpu.max")
    words = words or [*_words(group / "cpu/cpu.cfs_quota_us"), *_words(group / "cpu/cpu.cfs_period_us")]
    with suppress(ValueError):  # "max", and what no kernel writes
        microseconds, period = map(int, words)
        if microseconds > 0 and period > 0:
            return microseconds / period
    return None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
