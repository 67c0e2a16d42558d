"""What happens before the model, ahead of it: read, tokenise, batch.

One thread reads INPUT and gives chunks of lines to workers; another takes what these return, in order, and plans
batches. Each waits when there is enough for the next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from fastgen.cli.transformers.stages.batches import Planner
from fastgen.cli.transformers.stages.items import Batch, Line, Prepared
from fastgen.cli.transformers.stages.progress import Busy

BATCHES_AHEAD = 4
CHUNKS_PER_WORKER = 4
_END = None

T = TypeVar("T")


class Ahead(Generic[T]):
    """The items of an iterator, which a thread takes from it before they are wanted: `limit`, and one in its hands.

    The thread is a daemon: one that waits for standard input does not keep the program from ending.
    """

    def __init__(self, items: Iterator[T], limit: int, name: str) -> None:
        self._items = items
        self._taken: queue.SimpleQueue[T | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(limit)
        self._stopped = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def __iter__(self) -> Iterator[T]:
        """Raises what the iterator raised, after the items that came before it."""
        while (item := self._taken.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            self._room.release()
            yield item

    def stop(self) -> None:
        """Ends the thread after the present item, and the iteration of who waits for one."""
        self._stopped = True
        self._room.release()
        self._taken.put(_END)

    def _run(self) -> None:
        try:
            for item in self._items:
                self._room.acquire()
                if self._stopped:
                    return
                self._taken.put(item)
            self._taken.put(_END)
        except BaseException as error:
            self._taken.put(error)


class Prefetcher:
    """The batches of a run, in the order in which the model is to take them.

    chunks: the lines of INPUT. prepare: what workers do with a chunk.
    """

    def __init__(
        self,
        chunks: Iterator[list[Line]],
        prepare: Callable[[list[Line]], list[Prepared]],
        workers: int,
        planner: Planner,
        busy: Busy,
    ) -> None:
        self._prepare = busy.timed("tokenise", prepare)
        self._planner = planner
        self._workers = ThreadPoolExecutor(workers, "fastgen-tokenise")
        read = busy.timed("read", lambda: next(chunks, None))
        self._tasks = Ahead(self._submitted(read), CHUNKS_PER_WORKER * workers, "fastgen-reader")
        self._batches = Ahead(self._planned(), BATCHES_AHEAD, "fastgen-planner")

    def __iter__(self) -> Iterator[Batch]:
        """Raises what stopped the stages ahead after the batches that came before it."""
        return iter(self._batches)

    def stop(self) -> None:
        """Gives up what the model has not taken."""
        self._tasks.stop()
        self._batches.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _submitted(self, read: Callable[[], list[Line] | None]) -> Iterator[tuple[list[Line], Future[list[Prepared]]]]:
        while chunk := read():
            yield chunk, self._workers.submit(self._prepare, chunk)

    def _planned(self) -> Iterator[Batch]:
        for chunk, prepared in self._tasks:
            yield from self._planner.add(chunk, prepared.result())
        yield from self._planner.rest()
