"""Settings of a process that fastgen starts: how long OpenMP's threads spin, how many there are, and freed memory.

libgomp, the OpenMP in torch's wheels, lets a waiting thread spin 300,000 times before it sleeps. If other programs use
the same cores, this takes time from the thread that it waits for. glibc returns freed blocks of 32 MB and more to the
system at once, so each large tensor costs a fault of each of its pages: docs/commands.md has figures for both. What the
user has set is not changed.

Tests: tests/batch/test_threads.py
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

SPIN_COUNT = 5000
# Parameters of glibc's mallopt: larger blocks go back to the system when they are freed, and so does free memory at the
# end of the heap if there is more than this.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
LARGEST_KEPT, MOST_KEPT = 1 << 28, 1 << 30


def set_openmp_variables() -> None:
    """Sets GOMP_SPINCOUNT and, under a CPU quota, OMP_NUM_THREADS in this process's environment, for libgomp to read.

    libgomp reads them when torch loads it, so nothing is set if torch is imported already.
    """
    if "torch" not in sys.modules:
        set_variables(os.environ, process_cpus(), cpu_quota())


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for later blocks; only in processes whose memory nobody measures or shares."""
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(AttributeError):  # the C library is not glibc
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT):  # older versions accept at most 32 MB, and keep their setting
            mallopt(M_TRIM_THRESHOLD, MOST_KEPT)


def set_variables(environ: MutableMapping[str, str], cpus: int, quota: float | None) -> None:
    """Sets the variables; cpus: the number that the process may run on; quota: the CPUs' time it may use, or None."""
    if not environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    if quota is not None and quota < cpus:
        environ.setdefault("OMP_NUM_THREADS", str(max(1, int(quota))))


def usable_cpus() -> int:
    """Returns how many workers can have a CPU each: limited by the process's CPUs and its quota; at least 1."""
    quota = cpu_quota()
    return process_cpus() if quota is None else max(1, min(process_cpus(), int(quota)))


def process_cpus() -> int:
    """Returns how many CPUs the process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_worker(count: int) -> int:
    """Returns each worker's share of the usable CPUs, at least 1, or OMP_NUM_THREADS if that is less."""
    part = max(1, usable_cpus() // count)
    return min(part, int(os.environ.get("OMP_NUM_THREADS", part)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns how many CPUs' time the process's control groups allow, for example 1.5; None if there is no quota.

    It is the smallest quota of the process's group and its ancestors, in version 1 and 2. For a path that is not
    mounted, as in containers, the mounted part is used.
    """
    quotas: list[float] = []
    for line in _words(root / "proc/self/cgroup", separator="\n"):
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        if not controllers or "cpu" in controllers.split(","):
            group = mount / path.lstrip("/")
            folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(mount)]
            for folder in folders:  # "150000 100000" or "max 100000" in version 2, two files in 1
                words = _words(folder / "cpu.max")
                words = words or [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
                with suppress(ValueError):  # "max", or anything unexpected
                    microseconds, period = map(int, words)
                    if microseconds > 0 and period > 0:
                        quotas.append(microseconds / period)
    return min(quotas, default=None)


def _words(file: Path, separator: str | None = None) -> list[str]:
    try:
        return file.read_text().strip().split(separator)
    except OSError:
        return []
