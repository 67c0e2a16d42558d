"""The lock of OUTPUT.part: one run at a time writes to a journal.

    OUTPUT.part.lock    a lock of the file system, which ends with its process
    OUTPUT.part.lease   if the file system has no locks (some network and FUSE mounts): exists during a run

A thread of the run touches the lease. If a machine disappears, its lease stays; a run that resumes takes it over after
LEASE seconds without a touch. Both files name their run, for the messages of other runs.

Tests: tests/batch/test_lock.py, tests/batch/test_journal.py
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError, RunError
from fastgen.batch.files import sibling

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
LEASE = 60.0  # a run touches its lease three times in these seconds
PATIENCE = 2 * LEASE  # how long a run that resumes watches a lease
OWNER = "run="  # begins the line that names the run; filelock ignores it in a lease


class JournalLock:
    """The lock of a journal, which the constructor takes.

    Raises InputError if another run has it, or the folder cannot be written. say: prints a line for the user.
    """

    def __init__(self, args: BatchConfig, journal: Path, say: Callable[[str], None]) -> None:
        from filelock import FileLock, Timeout

        self._journal, self._resume = journal, args.named("resume", True)
        self._native = self._path = sibling(journal, ".lock")
        self._lock: Any = FileLock(self._path, timeout=0, fallback_to_soft=False)
        try:
            try:
                self._lock.acquire()
            except OSError as error:  # also a Timeout, which has no number
                if error.errno not in NO_LOCKS:
                    raise
                self._take_lease(args, error, say)
        except Timeout:
            raise InputError(f"OUTPUT: another run is writing to {journal}: {self._message()}") from None
        except OSError as error:
            raise InputError(f"OUTPUT {args.output}: cannot be written ({error.strerror})") from error
        started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        run = f"{OWNER}process {os.getpid()} on {socket.gethostname()}, started {started}\n"
        with suppress(OSError), self._path.open("w" if self._path == self._native else "a") as file:
            file.write(run)

    def _take_lease(self, args: BatchConfig, error: OSError, say: Callable[[str], None]) -> None:
        from filelock import SoftFileLease

        self._path = sibling(self._journal, ".lease")
        say(f"warning: the folder of OUTPUT has no locks ({error.strerror}): the file {self._path} serves as one")
        if args.resume and self._path.exists():
            say(f"watching for up to {PATIENCE:.0f} seconds whether that run is alive: {self._owner()}")
        patience = PATIENCE if args.resume else 0
        # The thread that touches the lease reports on it, and another one may release it.
        self._lock = SoftFileLease(
            self._path, lease_duration=LEASE, timeout=patience, poll_interval=LEASE / 60, thread_local=False
        )
        self._lock.acquire()

    def _owner(self) -> str:
        """Returns the process that has the lock, its machine and its start, as its file says."""
        with suppress(OSError, ValueError):
            lines = self._path.read_text(encoding="utf-8").splitlines()
            return next(line.removeprefix(OWNER) for line in lines if line.startswith(OWNER))
        return "an unknown process"

    def _message(self) -> str:
        gone = (
            f"; {self._resume} takes the lock over if that run's machine no longer exists"
            if self._path != self._native
            else ""
        )
        return f"{self._owner()}, by its lock {self._path} (wait for it, or end it{gone})"

    @property
    def is_lost(self) -> bool:
        """Whether another run has taken the lease over, because this process was stopped for too long."""
        return getattr(self._lock, "compromise", None) is not None

    def check(self) -> None:
        """Raises RunError if the lock is lost: the journal is another run's."""
        if self.is_lost:
            raise RunError(f"another run has taken over {self._journal}: {self._owner()}")

    def release(self) -> None:
        """Releases the lock and removes its file; may be called again."""
        if self._lock.is_locked:
            self._native.unlink(missing_ok=True)
            self._lock.release()
