"""OUTPUT: written as a stream, or from its journal OUTPUT.part, which resumes, retries and merges runs.

    run, --resume      OUTPUT.part                       generates the numbers that are missing in it
    --retry_failed     OUTPUT.part, OUTPUT               the same; in OUTPUT, failed lines count as missing
    --merge            OUTPUT of each shard              nothing is missing

At the end the records of these files are sorted by number into a file next to OUTPUT, which is then renamed. A complete
run leaves OUTPUT.run.json: its signature, which lines it has and which failed, and a digest by which OUTPUT is
recognized. A retry keeps the signature of the run, by which --resume and --merge recognize OUTPUT.

Tests: tests/batch/test_journal.py, tests/batch/test_retry.py, tests/cli/transformers/test_standard_output.py
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from heapq import merge
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.batch import files
from fastgen.batch.config import RECORDS, STREAM, BatchConfig, names_of
from fastgen.batch.errors import InputError, RunError
from fastgen.batch.part import Entry, JournalLock, Part
from fastgen.batch.signature import DIGEST, differences
from fastgen.reasons import counted

if TYPE_CHECKING:
    from fastgen.batch.audio import SoundFolder

HINT = "OUTPUT is sorted from OUTPUT.part, which needs as much space again; the run can be resumed"
CONTENT = "OUTPUT's content"  # in the signature of a retry's journal
Numbered = Iterable[tuple[int, bytes]]  # records with the numbers of their lines, in order


class StreamOutput:
    """OUTPUT -, /dev/fd/3 or a device: writes records in the order of lines, as soon as possible, and stores nothing.

    records, failures, generated: how many are complete, failed, and have outputs. signature: that of the
    resumed run. completed: what OUTPUT.run.json says of the run that completed OUTPUT. failed: with --retry_failed, the
    numbers of the lines that failed. changes: flags that differ from the first run's.
    """

    records = failures = generated = 0
    signature: dict[str, Any] | None = None
    completed: dict[str, Any] | None = None
    failed: frozenset[int] | None = None
    changes: tuple[str, ...] = ()

    def __init__(self, output: str) -> None:
        self._name = "standard output" if output == STREAM else output
        # A file to which a descriptor is redirected is not opened again: that would lose its position in it.
        descriptor = files.descriptor_of(output)
        self._descriptor = os.open(output, os.O_WRONLY) if descriptor is None else os.dup(descriptor)
        self._early: dict[int, Entry] = {}

    def check(self, signature: dict[str, Any]) -> bool:
        """Whether nothing is missing in OUTPUT. Raises InputError if the run differs from the one to resume."""
        return False

    def begin(self, signature: dict[str, Any], sounds: SoundFolder | None = None) -> None:
        """Starts the journal; called before anything is written. sounds: the files that OUTPUT names."""

    def entry(self, number: int) -> Entry | None:
        """Returns the record of a line, if an earlier run has written it."""
        return None

    def write(self, entries: list[Entry]) -> None:
        """Adds a batch. Raises BrokenPipeError if the reader has closed the pipe."""
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
    """OUTPUT as a file with its journal, whose lock this run holds."""

    def __init__(self, args: BatchConfig, say: Callable[[str], None] = lambda said: None) -> None:
        """Raises InputError if OUTPUT or OUTPUT.part may not be written, or cannot be resumed. say: prints problems."""
        output = args.output
        self._args, self._output = args, output
        self._overwrite = args.overwrite or args.retry_failed
        # The files of a remote OUTPUT are in the current folder.
        self._target = Path(output.rstrip("/").rpartition("/")[2] if files.is_url(output) else os.path.realpath(output))
        self._new, self._run_json = files.sibling(self._target, ".part.new"), files.sibling(self._target, ".run.json")
        self._part = Part(files.sibling(self._target, ".part"), self._count)
        self._sounds: SoundFolder | None = None
        self._lock = JournalLock(args, self._part.path, say)
        try:
            self._check()
        except BaseException:
            self.leave()
            raise

    @property
    def signature(self) -> dict[str, Any] | None:  # type: ignore[override]
        return self._part.signature

    def _check(self) -> None:
        """Reads what OUTPUT and OUTPUT.part hold. Raises InputError if this run may not continue from there."""
        retry = self._args.setting("retry_failed")
        self.completed = self._completed() if self._args.resume or retry else None
        if retry:
            self._check_complete(retry)
        if self._is_begun(retry or f"OUTPUT {self._output}"):
            self._part.load(self._args.setting("resume"))
            if self._is_replaced():
                self._part.discard()
                self.failed = None if self.failed is None else frozenset()
            elif not retry:
                self.completed = None
        if self._exists() and not self._overwrite and self.completed is None:
            unknown = "; its run is unknown, or it was changed since" if self._args.resume else ""
            raise InputError(f"{self._is_there()}{unknown}")

    def _check_complete(self, retry: str) -> None:
        """Fills `failed`. Raises InputError if OUTPUT is not that of a complete run."""
        if not self._exists():
            resumes = f"accepted: {self._args.named('resume', True)} completes it"
            raise InputError(f"{retry}: OUTPUT {self._output} is not complete ({resumes})")
        completed, run_json = self.completed, self._run_json.name
        if completed is None or len(completed["failed"]) != completed["failures"]:
            why = f"OUTPUT {self._output} was changed since its run, or {run_json} does not list its failed lines"
            raise InputError(f"{retry}: {why} (accepted: an unchanged OUTPUT with its {run_json})")
        self.failed = frozenset(completed["failed"])

    def _is_begun(self, what: str) -> bool:
        """Whether there is a journal. Raises InputError if there is one, but the run does not resume it."""
        is_there = os.path.lexists(self._part.path)
        if is_there and not self._args.resume:
            hint = f"{self._args.named('resume', True)} resumes it; remove it to start again"
            raise InputError(f"{what}: {self._part.path} already exists ({hint})")
        return is_there

    def _is_replaced(self) -> bool:
        """Whether the journal's run was killed after it had renamed OUTPUT."""
        signature, completed = self.signature or {}, self.completed or {}
        if self.failed is None:
            return completed.get("signature") == signature
        return signature.get(CONTENT) == _content(completed.get("before", {}))

    def check(self, signature: dict[str, Any]) -> bool:
        signature = self._signed(signature)
        completed = self.completed
        if self.failed is not None and completed is not None:
            self._check_records(completed["signature"], signature)
        if self.signature is not None and (changes := differences(self.signature, signature)):
            path = self._part.path
            text = f"{self._args.setting('resume')}: {path} was made differently: {'; '.join(changes)}"
            raise InputError(f"{text} (accepted: as it was; remove {path} to start again)")
        if self.failed is not None or completed is None:
            return self.failed == frozenset()
        changes = differences(completed["signature"], signature)
        if changes and not self._overwrite:
            raise InputError(f"{self._is_there()}; it was made differently: {'; '.join(changes)}")
        return not changes

    def _signed(self, signature: dict[str, Any]) -> dict[str, Any]:
        """Returns the signature of the journal: that of a retry also identifies its OUTPUT."""
        return signature if self.failed is None else signature | {CONTENT: _content(self.completed or {})}

    def _check_records(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        """Fills `changes`. Raises InputError if a retry would have other lines, or other forms of records."""
        names = sorted({*old, *new} - {CONTENT})
        of_records = {*map(self._args.named, names_of(affects=RECORDS))}
        same = [name for name in names if name in of_records or name.startswith(("INPUT", "MODEL"))]
        changes, self.changes = (
            tuple(differences(*({name: run[name] for name in some if name in run} for run in (old, new))))
            for some in (same, names)
        )
        if changes:
            why = f"OUTPUT {self._output} was made differently: {'; '.join(changes)}"
            raise InputError(f"{self._args.setting('retry_failed')}: {why} (accepted: as it was)")

    def begin(self, signature: dict[str, Any], sounds: SoundFolder | None = None) -> None:
        self.check(signature)
        self._part.begin(self._signed(signature))
        self._sounds = sounds
        if sounds is not None:
            sounds.begin(resumes=self.records > 0)

    def entry(self, number: int) -> Entry | None:
        return self._part.entry(number)

    def write(self, entries: list[Entry]) -> None:
        """Adds a batch: all of it or, with an OSError, nothing."""
        self._lock.check()
        self._part.write(entries)

    def complete(self) -> None:
        """Writes the records of the journal, with a retry into those of OUTPUT, and removes the journal.

        Raises RunError if all inputs failed.
        """
        if self.failures and not self.generated and self.failed is None:
            raise RunError(f"every input failed ({self.failures}), so no OUTPUT is written")
        failed = self._part.failed
        run_json: dict[str, Any] = {"signature": self.signature, "records": self.records, "lines": self._part.ranges()}
        sources: list[Numbered] = [self._part.numbered()]
        if self.failed is not None and self.completed is not None:
            run_json = {name: value for name, value in self.completed.items() if name != "before"}
            retry = {"lines": len(self.failed), "changes": self.changes}
            run_json |= {"retries": [*run_json.get("retries", ()), retry], "before": dict(run_json)}
            sources.append(numbered(self.completed, self._output))
            failed = failed & self.failed
        self.put_together(in_order(*sources), run_json | {"failures": len(failed), "failed": sorted(failed)})

    def put_together(self, records: Numbered, run_json: dict[str, Any]) -> None:
        """Writes all records to OUTPUT, next to its OUTPUT.run.json, and removes the journal.

        After an OSError the journal is kept for --resume. Raises InputError if an OUTPUT has appeared that may not be
        replaced.
        """
        self._lock.check()
        if self._exists() and not self._overwrite:
            resume = self._args.named("resume", True)
            raise InputError(f"{self._is_there()}, with {resume}; all records are in {self._part.path}")
        try:
            digest = self._write_new(self._new, records)
            files.write_whole(self._run_json, json.dumps(run_json | {"sha256": digest}, indent=1).encode())
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
        self.records, self.failures = run_json["records"], run_json["failures"]

    def leave(self, resumable: bool = True) -> str:
        """Keeps the journal, or, if no run can resume it, its sorted records; removes a journal of failures only.

        Returns a line about what is kept. resumable: whether INPUT can be read again.
        """
        left, part = "", self._part
        if self._lock.is_lost:
            part.close()
        elif part.is_open and not self.generated:
            self._discard()
            if self._sounds is not None:
                self._sounds.discard()
        elif part.is_open and resumable:
            part.cut()
            part.close()
            done = f"{counted(self.records, 'complete line')} in {part.path}"
            left = f"{done}; the same run with {self._args.named('resume', True)} resumes after that"
        elif part.is_open:
            path = files.sibling(self._target, ".incomplete")
            self._write_new(path, part.numbered())
            self._discard()
            left = f"{counted(self.records, 'record')} in {path}; INPUT can be read only once, so no run can resume"
        self._lock.release()
        return left

    def _write_new(self, path: Path, records: Numbered) -> str:
        """Writes records to a file, compressed by OUTPUT's name; returns its SHA-256."""
        with files.named(path):
            with path.open("wb") as file, files.packed(file, self._output, "wb") as packed:
                for _, record in records:
                    packed.write(record)
            with path.open("rb") as written:
                os.fsync(written.fileno())
                return files.sha256(written)

    def _discard(self) -> None:
        self._part.discard()
        self._new.unlink(missing_ok=True)

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
            completed = next(
                (version for version in versions if version and version["sha256"] == digest and "lines" in version),
                None,
            )
            # Shards of earlier versions have the failures of each line, by its number as text.
            return completed and completed | {"failed": sorted(map(int, completed["failed"]))}
        return None

    def _is_there(self) -> str:
        overwrite = self._args.named("overwrite", True)
        return f"OUTPUT {self._output} already exists (accepted: another name, or {overwrite} to replace it)"


def _content(run_json: dict[str, Any]) -> str:
    return DIGEST + run_json.get("sha256", "")


def numbered(run_json: dict[str, Any], output: str) -> Iterator[tuple[int, bytes]]:
    """Yields the records of a complete OUTPUT with the numbers of their lines."""
    numbers = chain.from_iterable(range(first, last + 1) for first, last in run_json["lines"])
    return ((number, line + b"\n") for number, line in zip(numbers, files.raw_lines("OUTPUT", output)))


def in_order(*sources: Numbered) -> Iterator[tuple[int, bytes]]:
    """Yields the records of all sources by number; of several for one line, that of the first source."""
    last = 0
    for number, record in merge(*sources, key=itemgetter(0)):
        if number != last:
            yield number, record
        last = number
