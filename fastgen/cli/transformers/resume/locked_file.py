"""A file of lines that only one process writes to, and how much of it is whole."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.files.whole_file import BLOCK

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def open_locked(part: Path) -> FileIO | None:
    """The part of an earlier run, or None where there is none."""
    while True:
        try:
            if not stat.S_ISREG(os.lstat(part).st_mode):
                raise InputError(f"--resume: {part} is not a file (remove it to start again)")
            file = FileIO(part, "r+")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"--resume: {part}: {error.strerror}") from error
        lock(file)
        if _has_name(file, part):
            return file
        file.close()  # the run that held the lock has just renamed or removed it


def _has_name(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


def lock(file: FileIO) -> None:
    """Raises InputError, and closes the file, where another process has locked it.

    The lock belongs to this process, not to the open file as that of flock does: worker processes that are forked
    would hold on to that one when this process is killed. It is lost when the file is opened and closed once more.
    """
    if fcntl is None:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            return
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise InputError(f"OUTPUT: another run is writing to {file.name} (wait for it, or end it)") from error
        raise


def whole_records(file: FileIO, at_most: int | None = None) -> tuple[int, int]:
    """How many whole records there are, counted up to `at_most`, and where the last of them ends."""
    records = end = start = 0
    file.seek(0)
    while block := file.read(BLOCK):
        found = block.count(b"\n")
        if at_most is not None and records + found > at_most:
            at = -1
            for _ in range(at_most - records):
                at = block.index(b"\n", at + 1)
            return at_most, end if at_most == records else start + at + 1
        if found:
            records, end = records + found, start + block.rindex(b"\n") + 1
        start += len(block)
    return records, end
