"""What runs inside a worker process: take a task, do it, send the result, until there are no more.

Nothing here may print: standard output belongs to the process that writes the results.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from fastgen.cli.pipeline.interrupt import SIGNALS

SECONDS_BETWEEN_LOOKS = 1.0
END = None  # sent instead of a task when there are no more


@dataclass(frozen=True)
class Failed:
    """What is sent instead of a result: the exception in one line, and where it came from."""

    message: str
    details: str


def serve(connection: Connection, others: list[Connection], start: Callable[[], Callable[[Any], Any]]) -> None:
    """Calls `start` for the function that does the tasks, and does those that come until END.

    others: ends of connections that this process inherited and does not need. As long as it held them, a worker on
    the far end would not see them close.
    """
    signal.set_wakeup_fd(-1)  # it is the parent's
    for number in SIGNALS:  # the parent decides what they mean
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for other in others:
        other.close()
    _log_to_stderr()
    # Not os.getppid(): the parent may be gone by now.
    parent = multiprocessing.parent_process().pid
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        work = start()
    except Exception as error:
        work = _always(failed(error))
        # Said at once, and not by ending: a connection that closes on tasks that nobody has read loses what was said.
        _answer(connection, work(None), 0.0)
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if task is END:
            sys.stderr.flush()
            os._exit(0)  # the interpreter would tidy up all that it has inherited, while the program waits for it
        begun = time.perf_counter()
        try:
            result = work(task)
        except Exception as error:
            result = failed(error)
        if not _answer(connection, result, time.perf_counter() - begun):
            return


def _end_with(parent: int) -> None:
    """Ends this process, whatever it is doing, when the parent is gone, however it ended."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _answer(connection: Connection, result: Any, seconds: float) -> bool:
    """Sends the result and how long it took; False when nobody wants it any more."""
    try:
        connection.send((result, seconds))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _always(failed: Failed) -> Callable[[Any], Failed]:
    return lambda task: failed


def failed(error: Exception) -> Failed:
    """What is sent for an exception, while it is being handled."""
    message = " ".join(str(error).split())
    return Failed(type(error).__name__ + (f": {message}" if message else ""), traceback.format_exc())


def _log_to_stderr() -> None:
    """Warnings and prints of the libraries that are used here go to stderr, out of the way of the results."""
    sys.stdout = sys.stderr
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    root.addHandler(handler)
