"""Reading INPUT: once over, to know what it is, and then in small parts, however large it is."""

from __future__ import annotations

import hashlib
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from fastgen.cli.errors import InputError
from fastgen.cli.pipeline.whole_file import named
from fastgen.cli.transformers.argument_types import STREAM

if TYPE_CHECKING:
    from fastgen.cli.transformers.items import Line

SURVEY_BLOCK = 1 << 20
READ_BLOCK = 1 << 16
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Survey:
    """What one pass over a file finds. A last line counts without its line end, too. size: in bytes."""

    lines: int
    sha256: str
    size: int


def is_stream(path: Path) -> bool:
    """Whether `path` can be read only once: standard input, a pipe, what a shell makes of <(…)."""
    return path == STREAM or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def survey(path: Path) -> Survey:
    """Counts the lines of INPUT."""
    digest = hashlib.sha256()
    lines, size, last = 0, 0, b"\n"
    with _opened("INPUT", path) as file:
        while block := _read(file, SURVEY_BLOCK):
            digest.update(block)
            lines += block.count(b"\n")
            size += len(block)
            last = block[-1:]
    return Survey(lines + (last != b"\n"), digest.hexdigest(), size)


def read_chunks(
    path: Path,
    first: int = 0,
    n_obs: int | None = None,
    lines: int = 64,
    size: int = CHUNK_BYTES,
    longest: int = sys.maxsize,
) -> Iterator[list[Line]]:
    """The lines of INPUT behind the `first` ones and up to the one with the number `n_obs`, some at a time.

    A chunk has up to `lines` lines of together up to `size` bytes, or a single longer one. From a stream that is slow
    it has those that are there. Of a line of more than `longest` bytes only so many are kept.
    """
    # It needs torch, and the rest of this file is for checks that are made before that is imported.
    from fastgen.cli.transformers.items import Line

    number = 0
    with _opened("INPUT", path) as file:
        for ended in _ended_lines(file, longest):
            chunk: list[Line] = []
            held = 0
            for raw in ended:
                number += 1
                if n_obs is not None and number > n_obs:
                    break
                if number <= first:
                    continue
                if len(chunk) == lines or (chunk and held + len(raw) > size):
                    yield chunk
                    chunk, held = [], 0
                chunk.append(Line(number, raw[:longest], len(raw) > longest))
                held += len(raw)
            if chunk:
                yield chunk
            if n_obs is not None and number >= n_obs:
                return  # without waiting for lines that are not wanted


def read_references(path: Path) -> list[str]:
    """The lines of --reference_path, UTF-8, without their line ends (LF or CRLF) and a byte order mark."""
    references = []
    with _opened("--reference_path", path) as file:
        for ended in _ended_lines(file):
            for raw in ended:
                try:
                    text = raw.decode("utf-8" if references else "utf-8-sig")
                except UnicodeDecodeError as error:
                    number = len(references) + 1
                    raise InputError(
                        f"--reference_path {path}: line {number} is not UTF-8 text ({error.reason})"
                    ) from error
                references.append(text.removesuffix("\r"))
    return references


def _opened(flag: str, path: Path) -> FileIO:
    """Not buffered, and standard input not through sys.stdin: Python ends while a thread still waits in a read.

    The lock of a buffer that such a thread holds would be fatal then.
    """
    if path == STREAM and sys.stdin is None:
        raise InputError(f"{flag} {path}: standard input is closed")
    try:
        return FileIO(os.dup(0)) if path == STREAM else FileIO(path)
    except FileNotFoundError:
        raise InputError(f"{flag} {path}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from error


def _read(file: FileIO, size: int) -> bytes:
    """What has arrived, up to `size` bytes; nothing only at the end."""
    with named("standard input" if isinstance(file.name, int) else file.name):
        while (block := file.read(size)) is None:  # a pipe that somebody else has set to non-blocking
            select.select([file], [], [])
    return block


def _ended_lines(file: FileIO, longest: int = sys.maxsize) -> Iterator[list[bytes]]:
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
