"""Worker threads whose results are handed on in the order of their tasks: OrderedPool without other processes.

For tasks that leave the interpreter to others while they run, and where processes cannot be forked.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fastgen.cli.pipeline.ordered_pool import WorkerError, worker_error
from fastgen.cli.pipeline.worker import Failed, failed

_END = None


class OrderedThreads:
    """`workers` threads that do tasks, and one more that calls `write` with tasks and their results, in order.

    start: returns the function that turns a task into a result; called once, so that the function must be safe to
        call in several threads at once.
    limit: how many tasks may be unfinished before `submit` waits.
    """

    def __init__(
        self, start: Callable[[], Callable[[Any], Any]], write: Callable[[Any, Any], None], *, workers: int, limit: int
    ) -> None:
        self.busy_seconds = 0.0  # that all workers together spent on their tasks
        self._work = start()
        self._write = write
        self._error: BaseException | None = None
        self._stopped = False
        self._todo: queue.SimpleQueue[tuple[Future, Any] | None] = queue.SimpleQueue()
        self._unfinished: queue.SimpleQueue[tuple[Future, Any] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(limit)
        self._workers = [self._start(self._serve, f"fastgen-worker-{number + 1}") for number in range(workers)]
        self._thread = self._start(self._run, "fastgen-writer")

    @staticmethod
    def _start(target: Callable[[], None], name: str) -> threading.Thread:
        """A daemon: a task that never ends does not keep the program from ending."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def submit(self, *tasks: Any) -> None:
        """Has workers do the tasks, whose results are written in this place; raises what has gone wrong so far."""
        for task in tasks:
            self._room.acquire()
            if self._error is not None:
                raise self._error
            if self._stopped:
                raise WorkerError("given up")
            future: Future = Future()
            self._unfinished.put((future, task))
            self._todo.put((future, task))

    def close(self) -> None:
        """Waits until everything is written; raises the first error in the order of the tasks."""
        self._end()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def kill(self) -> bool:
        """Gives up what is not written; True: a task that runs ends by itself, and nothing waits for it."""
        self._stopped = True
        self._end()
        self._room.release()  # for a `submit` that waits
        return True

    def _end(self) -> None:
        self._unfinished.put(_END)
        for _ in self._workers:
            self._todo.put(_END)

    def _serve(self) -> None:
        while (item := self._todo.get()) is not _END:
            future, task = item
            future.set_result(None if self._stopped else self._timed(task))

    def _timed(self, task: Any) -> tuple[Any, float]:
        begun = time.perf_counter()
        try:
            result = self._work(task)
        except Exception as error:
            result = failed(error)
        return result, time.perf_counter() - begun

    def _run(self) -> None:
        """After the end of the run it goes on taking results, so that a `submit` that waits for room comes back."""
        while (item := self._unfinished.get()) is not _END:
            future, task = item
            self._room.release()
            done = future.result()
            if self._stopped or self._error is not None:
                continue
            try:
                result, seconds = done
                self.busy_seconds += seconds
                if isinstance(result, Failed):
                    raise worker_error(result)
                self._write(task, result)
            except BaseException as error:
                self._error = error
