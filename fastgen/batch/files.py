"""Files, streams and URLs: fsspec opens URLs, Python's modules decompress, tables.py reads tables.

What is done here:

    lines            end with LF, or CR if there is no LF: `splitlines` would also end them at form feeds, and their
                     numbers would shift. They are cut at a length, so that a file without line ends fits into memory
    reading          without a buffer and in small parts: Python may end while a thread waits in a read, and a pipe may
                     be slow, or not block
    Zstandard        the module that raises for a part of a frame, which fsspec's takes for the end of the file
    writing          a file appears completely or not at all, equal contents become equal bytes, an error has a name
    descriptors      -, /dev/fd/3 and links to them are not opened again: a file behind one would lose its position

INPUT is read twice, however large it is: first for a survey, by which --resume recognizes it.

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
from bz2 import BZ2File
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from gzip import GzipFile
from io import FileIO
from pathlib import Path
from typing import IO, Any, Literal

from fastgen.batch.config import LINES_AT_ONCE, STREAM, kind_of_records
from fastgen.batch.errors import InputError, check_packages
from fastgen.batch.tables import JsonLines

READ_BLOCK = 1 << 16
MOST_LINKS = 40  # that lead from one to the next: Linux's limit
NO_VALUE = object()  # the value of lines of a file
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
BROKEN = (EOFError, zlib.error, lzma.LZMAError, OSError)  # BadGzipFile and bz2's are OSErrors without a number


@dataclass(slots=True)
class Line:
    """One line of INPUT, or an input from Python."""

    number: int  # from 1, over all lines of INPUT
    raw: bytes = b""  # without the line end
    cut: bool = False  # whether `raw` is only the beginning of the line
    value: Any = NO_VALUE  # a text, a list of messages or a path


@dataclass(frozen=True)
class Survey:
    """The result of one pass over a file. A last line without a line end also counts."""

    lines: int
    sha256: str


def is_stream(path: str) -> bool:
    """Whether `path` can be read or written only once: standard input, a pipe, a device, <(…)."""
    return path == STREAM or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def is_output_stream(path: str) -> bool:
    """Whether records go to `path` as they come: a stream, or an open descriptor, which may be redirected to a file."""
    return is_stream(path) or descriptor_of(path) is not None


def descriptor_of(path: str) -> int | None:
    """Returns the descriptor that `path` names as -, /dev/stdout, /dev/fd/3, or a link to one of these; else None."""
    if path == STREAM:
        return 1
    for _ in range(MOST_LINKS):
        folder, name = os.path.split(path)
        if name.isdecimal() and os.path.realpath(folder) in ("/dev/fd", f"/proc/{os.getpid()}/fd"):
            return int(name)
        if not os.path.islink(path):
            break
        path = os.path.join(folder, os.readlink(path))
    return None


def is_url(path: str) -> bool:
    """Whether fsspec opens `path`, such as s3://…, hf://… or memory://…."""
    return "://" in path


@contextmanager
def opened(flag: str, path: str, raw: bool = False, as_records: bool = False) -> Iterator[Any]:
    """Opens a binary file for reading, decompressed by its name unless `raw`. Raises InputError with the flag's name.

    as_records: whether a table, by its name, is read as JSON Lines. Standard input is not read through sys.stdin, whose
    buffer has a lock: a thread that holds it when Python ends would be fatal.
    """
    if path == STREAM and sys.stdin is None:
        raise InputError(f"{flag} {path}: standard input is closed")
    name = "" if raw else path
    _check_zstd(flag, name)
    try:
        if is_url(path):
            import fsspec  # slow, and most inputs do not need it

            file = fsspec.open(path, "rb").open()
        else:
            file = FileIO(os.dup(0)) if path == STREAM else FileIO(path)
    except FileNotFoundError:
        raise InputError(f"{flag} {path}: there is no such file") from None
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from error
    broken = (*BROKEN, _zstd().ZstdError) if name.endswith(".zst") else BROKEN
    try:
        with file, packed(file, name, "rb") as content:
            kind = kind_of_records(path) if as_records else None
            yield content if kind in (None, "JSON") else JsonLines(content, kind, f"{flag} {path}")
    except broken as error:
        if not isinstance(error, OSError) or (path.endswith(COMPRESSED) and error.errno is None):
            kind = "gzip" if path.endswith(".gz") else path.rpartition(".")[2]
            raise InputError(f"{path}: is not a valid {kind} file, or only a part of one ({error})") from error
        error.filename = error.filename or ("standard input" if path == STREAM else path)
        raise


def _read(file: Any) -> bytes:
    """Returns bytes that have arrived; `b""` means the end of the file."""
    while (block := file.read(READ_BLOCK)) is None:  # another process may have made the pipe non-blocking
        select.select([file], [], [])
    return block


def _blocks(file: Any) -> Iterator[tuple[bytes, bytes]]:
    """Yields the blocks of a file, each also with LFs at line ends: a file may begin with lone CRs and no LF."""
    raw = b""
    while len(raw) < READ_BLOCK and b"\n" not in raw and (more := _read(file)):
        raw += more
    has_crs = b"\n" not in raw and b"\r" in raw[:-1]  # the LF of a CRLF may follow the last byte
    while raw:
        yield raw, raw.replace(b"\r", b"\n") if has_crs else raw
        raw = _read(file)


def survey(path: str, as_records: bool = False) -> Survey:
    """Counts the lines of INPUT, or the rows of a table with `as_records`."""
    digest = hashlib.sha256()
    lines, last = 0, b"\n"
    with opened("INPUT", path, as_records=as_records) as file:
        for raw, block in _blocks(file):
            digest.update(raw)
            lines += block.count(b"\n")
            last = block[-1:]
    return Survey(lines + (last != b"\n"), digest.hexdigest())


