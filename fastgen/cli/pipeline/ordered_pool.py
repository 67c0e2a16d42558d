"""Worker processes whose results are handed on in the order of their tasks, while the caller does something else.

    with OrderedPool(start, write, workers=4) as pool:
        for batch in batches:
            pool.submit(batch)      # waits while too much is unfinished
    # here everything is written, or the first error was raised

The caller's thread only appends to a queue. A second thread of the same process gives tasks to idle workers, receives
results and calls `write`, so `write` is never called twice at once.

Each worker has a connection of its own. A queue that workers share has a lock, and a worker that is killed while it
holds that lock would leave all others waiting for ever.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from fastgen.cli.pipeline.interrupt import SIGNALS
from fastgen.cli.pipeline.worker import END, Failed, serve

_WAITING = object()
SECONDS_TO_END = 0.5


class WorkerError(Exception):
    """A task raised, or a worker ended before its task was done. The message is one line."""


class WorkerTraceback(Exception):
    """The cause of a WorkerError: where in the worker's program it was raised."""


def worker_error(failed: Failed) -> WorkerError:
    """What is raised for a task that failed."""
    error = WorkerError(failed.message)
    error.__cause__ = WorkerTraceback(failed.details) if failed.details else None
    return error


@dataclass(eq=False)
class _Item:
    """One place in the order: what is to be done, and then what came of it."""

    task: Any = None
    result: Any = _WAITING


@dataclass(eq=False)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    item: _Item | None = None  # what it is working on


