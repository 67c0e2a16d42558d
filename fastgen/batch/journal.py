"""OUTPUT and its journal, OUTPUT.part: append-only, in any order, every line with a checksum.

    1f0c8a2e {"fastgen_journal": 1, "signature": {…}}       what the records depend on
    5be0f3d1 [7, 12, null, "9f…", false, "a record"]        line, length, group, key, whether it failed, record
    9c1e44b0 4                                              four records, a batch, are complete

A batch is one write. However a run ends, at most the last batch of the journal is incomplete. `--resume` drops it, and
plans the same batches again by the lengths, groups and keys of the others. At the end the records are sorted into a
file next to OUTPUT, which is then renamed. A damaged line is detected by its checksum and reported.

A complete run leaves OUTPUT.run.json: its signature, and a digest by which OUTPUT is recognised.

Tests: tests/batch/test_journal.py, tests/cli/transformers/test_standard_output.py
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from fastgen.batch import files
from fastgen.batch.config import STREAM, BatchConfig
from fastgen.batch.errors import InputError, RunError
from fastgen.batch.lock import JournalLock
from fastgen.batch.signature import differences
from fastgen.reasons import counted

if TYPE_CHECKING:
    from fastgen.batch.audio import SoundFolder

VERSION = 6  # 6: shards divide batches
HINT = "OUTPUT is sorted from OUTPUT.part, which needs as much space again; the run can be resumed"


class Entry(NamedTuple):
    """A record of OUTPUT. length, group and key: its item's, by which batches are planned."""

    number: int  # the number of its line
    length: int
    group: Any
    key: str | None
    failed: bool
    data: bytes  # one line with a line end


