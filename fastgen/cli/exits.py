"""The end of a command: exit statuses, the signals that request it, and a reader that leaves.

On Ctrl-C or SIGTERM a run finishes its batch in flight, and ends in time whatever it is doing. Python raises
KeyboardInterrupt between two of its instructions: without a deadline, a command inside one long call, or whose library
swallows the exception (a bare `except` around an optional import), might never end.

Tests: tests/cli/transformers/test_flags.py, tests/cli/transformers/test_ends.py,
tests/cli/fairseq/test_cli_fairseq_ends.py, tests/cli/test_reader_leaves.py
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from fastgen.batch.errors import Stop

FAILED = 1
UNUSABLE = 2
# 128 plus the number of a signal, like a shell's status of a program that the signal has killed.
INTERRUPTED = 130  # SIGINT, which is Ctrl-C
READER_GONE = 141  # SIGPIPE
TERMINATED = 143  # SIGTERM

SECONDS_TO_END = 1.5
# The signals that request an end, and the exit status then. They may reach every process of a group.
SIGNALS: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
NOTICE = b"\nfinishing the batch in flight; a second Ctrl-C or SIGTERM stops immediately\n"


@dataclass
class Signals(Stop):
    """The number of requests to end, by Ctrl-C or SIGTERM, and the exit status of the last one."""

    status: int = INTERRUPTED

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: counts the first request while `finishing`, raises KeyboardInterrupt otherwise."""
        self.requests += 1
        self.status = SIGNALS[number]
        if self.requests > 1 or not self.finishing:
            raise KeyboardInterrupt
        with suppress(OSError):  # the pipe may be closed
            os.write(sys.stderr.fileno(), NOTICE)  # print could be in the middle of printing


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """A context that exits with READER_GONE, and no message, if the reader has closed the standard output: `| head`.

    Flushes what was printed, also before an exit such as that of --help: later a broken pipe could not be caught.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is closed
                sys.stdout.flush()
    except BrokenPipeError:
        # The rest of the buffer cannot be written: the interpreter must not try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)


@contextmanager
def stoppable(*numbers: int) -> Iterator[Signals]:
    """A context that handles these signals: while `finishing`, the first one is only counted; any other interrupts.

    If the process still runs SECONDS_TO_END after an interrupting signal, it is ended with its children and the
    signal's status. Ignored signals stay ignored, for nohup and shells. Outside the main thread, which alone receives
    signals, nothing is handled.
    """
    stop = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    ended = threading.Event()
    threading.Thread(target=_watch, args=(read, ended, stop), name="fastgen-interrupt", daemon=True).start()
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    old_handlers = {number: signal.signal(number, stop.handle) for number in heard}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield stop
        ended.set()
    except Exception:
        ended.set()
        raise
    finally:
        # After KeyboardInterrupt the deadline still applies: leaving the program can hang as well.
        signal.set_wakeup_fd(wakeup)
        os.close(write)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _watch(read: int, ended: threading.Event, stop: Signals) -> None:
    """Reads the signals that arrive, one byte each, written by the signal handler itself."""
    requests = 0
    while number := os.read(read, 1):
        if number[0] not in SIGNALS:
            continue
        requests += 1
        if requests > stop.is_patient and not ended.wait(SECONDS_TO_END):
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(SIGNALS[number[0]])
    os.close(read)
