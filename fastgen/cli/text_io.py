"""Text files of the commands: checked before anything slow happens, and written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TextIO

from fastgen.cli.errors import InputError


def read_lines(flag: str, path: Path) -> list[str]:
    """The lines of a UTF-8 file without their line ends (LF or CRLF); a byte order mark is dropped.

    `flag` is what the user calls this file, for the messages. Raises InputError where there is nothing to read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{flag} {path}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{flag} {path}: line {line} is not UTF-8 text ({error.reason})") from error
    # Not splitlines(): it would also cut at form feeds and Unicode separators, and line numbers would shift.
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not text:
        raise InputError(f"{flag} {path}: the file is empty")
    return lines


def check_writable(flag: str, path: Path, sources: dict[str, Path | None]) -> None:
    """Raise InputError where `path` cannot be written, or where writing it would destroy one of the other files."""
    if path.is_dir():
        raise InputError(f"{flag} {path}: is a folder (accepted: a file)")
    if path.exists() and (not path.is_file() or path.absolute().parts[1:2] in (("dev",), ("proc",))):
        raise InputError(f"{flag} {path}: is a device or a pipe (accepted: a file)")
    if not path.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {path.parent}")
    for other_flag, other in sources.items():
        if other is not None and path.resolve() == other.resolve():
            raise InputError(f"{flag} {path}: is the same file as {other_flag}")
    try:
        _new_part(path.resolve()).unlink()
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written ({error.strerror})") from error


def _new_part(path: Path) -> Path:
    """A new empty file next to `path`: a file of the user's is never taken over, whatever it is called."""
    for number in count():
        part = path.with_name(f"{path.name}.{os.getpid()}-{number}.part")
        with suppress(FileExistsError):
            part.touch(exist_ok=False)
            return part


@contextmanager
def written_whole(path: Path) -> Iterator[TextIO]:
    """A text file that appears under `path` only when the block ends without an error.

    Until then it has another, new name, next to `path` so that the rename is atomic; an error or an interruption
    removes it. Where `path` is a link, the file it points to is written.
    """
    path = path.resolve()
    part = _new_part(path)
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
