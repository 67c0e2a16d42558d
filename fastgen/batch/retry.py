"""--retry_failed: generates the failed lines of a complete OUTPUT again, and replaces their records in it.

    OUTPUT.run.json   which lines failed, and where in OUTPUT their records are: in text nothing else marks them
    OUTPUT.part       the journal of these lines alone, which --resume resumes
    OUTPUT            the old records with the new ones in their places; it appears completely or not at all

OUTPUT keeps the signature of its run, by which --resume and --merge recognise it.

Tests: tests/batch/test_retry.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fastgen.batch import files
from fastgen.batch.config import RECORDS, names_of
from fastgen.batch.errors import InputError
from fastgen.batch.journal import Journal
from fastgen.batch.signature import DIGEST, differences

if TYPE_CHECKING:
    from fastgen.batch.audio import SoundFolder

CONTENT = "OUTPUT's content"  # in the signature of the journal


class Retry(Journal):
    """The journal OUTPUT.part for the failed lines of OUTPUT."""

    failed: dict[int, int]
    completed: dict[str, Any]

    def _check(self) -> None:
        self._overwrite = True  # after all records are written
        self._asked = self._args.setting("retry_failed")
        run_json = self._run_json.name
        completed = self._completed()
        if not self._exists():
            resumes = f"accepted: {self._args.named('resume', True)} completes it"
            raise InputError(f"{self._asked}: OUTPUT {self._output} is not complete ({resumes})")
        if completed is None or len(completed.get("failed", ())) != completed["failures"]:
            why = f"OUTPUT {self._output} was changed since its run, or {run_json} does not list its failed lines"
            raise InputError(f"{self._asked}: {why} (accepted: an unchanged OUTPUT with its {run_json})")
        self.completed = completed
        self.failed = {int(number): place for number, place in completed["failed"].items()}
        if self._is_begun(self._asked):
            self._load()
            if (self.signature or {}).get(CONTENT) == _content(completed.get("before", {})):
                self.path.unlink()  # killed after OUTPUT was renamed
                self.signature = None
                self.failed = {}

    def check(self, signature: dict[str, Any]) -> bool:
        """Returns whether there is no line to retry. Raises InputError if records would have other lines or forms."""
        signature = signature | {CONTENT: _content(self.completed)}
        runs = (self.completed["signature"], signature)
        names = sorted({name for each in runs for name in each} - {CONTENT})
        of_records = {*map(self._args.named, names_of(affects=RECORDS))}
        same = [name for name in names if name in of_records or name.startswith(("INPUT", "MODEL"))]
        if changes := differences(*({name: each[name] for name in same if name in each} for each in runs)):
            why = f"OUTPUT {self._output} was made differently: {'; '.join(changes)}"
            raise InputError(f"{self._asked}: {why} (accepted: as it was)")
        self.changes = tuple(differences(*({name: each[name] for name in names if name in each} for each in runs)))
        self._check_journal(signature)
        return not self.failed

    def begin(self, signature: dict[str, Any], sounds: SoundFolder | None = None) -> None:
        super().begin(signature | {CONTENT: _content(self.completed)}, sounds)

    def complete(self, records: Iterable[bytes] | None = None, failed: dict[int, int] | None = None) -> None:
        """Puts the new records into OUTPUT."""
        still_failed = {number: place for number, place in self.failed.items() if number in self._failed}
        super().complete(self._in_place(), still_failed)
        self.records, self.failures = self.completed["records"], len(still_failed)

    def _completes(self, digest: str, failed: dict[int, int]) -> dict[str, Any]:
        """Returns the new OUTPUT.run.json, with the old one in it, which is valid until OUTPUT is replaced."""
        before = {name: value for name, value in self.completed.items() if name != "before"}
        retries = [*before.get("retries", ()), {"lines": len(self.failed), "changes": self.changes}]
        now = {"sha256": digest, "failures": len(failed), "failed": failed, "retries": retries}
        return before | now | {"before": before}

    def _in_place(self) -> Iterator[bytes]:
        """Yields the records of OUTPUT, with the new ones of lines that had failed."""
        numbers = {place: number for number, place in self.failed.items()}
        for place, line in enumerate(files.raw_lines("OUTPUT", self._output)):
            entry = self.entry(numbers[place]) if place in numbers else None
            yield line + b"\n" if entry is None else entry.data


def _content(run_json: dict[str, Any]) -> str:
    return DIGEST + run_json.get("sha256", "")