def read_chunks(
    path: str,
    n_obs: int | None = None,
    lines: int = LINES_AT_ONCE,
    longest: int = sys.maxsize,
    as_records: bool = False,
) -> Iterator[list[Line]]:
    """Yields the lines of INPUT up to number `n_obs`, in chunks of at most `lines` lines from one block.

    Chunks from a slow stream have the lines that have arrived. Lines of more than `longest` bytes are cut.
    """
    number = 0
    last = sys.maxsize if n_obs is None else n_obs
    with opened("INPUT", path, as_records=as_records) as file:
        for ended in _ended_lines(file, longest):
            for start in range(0, len(ended), lines):
                chunk = enumerate(ended[start : start + lines][: last - number], start=number + 1)
                yield [Line(line_number, raw[:longest], len(raw) > longest) for line_number, raw in chunk]
                number += min(lines, len(ended) - start)
                if number >= last:
                    return  # without waiting for further lines


def raw_lines(flag: str, path: str, as_records: bool = False) -> Iterator[bytes]:
    """Yields the lines of a file without line feeds, or the rows of a table as JSON with `as_records`."""
    with opened(flag, path, as_records=as_records) as file:
        for ended in _ended_lines(file, sys.maxsize):
            yield from ended


def _ended_lines(file: Any, longest: int) -> Iterator[list[bytes]]:
    """Yields lists of lines that end in the same block; a last line may have no line end.

    Of a line longer than `longest` bytes, at least one byte more than these is there, but perhaps not all.
    """
    begun: list[bytes] = []  # joined once, so that a long line is not copied for each block
    held = 0
    for _, block in _blocks(file):
        *ended, rest = block.split(b"\n")
        if ended:
            ended[0] = b"".join([*begun, ended[0]])
            begun = []
            held = 0
            yield ended
        if rest and held <= longest:
            begun.append(rest)
            held += len(rest)
    if begun:
        yield [b"".join(begun)]


def check_writable(flag: str, path: str, sources: dict[str, str | None]) -> None:
    """Raises InputError if `path` cannot be written, or if writing it would destroy one of the other files."""
    _check_zstd(flag, path)
    target = Path(os.path.realpath(path))
    try:
        if (descriptor := descriptor_of(path)) is not None:
            os.write(descriptor, b"")  # raises if it is closed, or open for reading only
            same = (name for name, other in sources.items() if other and _is_open_file(descriptor, other))
            if (other_flag := next(same, None)) is not None:
                raise InputError(f"{flag} {path}: is the same file as {other_flag}")
            return
        if is_stream(path):
            return
        if is_url(path):
            from fsspec.core import url_to_fs

            url_to_fs(path)
            return
        if target.is_dir():
            raise InputError(f"{flag} {path}: is a folder (accepted: a file)")
        if not target.parent.is_dir():
            raise InputError(f"{flag} {path}: there is no folder {target.parent}")
        ways = [str(sibling(target, end)) for end in (".part", ".part.new", ".run.json")]
        for other_flag, other in sources.items():
            real = other and os.path.realpath(other)
            if real == str(target):
                raise InputError(f"{flag} {path}: is the same file as {other_flag}")
            if real in ways:
                raise InputError(f"{flag} {path}: would be written by way of {other}, which is {other_flag}")
        # As long as the longest name of a file that is written there.
        with tempfile.NamedTemporaryFile(prefix=f"{target.name}.part.", dir=target.parent):
            pass
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written ({error.strerror})") from error
    except (ImportError, ValueError) as error:  # a missing package, or a protocol that fsspec does not have
        raise InputError(f"{flag} {path}: {error}") from error


def _is_open_file(descriptor: int, path: str) -> bool:
    return os.path.isfile(path) and os.path.samestat(os.fstat(descriptor), os.stat(path))


def sibling(path: Path, end: str) -> Path:
    """Returns a path next to OUTPUT, such as OUTPUT.part for the end `.part`."""
    return path.with_name(path.name + end)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file through PATH.new, so that it appears completely or not at all."""
    new = sibling(path, ".new")
    try:
        with named(new), FileIO(new, "w") as file:
            write_all(file.fileno(), data)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Writes without a buffer: after an error or a signal, the rest of a buffer would be written at any time."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process may have made the pipe non-blocking
            select.select([], [descriptor], [])


def packed(file: IO[bytes], name: str, mode: Literal["rb", "wb"]) -> AbstractContextManager[Any]:
    """Returns a file that decompresses or compresses by its name; equal contents become equal bytes."""
    if name.endswith(".gz"):
        return GzipFile(filename="", mode=mode, compresslevel=6, fileobj=file, mtime=0)
    if name.endswith(".bz2"):
        return BZ2File(file, mode)
    if name.endswith(".xz"):
        return lzma.LZMAFile(file, mode)
    return _zstd().ZstdFile(file, mode) if name.endswith(".zst") else nullcontext(file)


def _zstd() -> Any:
    """Returns Python's module for Zstandard, before 3.14 the package of the same functions."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _check_zstd(flag: str, path: str) -> None:
    if path.endswith(".zst") and sys.version_info < (3, 14):
        check_packages("backports.zstd", needed_by=f"{flag} {path}")


def upload(path: Path, url: str, keeps: bool) -> None:
    """Copies a local file to a URL with fsspec. Raises OSError, whatever the file system raises.

    keeps: whether a file at the URL after a failed upload may be an earlier one; otherwise it is partial, and removed.
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
    """Adds the name of the file to errors of file descriptors."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
