"""Persistent autotuning results, in a file of the user's cache folder: a line of JSON for each measurement.

Lines are only added, each in one write: of processes that measure the same at the same time, the first one's counts.
Whatever the file and its folder are, `generate` goes on. What cannot be read or written is measured by each process.

Tests: tests/ops/test_cpu_linear.py
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from fastgen.config import CONFIG

# Of /proc/cpuinfo: what tells one CPU from another where virtual machines call all of them the same.
CPU_FIELDS = ("model name", "cpu family", "model", "stepping")

MAX_BYTES = 1 << 22  # of the file, some 20,000 measurements
# A pipe must not block, and a link leads to a file that is not ours. Windows has neither flag.
OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


class GemmShape(NamedTuple):
    """Products that take as long. rows: rounded up to a power of two. transposed: how the weight lies in memory."""

    rows: int
    in_features: int
    out_features: int
    transposed: bool
    bias: bool
    dtype: str
    threads: int


class AutotuneCache:
    """The fastest of these backends for each GEMM shape, as measured by this process and earlier ones."""

    def __init__(self, backends: tuple[str, ...]) -> None:
        self.backends, self.field = backends, f"fastest of {', '.join(backends)}"
        self.fastest: dict[GemmShape, str] = {}
        self.is_loaded = False

    def __contains__(self, shape: GemmShape) -> bool:
        if not self.is_loaded:
            self.fastest.update(self.load())
            self.is_loaded = True
        return shape in self.fastest

    def load(self) -> dict[GemmShape, str]:
        """The measurements in the file, without those that cannot be read."""
        found: dict[GemmShape, str] = {}
        with suppress(OSError), _opened(os.O_RDONLY) as file:
            for line in os.read(file, MAX_BYTES).splitlines():
                with suppress(ValueError, TypeError, KeyError, RecursionError):  # the last: many brackets
                    values = json.loads(line)
                    if values[self.field] in self.backends:
                        found.setdefault(GemmShape(**values["product"]), values[self.field])
        return found

    def add(self, shape: GemmShape, backend: str) -> None:
        """Stores a measurement, here and for later processes, unless another thread was first."""
        if self.fastest.setdefault(shape, backend) is not backend:
            return
        line = json.dumps({"product": shape._asdict(), self.field: backend}) + "\n"
        with suppress(OSError):
            path().parent.mkdir(parents=True, exist_ok=True)
            with _opened(os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
                os.write(file, line.encode())


@contextmanager
def _opened(flags: int) -> Iterator[int]:
    """The descriptor of the file; OSError where it is no regular file, or has grown beyond `MAX_BYTES`."""
    file = os.open(path(), flags | OPEN_FLAGS, 0o666)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise OSError(f"{path()} is no regular file of at most {MAX_BYTES} bytes")
        yield file
    finally:
        os.close(file)


def path() -> Path:
    """The file; another CPU or another version of torch has another one. OSError where the user has no home folder."""
    folder = CONFIG.cache or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fastgen")
    try:
        return Path(folder).expanduser() / f"products-torch-{torch.__version__}-{_cpu()}.jsonl"
    except RuntimeError as error:
        raise FileNotFoundError(f"{folder}: {error}") from error


@functools.cache
def _cpu() -> str:
    name = platform.processor() or platform.machine()
    with suppress(OSError):  # only Linux has it
        pairs = [line.partition(":") for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines()]
        values = {key.strip(): value.strip() for key, _, value in pairs}
        name = " ".join(values[field] for field in CPU_FIELDS if field in values) or name
    return re.sub(r"[^A-Za-z0-9]+", "-", name)
