"""OUTPUT -: records on standard output, and nothing else."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

from fastgen.cli.errors import InputError
from fastgen.cli.transformers.files.whole_file import named, write_all


class StandardOutput(AbstractContextManager):
    """In the place of a PartFile. Until the end, whatever else is written to standard output goes to standard error.

    That holds for libraries written in C as well, and for processes that are started meanwhile.
    """

    state = None

    def __init__(self) -> None:
        self.records = 0
        if sys.stdout is None:
            raise InputError("OUTPUT -: standard output is closed")
        self._stdout = sys.stdout
        self._stdout.flush()
        self._descriptor = os.dup(1)
        sys.stdout = sys.stderr
        os.dup2(2, 1)

    def write(self, data: bytes, records: int) -> None:
        """Writes whole records; raises BrokenPipeError when nobody reads them any more."""
        with named("standard output"):
            write_all(self._descriptor, data)
        self.records += records

    def keep_state(self, state: dict[str, Any]) -> None:
        """Does nothing: what has been read from standard output cannot be gone on from."""

    def complete(self, failures: int = 0) -> None:
        """Gives standard output back."""
        self.leave()

    def leave(self) -> None:
        """Gives standard output back."""
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # what C has printed in the meantime is in its buffer
        os.dup2(self._descriptor, 1)
        os.close(self._descriptor)
        self._descriptor = -1
        sys.stdout = self._stdout

    def __exit__(self, *error: object) -> None:
        if self._descriptor != -1:
            self.leave()
