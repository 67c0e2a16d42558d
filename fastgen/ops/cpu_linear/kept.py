"""What was measured on this machine, in a file of the user's cache folder: a line of JSON for each answer.

Lines are only added, each in one write: of processes that measure the same at the same time, the first one's counts.
A folder that cannot be written, or a damaged line, only means that a process measures again.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastgen.config import CONFIG

# Of /proc/cpuinfo: what tells one CPU from another where virtual machines call all of them the same.
CPU_FIELDS = ("model name", "cpu family", "model", "stepping")


class Kind(NamedTuple):
    """Products that take as long. rows: rounded up to a power of two. transposed: how the weight lies in memory."""

    rows: int
    in_features: int
    out_features: int
    transposed: bool
    bias: bool
    dtype: str
    threads: int


class Answers:
    """The answers to one question about kinds of products, of this process and of earlier ones."""

    def __init__(self, question: str, is_answer: Callable[[Any], bool]) -> None:
        self.question, self.is_answer = question, is_answer
        self.known: dict[Kind, Any] = {}
        self.is_loaded = False

    def knows(self, kind: Kind) -> bool:
        """Whether `known` has it; the first time, that is filled from the file."""
        if not self.is_loaded:
            self.known.update(self.load())
            self.is_loaded = True
        return kind in self.known

    def load(self) -> dict[Kind, Any]:
        """What the file says."""
        found: dict[Kind, Any] = {}
        with suppress(OSError):
            for line in path().read_bytes().splitlines():
                with suppress(ValueError, TypeError, KeyError):
                    values = json.loads(line)
                    if self.is_answer(values[self.question]):
                        found.setdefault(Kind(**values["product"]), values[self.question])
        return found

    def add(self, kind: Kind, answer: Any) -> None:
        """Keeps an answer, here and for later processes, unless another thread was first."""
        if self.known.setdefault(kind, answer) is not answer:
            return
        line = json.dumps({"product": kind._asdict(), self.question: answer}) + "\n"
        with suppress(OSError):
            path().parent.mkdir(parents=True, exist_ok=True)
            with path().open("ab", buffering=0) as file:
                file.write(line.encode())


def path() -> Path:
    """The file; another CPU or another version of torch has another one."""
    folder = CONFIG.cache or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fastgen")
    return Path(folder).expanduser() / f"products-torch-{torch.__version__}-{_cpu()}.jsonl"


@functools.cache
def _cpu() -> str:
    name = platform.processor() or platform.machine()
    with suppress(OSError):  # only Linux has it
        pairs = [line.partition(":") for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines()]
        values = {key.strip(): value.strip() for key, _, value in pairs}
        name = " ".join(values[field] for field in CPU_FIELDS if field in values) or name
    return re.sub(r"[^A-Za-z0-9]+", "-", name)
