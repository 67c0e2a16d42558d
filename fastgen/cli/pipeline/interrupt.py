"""Ctrl-C ends a command in time, whatever it is doing; where a batch is in flight, the first one lets it finish.

Python raises KeyboardInterrupt between two of its instructions. A command that is inside one long call, or whose
library swallows the exception (a bare `except` around an optional import), would go on for as long as it likes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
SECONDS_TO_END = 1.5
# What asks a run to end. They may reach every process of a group.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """How often somebody asked the run to end, by Ctrl-C or SIGTERM."""

    def __init__(self, notice: str) -> None:
        self.requests = 0
        self.finishing = False  # set by the run while it does what the first request is to let finish
        self._notice = f"\n{notice}\n".encode()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requests += 1
        if self.requests > 1 or not self.finishing:
            raise KeyboardInterrupt
        with suppress(OSError):  # nobody may read it
            os.write(sys.stderr.fileno(), self._notice)  # print could be in the middle of printing


@contextmanager
def stoppable(notice: str) -> Iterator[Stop]:
    """While `finishing`, the first Ctrl-C or SIGTERM is only noted, and `notice` is printed; others interrupt.

    A second one ends the process within SECONDS_TO_END. Outside the main thread, which alone receives signals, nothing
    is handled.
    """
    stop = Stop(notice)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop._handle) for number in SIGNALS}
    try:
        with interruptible(after=2):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interruptible(after: int = 1) -> Iterator[None]:
    """If the process still runs SECONDS_TO_END after the `after`-th Ctrl-C inside the block, ends it and its children.

    The status is then INTERRUPTED. Outside the main thread, which alone receives signals, it does nothing.
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
                end_now()
            break
    os.close(read)


def end_now() -> None:
    """Ends this process and its children with status INTERRUPTED, without waiting for anything."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(INTERRUPTED)
