"""OUTPUT.part, the journal of a run: append-only, in any order, every line with a checksum.

    1f0c8a2e {"fastgen_journal": 1, "signature": {…}}       what the records depend on
    5be0f3d1 [7, 12, null, "9f…", false, "a record"]        line, length, group, key, whether it failed, record
    9c1e44b0 4                                              four records, a batch, are complete

A batch is one write. However a run ends, at most the last batch is incomplete, and `load` drops it. A damaged line is
detected by its checksum and reported.

One run at a time writes to a journal, the one that has its lock:

    OUTPUT.part.lock    a lock of the file system, which ends with its process
    OUTPUT.part.lease   if the file system has no locks (some network and FUSE mounts): exists during a run

A thread of the run touches the lease. If a machine disappears, its lease stays; a run that resumes takes it over after
LEASE seconds without a touch. Both files name their run, for the messages of other runs.

Tests: tests/batch/test_journal.py, tests/batch/test_lock.py
"""

from __future__ import annotations

import errno
import json
import os
import socket
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from fastgen.batch import files
from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError, RunError

VERSION = 6  # 6: shards divide batches
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
LEASE = 60.0  # a run touches its lease three times in these seconds
PATIENCE = 2 * LEASE  # how long a run that resumes watches a lease
OWNER = "run="  # begins the line that names the run; filelock ignores it in a lease


class Entry(NamedTuple):
    """A record of OUTPUT. length, group and key: its item's, by which batches are planned."""

    number: int  # the number of its line
    length: int
    group: Any
    key: str | None
    failed: bool
    data: bytes  # one line with a line end


class Part:
    """The file. signature: of the run that began it, None if there is none. failed: numbers of failed lines.

    count: called with each entry that is there or is added, without its record.
    """

    def __init__(self, path: Path, count: Callable[[Entry], None]) -> None:
        self.path, self._count = path, count
        self.signature: dict[str, Any] | None = None
        self.failed: set[int] = set()
        self._offsets = array("q")  # the offset of each line's record, -1 if there is none
        self._end = 0  # the end of the last batch, in bytes
        self._file: Any = None  # while it is written
        self._reader: IO[bytes] | None = None

    @property
    def is_open(self) -> bool:
        """Whether entries can be added."""
        return self._file is not None

    def load(self, resume: str) -> None:
        """Reads what earlier runs have written, without an incomplete batch. resume: the flag, for messages."""
        again = f"remove {self.path} to start again"
        if not self.path.is_file():
            raise InputError(f"{resume}: {self.path} is not a file ({again})")
        with self.path.open("rb") as file:
            head = _payload(file.readline())
            if not isinstance(head, dict) or head.get("fastgen_journal") != VERSION:
                why = "is damaged in its first line, or was not written by this version"
                raise InputError(f"{resume}: {self.path} {why} ({again})")
            self.signature, self._end = head["signature"], file.tell()
            pending: dict[int, tuple[Entry, int]] = {}  # entries of the present batch
            offset = self._end
            for index, line in enumerate(file, start=2):
                if not line.endswith(b"\n"):
                    break  # incomplete: the run was killed while writing it
                payload = _payload(line)
                damage = ""
                if isinstance(payload, list):
                    number, length, group, key, failed, _ = payload
                    damage = "repeats a record" if number in pending or self._offset(number) >= 0 else ""
                    pending[number] = Entry(number, length, group, key, failed, b""), offset
                elif payload is None:
                    damage = "has another checksum"
                elif payload != len(pending):
                    damage = f"counts {payload} records of {len(pending)}"
                else:
                    for entry, start in pending.values():
                        self._add(entry, start)
                    pending = {}
                    self._end = offset + len(line)
                if damage:
                    raise InputError(f"{resume}: {self.path} is damaged: line {index} {damage} ({again})")
                offset += len(line)

    def begin(self, signature: dict[str, Any]) -> None:
        """Opens the file, which is new unless `load` has read it."""
        if self.signature is None:
            head = _line({"fastgen_journal": VERSION, "signature": signature})
            files.write_whole(self.path, head)
            self._end = len(head)
        self.signature = signature
        self._file = FileIO(self.path, "r+")
        self.cut()

    def write(self, entries: list[Entry]) -> None:
        """Adds a batch: all of it or, with an OSError, nothing."""
        lines = [_line([*entry[:-1], entry.data[:-1].decode()]) for entry in entries]
        try:
            with files.named(self.path):
                files.write_all(self._file.fileno(), b"".join([*lines, end := _line(len(entries))]))
        except BaseException:
            self.cut()
            raise
        for entry, line in zip(entries, lines, strict=True):
            self._add(entry, self._end)
            self._end += len(line)
        self._end += len(end)

    def entry(self, number: int) -> Entry | None:
        """Returns the entry of a line, None if there is none."""
        offset = self._offset(number)
        return None if offset < 0 else self._read(offset)

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yields numbers and records of lines, in order."""
        return ((number, self._read(offset).data) for number, offset in enumerate(self._offsets) if offset >= 0)

    def ranges(self) -> list[tuple[int, int]]:
        """Returns the first and the last number of each run of successive lines that have a record."""
        ranges: list[tuple[int, int]] = []
        for number, offset in enumerate(self._offsets):
            if offset < 0:
                continue
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1] = ranges[-1][0], number
            else:
                ranges.append((number, number))
        return ranges

    def cut(self) -> None:
        """Truncates the file after the last complete batch."""
        with files.named(self.path):
            self._file.seek(self._end)
            self._file.truncate()

    def discard(self) -> None:
        """Removes the file, as if there had been none."""
        self.close()
        self.path.unlink(missing_ok=True)
        self.signature = None

    def close(self) -> None:
        """Closes the file; may be called again."""
        for file in filter(None, (self._reader, self._file)):
            file.close()
        self._reader = self._file = None

    def _offset(self, number: int) -> int:
        return self._offsets[number] if number < len(self._offsets) else -1

    def _add(self, entry: Entry, offset: int) -> None:
        self._offsets.extend([-1] * (entry.number + 1 - len(self._offsets)))
        self._offsets[entry.number] = offset
        if entry.failed:
            self.failed.add(entry.number)
        self._count(entry)

    def _read(self, offset: int) -> Entry:
        if self._reader is None:
            self._reader = self.path.open("rb")
        self._reader.seek(offset)
        payload = _payload(self._reader.readline())
        if not isinstance(payload, list):
            raise RunError(f"{self.path} has changed since it was read")
        number, length, group, key, failed, record = payload
        return Entry(number, length, group, key, failed, record.encode() + b"\n")


def _line(payload: Any) -> bytes:
    data = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _payload(line: bytes) -> Any:
    """Returns the content of a line; None if it is damaged."""
    checksum, _, data = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(data):
        return None
    try:
        return json.loads(data)
    except ValueError:
        return None


class JournalLock:
    """The lock of a journal, which the constructor takes.

    Raises InputError if another run has it, or the folder cannot be written. say: prints a line for the user.
    """

    def __init__(self, args: BatchConfig, journal: Path, say: Callable[[str], None]) -> None:
        from filelock import FileLock, Timeout

        self._journal, self._resume = journal, args.named("resume", True)
        self._native = self._path = files.sibling(journal, ".lock")
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

        self._path = files.sibling(self._journal, ".lease")
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
