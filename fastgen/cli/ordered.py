"""Threads beside the model: items are made ahead of it, and results are handed on in order behind it.

Tests: tests/cli/transformers/test_stage_threads.py
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

SECONDS_TO_END = 0.5
T = TypeVar("T")


class Ahead(Generic[T]):
    """The items of an iterator, which a thread takes from it before they are wanted: `limit`, and one in its hands.

    The thread is a daemon: one that waits for standard input does not keep the program from ending.
    """

    def __init__(self, items: Iterator[T], limit: int, name: str) -> None:
        self._taken: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(limit)
        self._stopped = False
        threading.Thread(target=self._run, args=(items,), name=name, daemon=True).start()

    def __iter__(self) -> Iterator[T]:
        """Raises what the iterator raised, after the items that came before it."""
        while (item := self._taken.get()) is not None and not self._stopped:
            if isinstance(item, BaseException):
                raise item
            yield item[0]

    @property
    def is_waiting(self) -> bool:
        """Whether the next item would have to be waited for."""
        return self._taken.empty()

    def stop(self) -> None:
        """Ends the thread after the present item, and the iteration of who waits for one."""
        self._stopped = True
        with suppress(queue.Empty):
            while True:
                self._taken.get_nowait()  # makes room for a thread that waits in put
        with suppress(queue.Full):
            self._taken.put_nowait(None)

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._taken.put((item,))
                if self._stopped:
                    return
            self._taken.put(None)
        except BaseException as error:
            self._taken.put(error)


class OrderedResults:
    """Gives the result of every future to `write`, in the order of `put`, in a thread of its own.

    Besides the one that is written, `limit` may wait.
    """

    def __init__(self, write: Callable[[Any], None], limit: int) -> None:
        self._write = write
        self._error: BaseException | None = None
        self._unfinished: queue.Queue[Future | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._run, name="fastgen-writer", daemon=True)
        self._thread.start()

    def put(self, result: Future) -> None:
        """Has `write` called with the result; waits for room, raises what went wrong so far."""
        if self._error is not None:
            raise self._error
        self._unfinished.put(result)

    def is_writing_here(self) -> bool:
        """Whether this is called from inside `write`, where `put` could wait for itself."""
        return threading.current_thread() is self._thread

    def wait(self) -> None:
        """Until everything is written; raises what went wrong so far."""
        self._unfinished.join()
        if self._error is not None:
            raise self._error

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
        while (result := self._unfinished.get()) is not None:
            try:
                if self._error is None:
                    self._write(result.result())
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._unfinished.task_done()
