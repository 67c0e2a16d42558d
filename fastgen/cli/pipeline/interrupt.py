"""Ctrl-C ends a command in time, whatever it is doing.

Python raises KeyboardInterrupt between two of its instructions. A command that is inside one long call, or whose
library swallows the exception (a bare `except` around an optional import), would go on for as long as it likes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastgen.cli.errors import INTERRUPTED, TERMINATED

SECONDS_TO_END = 1.5
# What asks a run to end, and the exit status then. They may reach every process of a group.
SIGNALS: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


@contextmanager
def interruptible(after: int = 1) -> Iterator[None]:
    """If the process still runs SECONDS_TO_END after the `after`-th Ctrl-C inside the block, ends it and its children.

    The status is then that of the signal. Outside the main thread, which alone receives signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    ended = threading.Event()
    threading.Thread(target=_watch, args=(read, ended, after), name="fastgen-interrupt", daemon=True).start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
        ended.set()
    except Exception:
        ended.set()
        raise
    finally:
        # After KeyboardInterrupt the clock goes on: leaving the program can hang as well.
        signal.set_wakeup_fd(before)
        os.close(write)


def _watch(read: int, ended: threading.Event, after: int) -> None:
    """Reads the signals that arrive, one byte each, written by the signal handler itself."""
    while number := os.read(read, 1):
        after -= number[0] in SIGNALS
        if after <= 0:
            if not ended.wait(SECONDS_TO_END):
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(SIGNALS[number[0]])
            break
    os.close(read)
