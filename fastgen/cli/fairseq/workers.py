"""Worker processes whose results are written in the order of their tasks, while the caller does something else.

    with OrderedPool(start, write, workers=4, limit=32) as pool:
        for batch in batches:
            pool.submit(batch)      # waits while too much is unfinished
    # here everything is written, or the first error was raised

Workers take turns, and each has a connection of its own, which is read in the order of the tasks. Those of
concurrent.futures share one: a worker that is killed while it writes a result leaves the others waiting for ever.

Tests: tests/cli/fairseq/test_ordered_pool.py
"""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from typing import Any

SECONDS_TO_END = 10.0  # on a busy machine, too
SECONDS_FOR_A_WRITE = 0.5
SECONDS_BETWEEN_LOOKS = 1.0
_END = object()


class WorkerError(Exception):
    """A task raised, or a worker ended before its task was done. The message is one line."""


class WorkerTraceback(Exception):
    """The cause of a WorkerError: where in the worker's program it was raised."""


class OrderedPool(AbstractContextManager):
    """`workers` processes that are forked at once, so that they hold what the program holds then and nothing later.

    start: called in each worker; returns the function that turns a task into a result. Results must be picklable.
    write: called with each result, of a task or given to `put`, in order, by one thread.
    limit: how many tasks and results may be unfinished before `submit` and `put` wait.
    """

    def __init__(
        self, start: Callable[[], Callable[[Any], Any]], write: Callable[[Any], None], *, workers: int, limit: int
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # a worker would inherit what is left in them
        # Workers keep Ctrl-C blocked: this process decides what it means.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._workers = [_Worker(start) for _ in range(workers)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pids = [worker.process.pid for worker in self._workers]
        self._turns = itertools.cycle(self._workers)
        self._write = write
        self._error: BaseException | None = None
        self._unfinished: queue.Queue[Any] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._write_results, name="fastgen-writer", daemon=True)
        self._thread.start()

    def submit(self, task: Any) -> None:
        """Has a worker do the task, whose result is written in this place; raises what has gone wrong so far."""
        worker = next(self._turns)
        with suppress(OSError):  # it has ended, which is raised in the place of its result
            worker.connection.send(task)
        self.put(worker)

    def put(self, result: Any) -> None:
        """Has `result` written in this place; waits for room, raises what has gone wrong so far."""
        self._raise_error()
        self._unfinished.put(result)

    def is_writing_here(self) -> bool:
        """Whether this is called from inside `write`, where `put` could wait for itself."""
        return threading.current_thread() is self._thread

    def wait(self) -> None:
        """Until everything is written; raises the first error in the order of the tasks."""
        self._unfinished.join()
        self._raise_error()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Waits like `wait`, or, after an interruption, for nothing: a `write` that never returns is left behind."""
        waits = kind is None or issubclass(kind, Exception)
        try:
            if not waits:
                self._error = self._error or RuntimeError("given up")
            with suppress(queue.Full):
                self._unfinished.put(_END, timeout=None if waits else SECONDS_FOR_A_WRITE)
            self._thread.join(None if waits else SECONDS_FOR_A_WRITE)
        finally:
            self._end_workers()
        if kind is None:  # otherwise the caller's own error is the one that is raised
            self._raise_error()

    def _write_results(self) -> None:
        """In a thread. After an error it goes on taking results, so that a `put` that waits for room comes back."""
        while (result := self._unfinished.get()) is not _END:
            try:
                if self._error is None:
                    self._write(result.receive() if isinstance(result, _Worker) else result)
            except BaseException as error:
                self._error = self._error or error
                self._end_workers()  # `submit` must not wait for one whose results are not received any more
            finally:
                self._unfinished.task_done()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _end_workers(self) -> None:
        """Those in the middle of a task, too."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()


class _Worker:
    """A process that does its tasks one after the other."""

    def __init__(self, start: Callable[[], Callable[[Any], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, start, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """The result of the first task whose result was not received; raises WorkerError."""
        try:
            result, message, details = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(SECONDS_TO_END)
            status = self.process.exitcode
            how = f"ended with status {status} before its work was done"
            if status is not None and status < 0:
                how = f"was ended by {signal.Signals(-status).name}"
            raise WorkerError(f"worker process {self.process.pid} {how}") from None
        if message is not None:
            raise WorkerError(message) from WorkerTraceback(details)
        return result


def _serve(connection: Connection, start: Callable[[], Callable[[Any], Any]], parent: int) -> None:
    """Sends the result of each task, the message None and no details; those of the first error, which ends it."""
    gc.freeze()  # a collection would write into every object that is inherited, and so copy it
    # Warnings and prints of the libraries that are used here stay out of the way of the results.
    sys.stdout = sys.stderr
    logging.basicConfig(stream=sys.stderr, format="%(message)s", force=True)
    logging.disable(logging.INFO)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        work = start()
        while True:
            connection.send((work(connection.recv()), None, ""))
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        with suppress(OSError):  # the parent may be gone
            connection.send((None, message, traceback.format_exc()))


def _end_with(parent: int) -> None:
    """Ends this process, whatever it is doing, when the parent is gone, however it ended."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
