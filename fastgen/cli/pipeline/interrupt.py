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

from fastgen.cli.errors import INTERRUPTED, TERMINATED

SECONDS_TO_END = 1.5
# What asks a run to end, and the exit status then. They may reach every process of a group.
SIGNALS: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


class Stopped(KeyboardInterrupt):
    """Of one of SIGNALS; `status` is the exit status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


class Stop:
    """How often somebody asked the run to end, by Ctrl-C or SIGTERM, and the exit status that the last one has."""

    def __init__(self, notice: str) -> None:
        self.requests, self.status = 0, INTERRUPTED
        self.finishing = False  # set by the run while it does what the first request is to let finish
        self._notice = f"\n{notice}\n".encode()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requests += 1
        self.status = SIGNALS[number]
        if self.requests > 1 or not self.finishing:
            raise Stopped(self.status)
        with suppress(OSError):  # nobody may read it
            os.write(sys.stderr.fileno(), self._notice)  # print could be in the middle of printing


@contextmanager
def stoppable(notice: str) -> Iterator[Stop]:
    """While `finishing`, the first Ctrl-C or SIGTERM is only noted, and `notice` is printed; others interrupt.

    A second one ends the process within SECONDS_TO_END. A signal that is ignored stays so: nohup and shells ask for
    that. Outside the main thread, which alone receives signals, nothing is handled.
    """
    stop = Stop(notice)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop._handle) for number in heard}
    try:
        with interruptible(after=2):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
                end_now(SIGNALS[number[0]])
            break
    os.close(read)


def end_now(status: int) -> None:
    """Ends this process with `status`, and its children, without waiting for anything."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)
