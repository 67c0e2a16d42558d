"""A file that only one process writes to."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path

from fastgen.cli.errors import InputError

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
        _lock(file)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(part)):
                return file
        file.close()  # the run that held the lock has just renamed or removed it


def _lock(file: FileIO) -> None:
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
