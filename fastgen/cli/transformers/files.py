"""Files that OUTPUT consists of: whether they can be written, and writing them whole or not at all.

Tests: tests/cli/transformers/test_journal.py
"""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from gzip import GzipFile
from io import FileIO
from pathlib import Path
from typing import IO, Any

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.lines import BLOCK, COMPRESSED, is_stream, is_url


def check_writable(flag: str, path: str, sources: dict[str, str | None]) -> None:
    """Raise InputError where `path` cannot be written, or where writing it would destroy one of the other files."""
    if is_url(path) or is_stream(path):
        return
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise InputError(f"{flag} {path}: is a folder (accepted: a file)")
        if not target.parent.is_dir():
            raise InputError(f"{flag} {path}: there is no folder {target.parent}")
        ways = [str(beside(target, end)) for end in (".part", ".part.new", ".run.json")]
        for other_flag, other in sources.items():
            real = None if other is None or is_url(other) else os.path.realpath(other)
            if real == str(target):
                raise InputError(f"{flag} {path}: is the same file as {other_flag}")
            if real in ways:
                raise InputError(f"{flag} {path}: would be written by way of {other}, which is {other_flag}")
        # As long as the longest name that is written there.
        with tempfile.NamedTemporaryFile(prefix=f"{target.name}.part.", dir=target.parent):
            pass
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written ({error.strerror})") from error


def beside(path: Path, end: str) -> Path:
    """OUTPUT, .part -> OUTPUT.part"""
    return path.with_name(path.name + end)


def write_whole(path: Path, data: bytes, new: Path) -> None:
    """Writes a file by way of another name, so that it appears whole or not at all."""
    try:
        with named(new), FileIO(new, "w") as file:
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


@contextmanager
def compressing(file: IO[bytes], name: str) -> Iterator[Any]:
    """What compresses as the name says; gzip with no time in it, so that the same records give the same bytes."""
    if name.endswith(".gz"):
        with GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            yield packed
    elif name.endswith(COMPRESSED):
        from fsspec.compression import compr
        from fsspec.utils import infer_compression

        with compr[infer_compression(name)](file, mode="wb") as packed:
            yield packed
    else:
        yield file


def upload(path: Path, url: str) -> None:
    """Copies a local file to where fsspec writes it."""
    import fsspec

    with path.open("rb") as file, fsspec.open(url, "wb", compression=None).open() as remote:
        shutil.copyfileobj(file, remote, BLOCK)


def sha256(file: Any) -> str:
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
        error.filename = error.filename or str(path)
        raise
