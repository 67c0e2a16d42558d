"""What workers make is handed on by one thread, in the order in which their work was given out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

SECONDS_TO_END = 0.5


class ResultsInOrder:
    """Gives every result to `write`, in a thread of its own. Besides the one that is written, `limit` may wait."""

    def __init__(self, write: Callable[..., None], limit: int) -> None:
        self._write = write
        self._error: BaseException | None = None
        self._unfinished: queue.Queue[tuple[Future, tuple[Any, ...]] | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._run, name="fastgen-writer", daemon=True)
        self._thread.start()

    def put(self, result: Future, *beside: Any) -> None:
        """Has `write` called with the result and what is beside it; waits for room, raises what went wrong so far."""
        if self._error is not None:
            raise self._error
        self._unfinished.put((result, beside))

    def is_writing_here(self) -> bool:
        """Whether this is called from inside `write`, where `put` could wait for itself."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Waits until everything is written; raises the first error in the order of the results."""
        self._unfinished.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        """Gives up what is not written, without waiting for what never ends."""
        self._error = self._error or RuntimeError("given up")
        with suppress(queue.Full):
            self._unfinished.put(None, timeout=SECONDS_TO_END)
        self._thread.join(SECONDS_TO_END)

    def _run(self) -> None:
        """After an error it goes on taking results, so that a `put` that waits for room comes back."""
        while (item := self._unfinished.get()) is not None:
            if self._error is not None:
                continue
            result, beside = item
            try:
                self._write(result.result(), *beside)
            except BaseException as error:
                self._error = self._error or error
