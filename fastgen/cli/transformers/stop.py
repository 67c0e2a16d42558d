"""The first Ctrl-C or SIGTERM lets a batch in flight finish; the second stops at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from fastgen.cli.errors import INTERRUPTED
from fastgen.cli.pipeline.interrupt import SIGNALS, interruptible


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
    numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop._handle) for number in heard}
    try:
        with interruptible(after=2):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
