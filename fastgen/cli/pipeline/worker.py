"""What runs inside a worker process: take a task, do it, send the result, until it is killed.

Nothing here may print: standard output belongs to the process that writes the results.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

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
