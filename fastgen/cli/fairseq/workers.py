"""Worker processes that do tasks while the caller does something else; results are written in the order of the tasks.

Workers take turns. Each is behind a ThreadPoolExecutor of one thread, with a connection of its own: the processes of a
ProcessPoolExecutor share one, on which all wait for ever when one is killed while it writes a result.

Tests: tests/cli/fairseq/test_ordered_pool.py
"""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
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
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

SECONDS_TO_END = 10.0  # on a busy machine, too
SECONDS_BETWEEN_LOOKS = 1.0


class WorkerError(Exception):
    """A task raised, or a worker ended before its task was done. The message is one line."""


class OrderedPool(AbstractContextManager):
    """`workers` processes that are forked at once, so that they hold what the program holds then and nothing later.

    start: called in each worker with its place; returns the function that turns a task into a result. Results must be
        picklable.
    write: called with each result in order, by the thread that calls `submit` and `wait`.
    limit: how many tasks may be unfinished before `submit` waits.
    """

    def __init__(
        self, start: Callable[[int], Callable[[Any], Any]], write: Callable[[Any], None], *, workers: int, limit: int
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # a worker would inherit what is left in them
        # Workers keep Ctrl-C blocked: this process decides what it means.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._workers = [_Worker(partial(start, place)) for place in range(workers)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pids = [worker.process.pid for worker in self._workers]
        self._turns = itertools.cycle(self._workers)
        self._write, self._limit = write, limit
        self._unfinished: deque[Future[Any]] = deque()

    def submit(self, task: Any) -> None:
        """Has a worker do the task; raises what has gone wrong so far, of a task or of `write`."""
        worker = next(self._turns)
        self._unfinished.append(worker.thread.submit(worker.do, task))
        self.wait(self._limit)

    def wait(self, most: int = 0) -> None:
        """Writes what is done, until no more than `most` tasks are unfinished; raises the first error in order."""
        try:
            while self._unfinished and (len(self._unfinished) > most or self._unfinished[0].done()):
                self._write(self._unfinished.popleft().result())
        except BaseException:
            self._unfinished.clear()  # nothing is written behind what could not be
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Waits like `wait`, but for nothing after an interruption, or an error of a task or of `write`."""
        try:
            if kind is None or issubclass(kind, Exception):
                with suppress(*[] if kind is None else [Exception]):  # the caller's own error is the one that is raised
                    self.wait()
        finally:
            for worker in self._workers:  # those in the middle of a task, too
                worker.thread.shutdown(wait=False, cancel_futures=True)
                worker.process.kill()
                worker.process.join()


class _Worker:
    """A process that does its tasks one after the other."""

    def __init__(self, start: Callable[[], Callable[[Any], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self.thread = ThreadPoolExecutor(1, "fastgen-worker")  # which starts with the first task
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, start, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    def do(self, task: Any) -> Any:
        """The result of a task; raises WorkerError."""
        with suppress(OSError):  # it has ended, and may have said why
            self._connection.send(task)
        try:
            result, message, details = self._connection.recv()
        except (EOFError, OSError):
            self.process.join(SECONDS_TO_END)
            status = self.process.exitcode
            how = f"ended with status {status} before its work was done"
            if status is not None and status < 0:
                how = f"was ended by {signal.Signals(-status).name}"
            raise WorkerError(f"worker process {self.process.pid} {how}") from None
        if message:
            raise WorkerError(message) from RuntimeError(details)
        return result


def _serve(connection: Connection, start: Callable[[], Callable[[Any], Any]], parent: int) -> None:
    """Sends the result of each task, and no message; a message and the traceback for the first error, which ends it."""
    gc.freeze()  # a collection would write into every object that is inherited, and so copy it
    # Warnings and prints of the libraries that are used here stay out of the way of the results.
    sys.stdout = sys.stderr
    logging.basicConfig(stream=sys.stderr, format="%(message)s", force=True)
    logging.disable(logging.INFO)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        work = start()
        while True:
            connection.send((work(connection.recv()), "", ""))
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        with suppress(OSError):  # the parent may be gone
            connection.send((None, message, traceback.format_exc()))


def _end_with(parent: int) -> None:
    """Ends this process, whatever it is doing, when the parent is gone, however it ended."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)
