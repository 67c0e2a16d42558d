"""Files that appear under their name whole or not at all."""

from __future__ import annotations

import hashlib
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from itertools import count
from pathlib import Path

BLOCK = 1 << 20


def resolved(path: Path) -> Path:
    """The file that `path` names, or that its links point to: a link is to stay one."""
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a link to itself


def beside(path: Path, end: str) -> Path:
    """OUTPUT, .part -> OUTPUT.part"""
    return path.with_name(path.name + end)


def is_gzip(path: Path) -> bool:
    """Whether a file is, or is to be, compressed: by its name."""
    return path.suffix == ".gz"


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file of the user's; until it is whole it has another, new name beside `path`."""
    path = resolved(path)
    for number in count():
        new = beside(path, f".{os.getpid()}-{number}.new")
        if not new.exists():
            return replace(path, data, new)


def replace(path: Path, data: bytes, new: Path) -> None:
    """Writes the file `new`, which must not exist, and gives it the name `path`."""
    file = FileIO(new, "x")
    try:
        with named(new), file:
            write_all(file.fileno(), data)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Not through a buffer: what an error or a signal leaves in one is written at a time that nobody chose."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # a pipe that somebody else has set to non-blocking
            select.select([], [descriptor], [])


def sha256(file: FileIO) -> str:
    """Of what is behind the present place."""
    digest = hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """Gives errors of file descriptors the name of their file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