class OrderedPool:
    """`workers` processes that are forked at once, so that they hold what the program holds then and nothing later.

    start: called in each worker; returns the function that turns a task into a result. Both must be picklable.
    write: called with each task and its result, and with None and what was given to `put`, in order.
    limit: how many tasks and results may be unfinished before `submit` and `put` wait.
    """

    def __init__(
        self, start: Callable[[], Callable[[Any], Any]], write: Callable[[Any, Any], None], *, workers: int, limit: int
    ) -> None:
        self.busy_seconds = 0.0  # that all workers together spent on their tasks
        self._write = write
        self._limit = limit
        self._changed = threading.Condition()
        self._items: deque[_Item] = deque()  # all that is not written yet, in order
        self._todo: deque[_Item] = deque()  # those that no worker has
        self._closing = self._stopped = False
        self._error: BaseException | None = None
        self._wake_read, self._wake_write = multiprocessing.Pipe(duplex=False)
        self._workers: list[_Worker] = []
        for number in range(workers):
            self._workers.append(self._fork(number, start))
        self._thread = threading.Thread(target=self._run, name="fastgen-writer", daemon=True)
        self._thread.start()

    def _fork(self, number: int, start: Callable[[], Callable[[Any], Any]]) -> _Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [ours, *(worker.connection for worker in self._workers)]
        process = context.Process(
            target=serve, args=(theirs, others, start), name=f"fastgen-worker-{number + 1}", daemon=True
        )
        # Until the worker ignores them they would raise in it what they raise here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
            # When the program ends, multiprocessing would send it a SIGTERM and wait.
            multiprocessing.util.Finalize(process, process.kill, exitpriority=1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return _Worker(process, ours)

    @property
    def pids(self) -> list[int]:
        """Of the worker processes."""
        return [worker.process.pid for worker in self._workers]

    def is_writing_here(self) -> bool:
        """Whether this is called from inside `write`, where `put` could wait for itself."""
        return threading.current_thread() is self._thread

    def submit(self, *tasks: Any) -> None:
        """Has workers do the tasks, whose results are written in this place; raises what has gone wrong so far."""
        for task in tasks:
            self._add(_Item(task=task), for_a_worker=True)
        self._wake()

    def put(self, result: Any) -> None:
        """Has `result` written in this place; raises what has gone wrong so far."""
        self._add(_Item(result=result), for_a_worker=False)
        self._wake()

    def close(self) -> None:
        """Waits until everything is written and ends the workers; raises the first error in the order of the tasks."""
        with self._changed:
            self._closing = True
        self._wake()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def kill(self) -> bool:
        """Ends the workers and gives up what is not written; False if a `write` that never returns is left behind."""
        self._stopped = True
        self._wake()
        for worker in self._workers:
            worker.process.kill()
        self._thread.join(SECONDS_TO_END)
        return not self._thread.is_alive()

    def __enter__(self) -> OrderedPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, Exception) and error is not self._error:
            # What was submitted before the caller failed is complete, and it is wanted.
            with suppress(Exception):  # the caller's own error is the one that is raised
                self.close()
        else:
            self.kill()

    def _add(self, item: _Item, for_a_worker: bool) -> None:
        """Wakes the second thread only where it has to make room: it takes the interpreter for itself."""
        if len(self._items) >= self._limit:
            self._wake()
        with self._changed:
            while len(self._items) >= self._limit and not self._over():
                self._changed.wait()
            if not self._over():
                self._items.append(item)
                if for_a_worker:
                    self._todo.append(item)
        if self._over():
            self.close()

    def _over(self) -> bool:
        return self._error is not None or self._closing

    def _wake(self) -> None:
        with self._changed:
            if not self._wake_write.closed:
                self._wake_write.send_bytes(b"")

    def _run(self) -> None:
        """The second thread: what is not waited for is done at once."""
        try:
            while not self._stopped:
                self._give_out()
                self._write_what_is_ready()
                if self._todo and not self._workers:
                    raise WorkerError("every worker process has ended")
                if self._closing and not self._items:
                    break
                self._receive()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._closing = True
                self._items.clear()
                self._todo.clear()
                self._wake_write.close()
                self._changed.notify_all()
            self._end_workers()

    def _give_out(self) -> None:
        for worker in self._workers:
            if worker.item is None and self._todo:
                worker.item = self._todo.popleft()
                try:
                    worker.connection.send(worker.item.task)
                except (BrokenPipeError, ConnectionResetError):
                    continue  # it has died, and its end of the connection says so to _receive

    def _receive(self) -> None:
        """Waits until something has happened, and takes every result that is there."""
        connections: dict[Any, _Worker] = {worker.connection: worker for worker in self._workers}
        for ready in wait([self._wake_read, *connections]):
            if ready is self._wake_read:
                self._wake_read.recv_bytes()
            else:
                self._receive_from(connections[ready])

    def _receive_from(self, worker: _Worker) -> None:
        try:
            result, seconds = worker.connection.recv()
            self.busy_seconds += seconds
        except (EOFError, ConnectionResetError, pickle.UnpicklingError):
            result = Failed(_how_it_ended(worker), "")
            self._workers.remove(worker)
        item, worker.item = worker.item, None
        if item is None:  # it had no task: it could not start, or died idle
            item = _Item()
            with self._changed:
                self._items.append(item)
        item.result = result

    def _write_what_is_ready(self) -> None:
        while self._items and self._items[0].result is not _WAITING and not self._stopped:
            item = self._items[0]
            if isinstance(item.result, Failed):
                raise worker_error(item.result)
            self._write(item.task, item.result)
            with self._changed:
                self._items.popleft()
                self._changed.notify()

    def _end_workers(self) -> None:
        """Idle workers are told to end; those in the middle of a task that nobody wants are killed.

        Closing the connection would not do: a process that the program forked in the meantime holds it open as well.
        """
        for worker in self._workers:
            if worker.item is not None or self._stopped or not _tell_to_end(worker):
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(SECONDS_TO_END)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()
        self._wake_read.close()


def _tell_to_end(worker: _Worker) -> bool:
    try:
        worker.connection.send(END)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _how_it_ended(worker: _Worker) -> str:
    worker.process.join(SECONDS_TO_END)
    status = worker.process.exitcode
    if status is not None and status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
    else:
        how = f"ended with status {status} before its work was done"
    return f"worker process {worker.process.pid} {how}"
