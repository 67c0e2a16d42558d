"""What runs inside a worker process: take a task, do it, send the result, until there are no more.

Nothing here may print: standard output belongs to the process that writes the results.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides what it means
    for other in others:
        other.close()
    _log_to_stderr()
    parent = os.getppid()
    try:
        work = start()
    except Exception as error:
        work = _always(_failed(error))
        # Said at once, and not by ending: a connection that closes on tasks that nobody has read loses what was said.
        _answer(connection, work(None))
    while _wait_for_task(connection, parent):
        try:
            task = connection.recv()
        except EOFError:
            return
        if task is END:
            sys.stderr.flush()
            os._exit(0)  # the interpreter would tidy up all that it has inherited, while the program waits for it
        try:
            result = work(task)
        except Exception as error:
            result = _failed(error)
        if not _answer(connection, result):
            return


def _wait_for_task(connection: Connection, parent: int) -> bool:
    """True when there is something to read; False when the parent is gone, however it ended."""
    while not connection.poll(SECONDS_BETWEEN_LOOKS):
        if os.getppid() != parent:
            return False
    return True


def _answer(connection: Connection, result: Any) -> bool:
    """Sends the result; False when nobody wants it any more."""
    try:
        connection.send(result)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _always(failed: Failed) -> Callable[[Any], Failed]:
    return lambda task: failed


def _failed(error: Exception) -> Failed:
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
