"""One output for all that fairseq-generate writes into it, in the same order.

The text of a batch comes from the workers, later than what the program writes by itself in the meantime: progress and
warnings of fairseq's loggers, prints of a user's plug-in. All of them go through here and wait for their turn.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from fastgen.cli.pipeline.ordered_pool import OrderedPool


class OrderedOutput:
    """A text stream over `file` whose writes take their place behind the tasks of a pool, as long as it has one."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.pool: OrderedPool | None = None

    def write(self, text: str) -> int:
        """Writes `text` when everything that was submitted before it has been written."""
        if self._is_its_turn():
            return self.file.write(text)
        self.pool.put(text)
        return len(text)

    def flush(self) -> None:
        """Whatever waits for its turn is flushed when it is written."""
        if self._is_its_turn():
            self.file.flush()

    def _is_its_turn(self) -> bool:
        return self.pool is None or self.pool.is_writing_here()

    def __getattr__(self, name: str) -> object:
        """Everything else (isatty, encoding, fileno, …) is the file's."""
        return getattr(self.file, name)

    @contextmanager
    def instead_of_its_file(self) -> Iterator[None]:
        """Prints and log handlers that write into `file` write here, if `file` is the standard output."""
        if self.file is not sys.stdout:
            yield
            return
        handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
        handlers = [handler for handler in handlers if handler.stream is self.file]
        for handler in handlers:
            handler.setStream(self)
        try:
            with contextlib.redirect_stdout(self):
                yield
        finally:
            for handler in handlers:
                handler.setStream(self.file)
