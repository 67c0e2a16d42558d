"""Reading INPUT: once over, to know what it is, and then in small parts, however large it is."""

from __future__ import annotations

import gzip
import hashlib
import os
import select
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.files.records import RecordError, decode, field, kind, parse
from fastgen.cli.transformers.files.whole_file import BLOCK, is_gzip, named
from fastgen.cli.transformers.flags.argument_types import STREAM
from fastgen.cli.transformers.stages.items import Line

READ_BLOCK = 1 << 16
CHUNK_BYTES = 1 << 18
LINES_AT_ONCE = 64
SOUNDS_AT_ONCE = 1  # a recording may be hours long, and what waits for the model is in memory


@dataclass(frozen=True)
class Survey:
    """What one pass over a file finds. A last line counts without its line end, too."""

    lines: int
    sha256: str


def is_stream(path: Path) -> bool:
    """Whether `path` can be read only once: standard input, a pipe, what a shell makes of <(…)."""
    return path == STREAM or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def survey(path: Path) -> Survey:
    """Counts the lines of INPUT."""
    digest = hashlib.sha256()
    lines, last = 0, b"\n"
    with _opened("INPUT", path) as file:
        while block := _read(file, BLOCK):
            digest.update(block)
            lines += block.count(b"\n")
            last = block[-1:]
    return Survey(lines + (last != b"\n"), digest.hexdigest())


def read_chunks(
    path: Path,
    first: int = 0,
    n_obs: int | None = None,
    lines: int = LINES_AT_ONCE,
    size: int = CHUNK_BYTES,
    longest: int = sys.maxsize,
) -> Iterator[list[Line]]:
    """The lines of INPUT behind the `first` ones and up to the one with the number `n_obs`, some at a time.

    A chunk has up to `lines` lines of together up to `size` bytes, or a single longer one. From a stream that is slow
    it has those that are there. Of a line of more than `longest` bytes only so many are kept.
    """
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


def raw_lines(flag: str, path: Path, longest: int = sys.maxsize) -> Iterator[bytes]:
    """The lines of a file without their line feeds, one at a time; of longer ones `longest` bytes or more."""
    with _opened(flag, path) as file:
        for ended in _ended_lines(file, longest):
            yield from ended


def read_references(flag: str, path: Path, reference_field: str | None = None) -> list[str]:
    """What to compare each line's output with: the lines of a UTF-8 file, or a field of its JSON records."""
    references = []
    for number, raw in enumerate(raw_lines(flag, path), start=1):
        try:
            reference = decode(Line(number, raw))
            if reference_field is not None and reference.strip():
                reference = field(parse(reference), reference_field)
            if not isinstance(reference, str):
                raise RecordError(f'has {kind(reference)} in its field "{reference_field}" (accepted: a string)')
        except RecordError as error:
            raise InputError(f"{flag} {path}: line {number} {error}") from error
        references.append(reference)
    return references


def _opened(flag: str, path: Path) -> FileIO | gzip.GzipFile:
    """Not buffered, and standard input not through sys.stdin: Python ends while a thread still waits in a read.

    The lock of a buffer that such a thread holds would be fatal then.
    """
    if path == STREAM and sys.stdin is None:
        raise InputError(f"{flag} {path}: standard input is closed")
    try:
        if is_gzip(path):
            return gzip.GzipFile(path)
        return FileIO(os.dup(0)) if path == STREAM else FileIO(path)
    except FileNotFoundError:
        raise InputError(f"{flag} {path}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from error


def _read(file: FileIO | gzip.GzipFile, size: int) -> bytes:
    """What has arrived, up to `size` bytes; nothing only at the end."""
    try:
        with named("standard input" if isinstance(file.name, int) else file.name):
            while (block := file.read(size)) is None:  # a pipe that somebody else has set to non-blocking
                select.select([file], [], [])
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{file.name}: is no gzip file, or only a part of one ({error.args[0]})") from error
    return block


def _ended_lines(file: FileIO | gzip.GzipFile, longest: int) -> Iterator[list[bytes]]:
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
