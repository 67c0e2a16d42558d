"""Ctrl-C and SIGTERM: a run finishes its batch in flight, and ends in time whatever it is doing.

Python raises KeyboardInterrupt between two of its instructions. A command that is inside one long call, or whose
library swallows the exception (a bare `except` around an optional import), would go on for as long as it likes.

Tests: tests/cli/transformers/test_cli_ends.py, tests/cli/fairseq/test_cli_fairseq_ends.py
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
NOTICE = b"\nfinishing the batch in flight; a second Ctrl-C or SIGTERM stops at once\n"


class Stop:
    """How often somebody asked the run to end, by Ctrl-C or SIGTERM, and the exit status that the last one has."""

    def __init__(self) -> None:
        self.requests, self.status = 0, INTERRUPTED
        self.finishing = False  # set by the run while it does what the first request is to let finish

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: notes the first request while `finishing`, raises KeyboardInterrupt(status) otherwise."""
        self.requests += 1
        self.status = SIGNALS[number]
        if self.requests > 1 or not self.finishing:
            raise KeyboardInterrupt(self.status)
        with suppress(OSError):  # nobody may read it
            os.write(sys.stderr.fileno(), NOTICE)  # print could be in the middle of printing


@contextmanager
def stoppable() -> Iterator[Stop]:
    """While `finishing`, the first Ctrl-C or SIGTERM is only noted; others interrupt.

    A second one ends the process within SECONDS_TO_END. A signal that is ignored stays so: nohup and shells ask for
    that. Outside the main thread, which alone receives signals, nothing is handled.
    """
    stop = Stop()
    numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop.handle) for number in heard}
    try:
        with interruptible(after=2):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interruptible(after: int = 1) -> Iterator[None]:
    """If the process still runs SECONDS_TO_END after the `after`-th Ctrl-C inside the block, ends it and its children.

    The status is then that of the signal. Outside the main thread it does nothing.
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