class StreamOutput:
    """OUTPUT -, /dev/fd/3 or a device: writes records in the order of lines, as soon as possible, and stores nothing.

    records, failures, generated: how many are complete, failed, and have outputs. signature: that of the
    resumed run. completed: what OUTPUT.run.json says of the run that completed OUTPUT. failed: with --retry_failed, the
    numbers of failed lines and the places of their records. changes: flags that differ from the first run's.
    """

    records = failures = generated = 0
    signature: dict[str, Any] | None = None
    completed: dict[str, Any] | None = None
    failed: dict[int, int] | None = None
    changes: tuple[str, ...] = ()

    def __init__(self, output: str) -> None:
        self._name = "standard output" if output == STREAM else output
        # A file to which a descriptor is redirected is not opened again: that would lose its place in it.
        descriptor = files.descriptor_of(output)
        self._descriptor = os.open(output, os.O_WRONLY) if descriptor is None else os.dup(descriptor)
        self._early: dict[int, Entry] = {}

    def check(self, signature: dict[str, Any]) -> bool:
        """Whether the same run has completed OUTPUT already. Raises InputError with the differences, if any."""
        return False

    def begin(self, signature: dict[str, Any], sounds: SoundFolder | None = None) -> None:
        """Starts the journal; called before anything is written. sounds: the files that OUTPUT names."""

    def entry(self, number: int) -> Entry | None:
        """Returns the record of a line, if an earlier run has written it."""
        return None

    def write(self, entries: list[Entry]) -> None:
        """Adds a batch. Raises BrokenPipeError if the reader is gone."""
        self._early.update((entry.number, entry) for entry in entries)
        ready: list[Entry] = []
        while (entry := self._early.pop(self.records + len(ready) + 1, None)) is not None:
            ready.append(entry)
        with files.named(self._name):
            files.write_all(self._descriptor, b"".join(entry.data for entry in ready))
        for entry in ready:
            self._count(entry)

    def complete(self) -> None:
        """Ends the output; called when all records are written."""

    def leave(self, resumable: bool = True) -> str:
        """Releases the output at any end of a run, and returns a line about what is kept; see `Journal.leave`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        return ""

    def _count(self, entry: Entry) -> None:
        self.records += 1
        self.failures += entry.failed
        self.generated += not entry.failed and entry.length > 0


class Journal(StreamOutput):
    """The journal OUTPUT.part of one run, which holds its lock."""

    def __init__(self, args: BatchConfig, say: Callable[[str], None] = lambda said: None) -> None:
        """Raises InputError if OUTPUT or OUTPUT.part may not be written, or cannot be resumed. say: prints problems."""
        output = args.output
        self._args, self._output, self._overwrite = args, output, args.overwrite
        # The files of a remote OUTPUT are in the current folder.
        self._target = Path(output.rstrip("/").rpartition("/")[2] if files.is_url(output) else os.path.realpath(output))
        self.path = files.sibling(self._target, ".part")
        self._new, self._run_json = files.sibling(self._target, ".part.new"), files.sibling(self._target, ".run.json")
        self._sounds: SoundFolder | None = None
        self._reader: IO[bytes] | None = None
        self._offsets = array("q")  # the offset of each line's record, -1 if there is none
        self._failed: set[int] = set()  # numbers of failed lines
        self._end = 0  # the end of the last batch, in bytes
        self._file: Any = None  # the journal while it is written
        self._lock = JournalLock(args, self.path, say)
        try:
            self._check()
        except BaseException:
            self.leave()
            raise

    def _check(self) -> None:
        self.completed = self._completed() if self._args.resume else None
        if self._is_begun(f"OUTPUT {self._output}"):
            self._load()
        if self.completed is not None and self.signature is not None:
            if self.completed["signature"] == self.signature:  # killed after OUTPUT was renamed
                self.path.unlink()
                self.signature = None
            else:
                self.completed = None
        if self._exists() and not self._overwrite and self.completed is None:
            unknown = "; its run is unknown, or it was changed since" if self._args.resume else ""
            raise InputError(f"{self._is_there()}{unknown}")

    def _is_begun(self, what: str) -> bool:
        """Whether there is a journal. Raises InputError if there is one, but the run does not resume it."""
        is_there = os.path.lexists(self.path)
        if is_there and not self._args.resume:
            hint = f"{self._args.named('resume', True)} resumes it; remove it to start again"
            raise InputError(f"{what}: there is {self.path} ({hint})")
        return is_there

    def check(self, signature: dict[str, Any]) -> bool:
        self._check_journal(signature)
        changes = [] if self.completed is None else differences(self.completed["signature"], signature)
        if changes and not self._overwrite:
            raise InputError(f"{self._is_there()}; it was made differently: {'; '.join(changes)}")
        return self.completed is not None and not changes

    def _check_journal(self, signature: dict[str, Any]) -> None:
        if self.signature is not None and (changes := differences(self.signature, signature)):
            text = f"{self._args.setting('resume')}: {self.path} was made differently: {'; '.join(changes)}"
            raise InputError(f"{text} (accepted: as it was; remove {self.path} to start again)")

    def begin(self, signature: dict[str, Any], sounds: SoundFolder | None = None) -> None:
        self.check(signature)
        if self.signature is None:
            head = _line({"fastgen_journal": VERSION, "signature": signature})
            files.write_whole(self.path, head)
            self._end = len(head)
        self.signature = signature
        self._file = FileIO(self.path, "r+")
        self._sounds = sounds
        self._cut()
        if sounds is not None:
            sounds.begin(resumes=self.records > 0)

    def entry(self, number: int) -> Entry | None:
        offset = self._offset(number)
        return None if offset < 0 else self._read(offset)

    def write(self, entries: list[Entry]) -> None:
        """Adds a batch: all of it or, with an OSError, nothing."""
        self._lock.check()
        lines = [_line([*entry[:-1], entry.data[:-1].decode()]) for entry in entries]
        try:
            with files.named(self.path):
                files.write_all(self._file.fileno(), b"".join([*lines, end := _line(len(entries))]))
        except BaseException:
            self._cut()
            raise
        for entry, line in zip(entries, lines, strict=True):
            self._add(entry, self._end)
            self._end += len(line)
        self._end += len(end)

    def complete(self, records: Iterable[bytes] | None = None, failed: dict[int, int] | None = None) -> None:
        """Writes its records in order, or `records`, to OUTPUT, and removes the journal.

        failed: the numbers of failed lines in `records`, with the places of their records from 0 on. After an OSError
        the journal is kept for --resume. Raises InputError if an OUTPUT has appeared that may not be replaced.
        """
        self._lock.check()
        if self._exists() and not self._overwrite:
            resume = self._args.named("resume", True)
            raise InputError(f"{self._is_there()}, with {resume}; all records are in {self.path}")
        try:
            digest = self._assemble(self._new, records)
            if failed is None:
                numbers = (number for number, offset in enumerate(self._offsets) if offset >= 0)
                failed = {number: place for place, number in enumerate(numbers) if number in self._failed}
            files.write_whole(self._run_json, json.dumps(self._completes(digest, failed), indent=1).encode())
            if self._sounds is not None:
                self._sounds.complete(self._overwrite)
            if files.is_url(self._output):
                files.upload(self._new, self._output, keeps=self._overwrite)
            else:
                os.replace(self._new, self._target)
        except OSError as error:
            self._new.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                error.strerror = f"{error.strerror} ({HINT})"
            raise
        self._discard()

    def _completes(self, digest: str, failed: dict[int, int]) -> dict[str, Any]:
        """Returns the content of OUTPUT.run.json; a shard's also says which lines it has, for --merge."""
        counts = {"failures": self.failures, "records": self.records, "failed": failed}
        lines = {} if self._args.shard_id is None else {"lines": _ranges(self._offsets)}
        return {"signature": self.signature, "sha256": digest} | counts | lines

    def leave(self, resumable: bool = True) -> str:
        """Keeps the journal, or, if no run can resume it, its sorted records; removes a journal of failures only.

        Returns a line about what is kept. resumable: whether INPUT can be read again.
        """
        left = ""
        if self._lock.is_lost:
            self._close()
        elif self._file is not None and not self.generated:
            self._discard()
            if self._sounds is not None:
                self._sounds.discard()
        elif self._file is not None and resumable:
            self._cut()
            self._close()
            done = f"{counted(self.records, 'complete line')} in {self.path}"
            left = f"{done}; the same run with {self._args.named('resume', True)} resumes after that"
        elif self._file is not None:
            path = files.sibling(self._target, ".incomplete")
            self._assemble(path)
            self._discard()
            left = f"{counted(self.records, 'record')} in {path}; INPUT can be read only once, so no run can resume"
        self._lock.release()
        return left

    def _load(self) -> None:
        """Reads what earlier runs have written, and drops what follows the last complete batch."""
        resume = self._args.setting("resume")
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
            for place, line in enumerate(file, start=2):
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
                    raise InputError(f"{resume}: {self.path} is damaged: line {place} {damage} ({again})")
                offset += len(line)

    def _offset(self, number: int) -> int:
        return self._offsets[number] if number < len(self._offsets) else -1

    def _add(self, entry: Entry, offset: int) -> None:
        self._offsets.extend([-1] * (entry.number + 1 - len(self._offsets)))
        self._offsets[entry.number] = offset
        if entry.failed:
            self._failed.add(entry.number)
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

    def _assemble(self, path: Path, records: Iterable[bytes] | None = None) -> str:
        """Writes `records`, or the whole journal in order, compressed by OUTPUT's name; returns the SHA-256."""
        if records is None:
            records = (self._read(offset).data for offset in self._offsets if offset >= 0)
        with files.named(path):
            with path.open("wb") as file, files.packed(file, self._output, "wb") as packed:
                for record in records:
                    packed.write(record)
            with path.open("rb") as written:
                os.fsync(written.fileno())
                return files.sha256(written)

    def _cut(self) -> None:
        """Truncates the journal after the last complete batch."""
        with files.named(self.path):
            self._file.seek(self._end)
            self._file.truncate()

    def _discard(self) -> None:
        self._close()
        for path in (self.path, self._new):
            path.unlink(missing_ok=True)

    def _close(self) -> None:
        for file in filter(None, (self._reader, self._file)):
            file.close()
        self._reader = self._file = None

    def _exists(self) -> bool:
        if files.is_url(self._output):
            import fsspec

            filesystem, path = fsspec.core.url_to_fs(self._output)
            return filesystem.exists(path)
        return os.path.lexists(self._target)

    def _completed(self) -> dict[str, Any] | None:
        """Returns the run.json of the run that completed OUTPUT; None if there is none, or OUTPUT was changed since."""
        with suppress(OSError, ValueError, TypeError, KeyError, InputError):  # the file may be another program's
            run_json = json.loads(self._run_json.read_bytes())
            with files.opened("OUTPUT", self._output, raw=True) as file:
                digest = files.sha256(file)
            versions = (run_json, run_json.get("before"))
            return next((each for each in versions if each and each["sha256"] == digest), None)
        return None

    def _is_there(self) -> str:
        overwrite = self._args.named("overwrite", True)
        return f"OUTPUT {self._output} already exists (accepted: another name, or {overwrite} to replace it)"


def _ranges(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the first and the last number of each run of successive lines that have a record."""
    numbers = (number for number, offset in enumerate(offsets) if offset >= 0)
    runs = (list(run) for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]))
    return [(run[0][1], run[-1][1]) for run in runs]


def _line(payload: Any) -> bytes:
    data = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _payload(line: bytes) -> Any:
    """Returns the content of a line of the journal; None if it is damaged."""
    checksum, _, data = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(data):
        return None
    try:
        return json.loads(data)
    except ValueError:
        return None
