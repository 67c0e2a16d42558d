"""OUTPUT.part, the journal of a run: append-only, in any order, every line with a checksum.

    1f0c8a2e {"fastgen_journal": 1, "signature": {…}}       what the records depend on
    5be0f3d1 [7, 12, null, "9f…", false, "a record"]        line, length, group, key, whether it failed, record
    9c1e44b0 4                                              four records, a batch, are complete

A batch is one write. However a run ends, at most the last batch is incomplete, and `load` drops it. A damaged line is
detected by its checksum and reported.

Tests: tests/batch/test_journal.py, tests/batch/test_lock.py
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from fastgen.batch import files
from fastgen.batch.errors import InputError, RunError

VERSION = 6  # 6: shards divide batches


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
