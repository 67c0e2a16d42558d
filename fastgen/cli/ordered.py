"""A thread beside the model that makes items ahead of it.

Tests: tests/cli/transformers/test_stage_threads.py
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

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
