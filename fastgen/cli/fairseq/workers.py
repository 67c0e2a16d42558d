"""Worker processes whose results are handed on in the order of their tasks, while the caller does something else.

    with OrderedPool(start, write, workers=4) as pool:
        for batch in batches:
            pool.submit(batch)      # waits while too much is unfinished
    # here everything is written, or the first error was raised

Each worker has a connection of its own, and a thread waits for its answer. Workers of concurrent.futures share one
pipe: one that is killed while it writes a result would leave all others, and this process, waiting for ever.

Tests: tests/cli/fairseq/test_ordered_pool.py
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from fastgen.cli.ordered import OrderedResults
from fastgen.cli.signals import SIGNALS

SECONDS_TO_END = 10.0  # on a busy machine, too


class WorkerError(Exception):
    """A task raised, or a worker ended before its task was done. The message is one line."""


class WorkerTraceback(Exception):
    """The cause of a WorkerError: where in the worker's program it was raised."""


class _Worker:
    """A process that does one task at a time."""

    def __init__(self, start: Callable[[], Callable[[Any], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, start), daemon=True)
        # The worker keeps them blocked: this process decides what they mean.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.process.start()
            # When the program ends, multiprocessing would send it a SIGTERM and wait.
            multiprocessing.util.Finalize(self.process, self.process.kill, exitpriority=1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def do(self, task: Any) -> Any:
        """The result of a task; raises WorkerError."""
        try:
            self._connection.send(task)
            result = self._connection.recv()
        except (EOFError, OSError):
            raise WorkerError(self._how_it_ended()) from None
        if isinstance(result, Failed):
            raise WorkerError(result.message) from WorkerTraceback(result.details)
        return result

    def _how_it_ended(self) -> str:
        self.process.join(SECONDS_TO_END)
        status = self.process.exitcode
        if status is not None and status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status} before its work was done"
        return f"worker process {self.process.pid} {how}"


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
        self._workers = [_Worker(start) for _ in range(workers)]
        self._idle = deque(self._workers)
        self._threads = ThreadPoolExecutor(workers, "fastgen-worker")
        self._results = OrderedResults(write, limit)
        self.is_writing_here = self._results.is_writing_here

    @property
    def pids(self) -> list[int]:
        """Of the worker processes."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, *tasks: Any) -> None:
        """Has workers do the tasks, whose results are written in this place; raises what has gone wrong so far."""
        for task in tasks:
            self._results.put(self._threads.submit(self._do, task))

    def put(self, result: Any) -> None:
        """Has `result` written in this place; raises what has gone wrong so far."""
        done: Future = Future()
        done.set_result(result)
        self._results.put(done)

    def close(self) -> None:
        """Waits until everything is written and ends the workers; raises the first error in the order of the tasks."""
        try:
            self._results.close()
        finally:
            self._end_workers()

    def kill(self) -> None:
        """Ends the workers and gives up what is not written; a `write` that never returns is left behind."""
        self._results.kill()
        self._end_workers()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, Exception):
            # What was submitted before the caller failed is complete, and it is wanted.
            with suppress(Exception):  # the caller's own error is the one that is raised
                self.close()
        else:
            self.kill()

    def _do(self, task: Any) -> Any:
        """In one of as many threads as there are workers."""
        worker = self._idle.popleft()
        try:
            return worker.do(task)
        finally:
            self._idle.append(worker)

    def _end_workers(self) -> None:
        """Those in the middle of a task, too."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()


SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class Failed:
    """What is sent instead of a result: the exception in one line, and where it came from."""

    message: str
    details: str


def failed(error: Exception) -> Failed:
    """What is sent for an exception, while it is being handled."""
    message = " ".join(str(error).split())
    return Failed(type(error).__name__ + (f": {message}" if message else ""), traceback.format_exc())


def serve(connection: Connection, start: Callable[[], Callable[[Any], Any]]) -> None:
    """Calls `start` for the function that does the tasks, and answers each with its result.

    If `start` raises, that is the answer to every task.
    """
    gc.freeze()  # a collection would write into every object that is inherited, and so copy it
    # Warnings and prints of the libraries that are used here stay out of the way of the results.
    sys.stdout = sys.stderr
    logging.basicConfig(stream=sys.stderr, format="%(message)s", force=True)
    logging.disable(logging.INFO)
    # Not os.getppid(): the parent may be gone by now.
    parent = multiprocessing.parent_process().pid
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        work = start()
    except Exception as error:
        not_started = failed(error)
        work = lambda task: not_started  # noqa: E731
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            task = connection.recv()
            try:
                result = work(task)
            except Exception as error:
                result = failed(error)
            connection.send(result)


def _end_with(parent: int) -> None:
    """Ends this process, whatever it is doing, when the parent is gone, however it ended."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
