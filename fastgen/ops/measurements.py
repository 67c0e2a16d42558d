"""Files of measurements on this machine, in the user's cache folder (FASTGEN_CACHE), for later processes.

A file has a line of JSON for each measurement. Lines are only appended, each in one write: if several processes measure
the same at the same time, the first line counts. If a file cannot be read or written, each process measures for itself;
`generate` never fails because of it.

Tests: tests/ops/test_cpu_linear.py, tests/optimizer/test_trust.py
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fastgen.config import CONFIG

MAX_BYTES = 1 << 22  # size limit of a file: some 20,000 measurements


def path(kind: str, device: str) -> Path:
    """Returns the path of the file for one kind of measurement, a device and this version of torch.

    Raises OSError if the user has no home folder.
    """
    folder = CONFIG.cache or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fastgen")
    name = re.sub(r"[^A-Za-z0-9]+", "-", device)
    try:
        return Path(folder).expanduser() / f"{kind}-torch-{torch.__version__}-{name}.jsonl"
    except RuntimeError as error:
        raise FileNotFoundError(f"{folder}: {error}") from error


def stored(kind: str, device: str) -> Iterator[Any]:
    """Yields the file's measurements; skips lines that are not JSON."""
    with suppress(OSError):
        for line in _file(kind, device).read_bytes().splitlines():
            with suppress(ValueError, RecursionError):  # the last: deep nesting
                yield json.loads(line)


def store(kind: str, device: str, measurement: dict[str, Any]) -> None:
    """Appends a measurement to the file."""
    with suppress(OSError):
        path(kind, device).parent.mkdir(parents=True, exist_ok=True)
        with _file(kind, device).open("ab", buffering=0) as file:
            file.write(json.dumps(measurement).encode() + b"\n")


def _file(kind: str, device: str) -> Path:
    """Returns the path of the file. Raises OSError if it is not a regular file, or larger than `MAX_BYTES`."""
    file = path(kind, device)
    if os.path.lexists(file) and (not stat.S_ISREG(file.lstat().st_mode) or file.stat().st_size > MAX_BYTES):
        raise OSError(f"{file} is not a regular file of at most {MAX_BYTES} bytes")
    return file
