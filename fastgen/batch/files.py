"""Files, streams and URLs, compressed or not: reading lines in small parts, and writing files whole or not at all.

INPUT is read once over, to know what it is, and then again, however large it is.

Tests: tests/batch/test_files.py, tests/batch/test_journal.py
"""

from __future__ import annotations

import hashlib
import lzma
import os
import select
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from gzip import GzipFile
from io import FileIO
from pathlib import Path
from typing import IO, Any

from fastgen.batch.config import STREAM
from fastgen.batch.errors import InputError, check_packages

READ_BLOCK = 1 << 16
LINES_AT_ONCE = 64
NO_VALUE = object()  # of a line of a file
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(slots=True)
class Line:
    """One input as it stands in INPUT, or a value that is none of a file."""

    number: int  # counted from 1 over all lines of INPUT
    raw: bytes = b""  # without its line end
    cut: bool = False  # whether `raw` is only what the line begins with
    value: Any = NO_VALUE  # a text, a list of messages or a path


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
    if path.endswith(".zst") and not raw:
        check_packages("zstandard", needed_by=f"{flag} {path}")
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
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # BadGzipFile and bz2's are OSErrors without a number.
        if not isinstance(error, OSError) or (path.endswith(COMPRESSED) and error.errno is None):
            kind = "gzip" if path.endswith(".gz") else path.rpartition(".")[2]
            raise InputError(f"{path}: is no {kind} file, or only a part of one ({error})") from error
        error.filename = error.filename or ("standard input" if path == STREAM else path)
        raise


def _read(file: Any) -> bytes:
    """Bytes that have arrived; `b""` means the end of the file."""
    while (block := file.read(READ_BLOCK)) is None:  # a pipe that somebody else has set to non-blocking
        select.select([file], [], [])
    return block


def _blocks(file: Any) -> Iterator[tuple[bytes, bytes]]:
    """The blocks of a file, and the same with LFs at the ends of lines: a file may begin with lone CRs, and no LF."""
    raw = b""
    while len(raw) < READ_BLOCK and b"\n" not in raw and (more := _read(file)):
        raw += more
    has_crs = b"\n" not in raw and b"\r" in raw[:-1]  # behind the last byte there may be the LF of a CRLF
    while raw:
        yield raw, raw.replace(b"\r", b"\n") if has_crs else raw
        raw = _read(file)


def survey(path: str) -> Survey:
    """Counts the lines of INPUT."""
    digest = hashlib.sha256()
    lines, last = 0, b"\n"
    with opened("INPUT", path) as file:
        for raw, block in _blocks(file):
            digest.update(raw)
            lines += block.count(b"\n")
            last = block[-1:]
    return Survey(lines + (last != b"\n"), digest.hexdigest())


def read_chunks(
    path: str, n_obs: int | None = None, lines: int = LINES_AT_ONCE, longest: int = sys.maxsize
) -> Iterator[list[Line]]:
    """The lines of INPUT up to the one with the number `n_obs`, up to `lines` of one block of it at a time.

    From a stream that is slow it has those that are there. Of a line of more than `longest` bytes so many are kept.
    """
    number, last = 0, sys.maxsize if n_obs is None else n_obs
    with opened("INPUT", path) as file:
        for ended in _ended_lines(file, longest):
            for start in range(0, len(ended), lines):
                chunk = enumerate(ended[start : start + lines][: last - number], start=number + 1)
                yield [Line(place, raw[:longest], len(raw) > longest) for place, raw in chunk]
                number += min(lines, len(ended) - start)
                if number >= last:
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
    for _, block in _blocks(file):
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


def check_writable(flag: str, path: str, sources: dict[str, str | None]) -> None:
    """Raises InputError if `path` cannot be written, or if writing it would destroy one of the other files."""
    if path.endswith(".zst"):
        check_packages("zstandard", needed_by=f"{flag} {path}")
    if is_stream(path):
        return
    target = Path(os.path.realpath(path))
    try:
        if is_url(path):
            from fsspec.core import url_to_fs

            url_to_fs(path)
            return
        if target.is_dir():
            raise InputError(f"{flag} {path}: is a folder (accepted: a file)")
        if not target.parent.is_dir():
            raise InputError(f"{flag} {path}: there is no folder {target.parent}")
        ways = [str(beside(target, end)) for end in (".part", ".part.new", ".run.json")]
        for other_flag, other in sources.items():
            real = other and os.path.realpath(other)
            if real == str(target):
                raise InputError(f"{flag} {path}: is the same file as {other_flag}")
            if real in ways:
                raise InputError(f"{flag} {path}: would be written by way of {other}, which is {other_flag}")
        # As long as the longest name that is written there.
        with tempfile.NamedTemporaryFile(prefix=f"{target.name}.part.", dir=target.parent):
            pass
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written ({error.strerror})") from error
    except (ImportError, ValueError) as error:  # a package that is not there, or a protocol that fsspec has not
        raise InputError(f"{flag} {path}: {error}") from error


def beside(path: Path, end: str) -> Path:
    """Returns a path next to OUTPUT: OUTPUT, .part -> OUTPUT.part."""
    return path.with_name(path.name + end)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file by way of PATH.new, so that it appears whole or not at all."""
    new = beside(path, ".new")
    try:
        with named(new), FileIO(new, "w") as file:
            write_all(file.fileno(), data)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Writes without a buffer: what an error or a signal leaves in one is written at a time that nobody chose."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # a pipe that somebody else has set to non-blocking
            select.select([], [descriptor], [])


@contextmanager
def compressing(file: IO[bytes], name: str) -> Iterator[Any]:
    """What compresses as the name says; gzip with no time in it, so that the same records give the same bytes.

    It may close `file` (zstandard does), and have `write` only.
    """
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


def upload(path: Path, url: str, keeps: bool) -> None:
    """Copies a local file to where fsspec writes it; raises OSError, whatever the file system raises.

    keeps: what is there after an upload that failed may be an earlier file; else it is a part of this one, and goes.
    """
    from fsspec.core import url_to_fs

    files, name = url_to_fs(url)
    try:
        files.put_file(str(path), name)
    except Exception as error:
        if not keeps:
            with suppress(Exception):
                files.rm_file(name)
        raise OSError(f"OUTPUT {url}: the upload failed ({type(error).__name__}: {error})") from error


def sha256(file: Any) -> str:
    """Returns the checksum of the rest of a file, from the present position on."""
    digest = hashlib.sha256()
    while block := file.read(READ_BLOCK):
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
