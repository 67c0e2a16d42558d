"""OUTPUT.part, which holds whole records while a run goes on, and gets its name when it is complete.

A run may be killed at any moment. What then lies there is one of these, and PartFile.resume goes on from each:

    OUTPUT.part, empty                a run that had no record; what else is there is of no use
    OUTPUT.part, OUTPUT.part.json     records, and how many of them count, what they were made of and the run's state
    OUTPUT, OUTPUT.run.json           a run that was complete, and the signature and digest by which that is seen
    and OUTPUT.part.json              of one that was killed just then; the next run clears it away

An OUTPUT that is there is replaced only where the user says so (`overwrite`), by a run that is complete.

OUTPUT.gz is compressed when it is complete: OUTPUT.gz.part is not, so that it can be read, cut and gone on with. A run
that was killed between the two leaves both; --resume finds it complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import AbstractContextManager
from gzip import GzipFile
from io import FileIO
from pathlib import Path
from typing import Any

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.files.whole_file import (
    BLOCK,
    beside,
    is_gzip,
    named,
    replace,
    resolved,
    sha256,
    write_all,
)
from fastgen.cli.transformers.resume.differences import differences
from fastgen.cli.transformers.resume.locked_file import open_locked

WRITTEN_BY = "fastgen"
ENDS = (".part", ".part.json", ".run.json")


class PartFile(AbstractContextManager):
    """Whole records in OUTPUT.part, a prefix of what OUTPUT will be. A record is one line with its end.

    Leaving its context keeps the records for `resume`, unless it is complete.
    """

    def __init__(self, path: Path, file: FileIO, signature: dict[str, Any], overwrite: bool) -> None:
        """Use `create` or `resume`."""
        self.records = 0  # how many are in the part
        self.state: Any = None  # what `resume` found of `keep_state`
        self._output, self._part, self._kept, self._made = _files(path)
        self._file = file
        self._signature = signature
        self._overwrite = overwrite
        self._compressed = is_gzip(path)
        self._end = 0  # of the last record, in bytes

    @classmethod
    def create(cls, path: Path, signature: dict[str, Any], overwrite: bool = False) -> PartFile:
        """A part without records; raises InputError where there is one already, or an OUTPUT that it may not replace.

        signature: JSON values, all that decides what the records are. Its keys are how `resume` names them.
        """
        check_part(path, resume=False, overwrite=overwrite)
        try:
            _files(path)[1].touch(exist_ok=False)
        except FileExistsError:
            check_part(path, resume=False, overwrite=overwrite)  # another run has just begun one
            raise
        return cls.resume(path, signature, overwrite)

    @classmethod
    def resume(cls, path: Path, signature: dict[str, Any], overwrite: bool = False) -> PartFile:
        """The part that a run left, cut to the records of its last state; where there is none, as `create`.

        Raises InputError that names every difference between the signature of that run and this one.
        """
        file = open_locked(_files(path)[1])
        if file is None:
            return cls.create(path, signature, overwrite)
        part = cls(path, file, signature, overwrite)
        size = os.fstat(file.fileno()).st_size
        try:
            if size:
                part._take_up(size)
            else:
                part._remove_others()  # what is left of a run that was killed when it was complete
                part.keep_state(None)
        except BaseException:
            file.close() if size else part.leave()
            raise
        return part

    def write(self, data: bytes, records: int) -> None:
        """Adds whole records: all of them or, with an OSError, none."""
        if data.count(b"\n") != records or data[-1:] not in (b"", b"\n"):
            raise ValueError(f"{records} records are {records} whole lines, not {data[-80:]!r}")
        try:
            with named(self._part):
                write_all(self._file.fileno(), data)
        except BaseException:
            self._cut()
            raise
        self.records += records
        self._end += len(data)

    def keep_state(self, state: Any) -> None:
        """Keeps a JSON value that `resume` finds as `.state`, and the present records as those that it goes on after.

        Records that are written later count from the next call on.
        """
        content = {"signature": self._signature, "records": self.records, "bytes": self._end, "state": state}
        _replace(self._kept, content)

    def complete(self, failures: int = 0) -> None:
        """Gives the file its name. With an OSError it keeps the other one, and everything for `resume`.

        failures: how many of the records are of inputs that failed, for `failures_if_complete`.
        Raises InputError where an OUTPUT has appeared in the meantime that it may not replace.
        """
        if not self._overwrite and os.path.lexists(self._output):
            raise InputError(f"{_is_there(self._output)}, with --resume; all records are in {self._part}")
        with named(self._part):
            os.fsync(self._file.fileno())
        whole = self._compress() if self._compressed else self._part
        with named(whole), whole.open("rb", buffering=0) as file:
            _replace(self._made, {"signature": self._signature, "failures": failures, "sha256": sha256(file)})
        self._close_on_windows()
        os.replace(whole, self._output)
        self._part.unlink(missing_ok=True)
        self._remove_others()
        self._file.close()

    def leave(self) -> None:
        """Keeps the part for `resume`, or removes it where it has no record."""
        try:
            if self.records:
                self._cut()
            else:
                self._close_on_windows()
                self._remove_others()
                self._part.unlink(missing_ok=True)
        finally:
            self._file.close()

    def __exit__(self, *error: object) -> None:
        if not self._file.closed:
            self.leave()

    def _take_up(self, size: int) -> None:
        """Compares, and gives up what is behind the last state; `size` is that of the part."""
        part, again = self._part, f"remove {self._part} to start again)"
        kept = _load(self._kept)
        if kept is None:
            raise InputError(f"--resume: {self._kept}, which says what {part} was made of, is missing ({again}")
        if changes := differences(kept.get("signature"), self._signature):
            raise InputError(
                f"--resume: {part} was made differently: {'; '.join(changes)} (accepted: as it was; {again}"
            )
        try:
            self.records, self._end, self.state = int(kept["records"]), int(kept["bytes"]), kept["state"]
        except (KeyError, TypeError, ValueError) as error:
            raise _not_ours(self._kept) from error
        if self._end > size:
            raise InputError(
                f"--resume: {part} has {size} bytes, but had {self._end} when {self._kept} was written ({again}"
            )
        self._cut()

    def _cut(self) -> None:
        """Behind the last record that counts."""
        with named(self._part):
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def _compress(self) -> Path:
        """The records as a file of gzip, the same bytes for the same records."""
        new = beside(self._part, ".new")
        self._file.seek(0)
        with named(new), new.open("wb") as file:
            with GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as compressed:
                shutil.copyfileobj(self._file, compressed, BLOCK)
            file.flush()
            os.fsync(file.fileno())
        return new

    def _remove_others(self) -> None:
        for path in (beside(self._part, ".new"), beside(self._kept, ".new"), self._kept):
            path.unlink(missing_ok=True)

    def _close_on_windows(self) -> None:
        """Where files that are open can neither be renamed nor removed. Elsewhere it is closed last, for its lock."""
        if os.name == "nt":
            self._file.close()


def check_writable(flag: str, path: Path, sources: dict[str, Path | None]) -> None:
    """Raise InputError where `path` cannot be written, or where writing it would destroy one of the other files."""
    try:
        if path.is_dir():
            raise InputError(f"{flag} {path}: is a folder (accepted: a file)")
        if path.exists() and (not path.is_file() or path.absolute().parts[1:2] in (("dev",), ("proc",))):
            raise InputError(f"{flag} {path}: is a device or a pipe (accepted: a file, and - as OUTPUT)")
        if not path.parent.is_dir():
            raise InputError(f"{flag} {path}: there is no folder {path.parent}")
        target, *ways = _files(path)
        for other_flag, other in sources.items():
            if other is not None and resolved(other) == target:
                raise InputError(f"{flag} {path}: is the same file as {other_flag}")
            if other is not None and resolved(other) in ways:
                raise InputError(f"{flag} {path}: would be written by way of {other}, which is {other_flag}")
        # As long as the longest name that is written there.
        with tempfile.NamedTemporaryFile(prefix=f"{target.name}.part.", dir=target.parent):
            pass
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written ({error.strerror})") from error


def check_part(path: Path, resume: bool, overwrite: bool = False) -> None:
    """Raises InputError where PartFile.resume or, without `resume`, create would do so whatever the signature is.

    With `resume` an OUTPUT passes that a run has completed: `failures_if_complete` tells whether it was the same run.
    """
    output, part, *others = _files(path)
    for other in others:
        _load(other)
    if (resume or part.is_file()) and (file := open_locked(part)) is not None:  # not if another run is writing to it
        file.close()
    if not resume and os.path.lexists(part):
        raise InputError(f"OUTPUT {path}: there is {part} (--resume goes on from it; remove it to start again)")
    if os.path.lexists(output) and not overwrite:
        if not resume:
            raise InputError(_is_there(path))
        if _made(path) is None:
            raise InputError(f"{_is_there(path)}; no run is known that made it as it is")


def failures_if_complete(path: Path, signature: dict[str, Any], overwrite: bool) -> int | None:
    """Of how many inputs the run failed that has completed OUTPUT with this signature; None where there was none.

    Where there was one, --resume has nothing to do. Raises InputError that names every difference where OUTPUT is that
    of another run and may not be replaced.
    """
    goes_on = os.path.lexists(_files(path)[1]) and not is_gzip(path)
    made = None if goes_on else _made(path)
    if made is None:
        return None
    changes = differences(made.get("signature"), signature)
    if changes and not overwrite:
        raise InputError(f"{_is_there(path)}; it was made differently: {'; '.join(changes)}")
    return None if changes else made.get("failures", 0)


def _made(path: Path) -> dict[str, Any] | None:
    """What is kept of the run that completed OUTPUT; None where it is not known, or OUTPUT was changed since."""
    output, _, _, made_file = _files(path)
    made = _load(made_file)
    if made is None or not output.is_file():
        return None
    with FileIO(output) as file:
        return made if sha256(file) == made.get("sha256") else None


def _is_there(path: Path) -> str:
    return f"OUTPUT {path}: is there already (accepted: another name, or --overwrite to replace it)"


def _files(path: Path) -> list[Path]:
    """OUTPUT, or what it points to where it is a link, and what is beside it, as in ENDS."""
    output = resolved(path)
    return [output, *(beside(output, end) for end in ENDS)]


def _not_ours(path: Path) -> InputError:
    return InputError(f"{path}: is damaged, or is no file of this command (remove it, and a .part to start again)")


def _replace(path: Path, content: dict[str, Any]) -> None:
    new = beside(path, ".new")
    new.unlink(missing_ok=True)  # of a run that was killed while it wrote it
    replace(path, json.dumps({"written_by": WRITTEN_BY} | content, ensure_ascii=False, indent=1).encode(), new)


def _load(path: Path) -> dict[str, Any] | None:
    """What _replace has written there; None where there is nothing."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("written_by") != WRITTEN_BY:
        raise _not_ours(path)
    return content
