"""Reading INPUT, references and OUTPUT: files, compressed or not, streams and URLs, in small parts.

INPUT is read once over, to know what it is, and then again, however large it is.

Tests: tests/cli/transformers/test_cli_lines.py
"""

from __future__ import annotations

import hashlib
import lzma
import os
import select
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from typing import Any

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.args import STREAM

BLOCK = 1 << 20
READ_BLOCK = 1 << 16
CHUNK_BYTES = 1 << 18
LINES_AT_ONCE = 64
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(slots=True)
class Line:
    """One input as it stands in INPUT."""

    number: int  # counted from 1 over all lines of INPUT
    raw: bytes  # without its line end
    cut: bool = False  # whether `raw` is only what the line begins with


@dataclass(frozen=True)
class Survey:
    """What one pass over a file finds. A last line counts without its line end, too."""

    lines: int
    sha256: str


def is_stream(path: str) -> bool:
    """Whether `path` is read or written once from end to end: standard input, a pipe, a device, <(…)."""
    return path == STREAM or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def is_url(path: str) -> bool:
    """Whether `path` is no local file, but one that fsspec opens: s3://…, hf://…, memory://…"""
    return "://" in path


@contextmanager
def opened(flag: str, path: str, raw: bool = False) -> Iterator[Any]:
    """A binary file to read from, decompressed by its name unless `raw`; raises InputError with the flag's name.

    Local ones are not buffered, and standard input not through sys.stdin: Python ends while a thread still waits in a
    read, and the lock of a buffer that such a thread holds would be fatal then.
    """
    if path == STREAM and sys.stdin is None:
        raise InputError(f"{flag} {path}: standard input is closed")
    try:
        if is_url(path) or (path.endswith(COMPRESSED) and not raw):
            import fsspec  # takes a moment, and most inputs do without

            file = fsspec.open(path, "rb", compression=None if raw else "infer").open()
        else:
            file = FileIO(os.dup(0)) if path == STREAM else FileIO(path)
    except FileNotFoundError:
        raise InputError(f"{flag} {path}: there is no such file") from None
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        with file:
            yield file
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _not_whole(path, error) from error
    except OSError as error:
        if path.endswith(COMPRESSED) and error.errno is None:  # BadGzipFile, and bz2's
            raise _not_whole(path, error) from error
        error.filename = error.filename or ("standard input" if path == STREAM else path)
        raise


def _not_whole(path: str, error: Exception) -> InputError:
    kind = "gzip" if path.endswith(".gz") else path.rpartition(".")[2]
    return InputError(f"{path}: is no {kind} file, or only a part of one ({error})")


def _read(file: Any, size: int) -> bytes:
    """What has arrived, up to `size` bytes; nothing only at the end."""
    while (block := file.read(size)) is None:  # a pipe that somebody else has set to non-blocking
        select.select([file], [], [])
    return block


def survey(path: str) -> Survey:
    """Counts the lines of INPUT."""
    digest = hashlib.sha256()
    lines, last = 0, b"\n"
    with opened("INPUT", path) as file:
        while block := _read(file, BLOCK):
            digest.update(block)
            lines += block.count(b"\n")
            last = block[-1:]
    return Survey(lines + (last != b"\n"), digest.hexdigest())


def read_chunks(
    path: str,
    n_obs: int | None = None,
    lines: int = LINES_AT_ONCE,
    size: int = CHUNK_BYTES,
    longest: int = sys.maxsize,
) -> Iterator[list[Line]]:
    """The lines of INPUT up to the one with the number `n_obs`, some at a time.

    A chunk has up to `lines` lines of together up to `size` bytes, or a single longer one. From a stream that is slow
    it has those that are there. Of a line of more than `longest` bytes only so many are kept.
    """
    number = 0
    with opened("INPUT", path) as file:
        for ended in _ended_lines(file, longest):
            chunk: list[Line] = []
            held = 0
            for raw in ended:
                number += 1
                if n_obs is not None and number > n_obs:
                    break
                if len(chunk) == lines or (chunk and held + len(raw) > size):
                    yield chunk
                    chunk, held = [], 0
                chunk.append(Line(number, raw[:longest], len(raw) > longest))
                held += len(raw)
            if chunk:
                yield chunk
            if n_obs is not None and number >= n_obs:
                return  # without waiting for lines that are not wanted


def raw_lines(flag: str, path: str, longest: int = sys.maxsize) -> Iterator[bytes]:
    """The lines of a file without their line feeds, one at a time; of longer ones `longest` bytes or more."""
    with opened(flag, path) as file:
        for ended in _ended_lines(file, longest):
            yield from ended


def _ended_lines(file: Any, longest: int) -> Iterator[list[bytes]]:
    """All lines, those together that end in one block; a last line may lack its end.

    Of a line of more than `longest` bytes at least so many are there, and a byte more, but perhaps not all.
    Not splitlines: it would also cut at form feeds and at the CR of CRLF, and line numbers would shift.
    """
    begun: list[bytes] = []  # joined once: a line of many blocks would be copied for each
    held = 0
    while block := _read(file, READ_BLOCK):
        *ended, rest = block.split(b"\n")
        if ended:
            ended[0] = b"".join([*begun, ended[0]])
            begun, held = [], 0
            yield ended
        if rest and held <= longest:
            begun.append(rest)
            held += len(rest)
    if begun:
        yield [b"".join(begun)]
