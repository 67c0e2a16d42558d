"""Threads or processes for a stage: whichever leaves the interpreter to the thread that runs the model.

Python runs one thread at a time. What a tokenizer computes outside of the interpreter can run in a thread beside the
model; what holds the interpreter would stop the model for as long as it does, and goes to another process. Which of the
two it is differs between tokenizers, their methods and their versions, so it is measured on the first inputs of a run.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fastgen.cli.pipeline.ordered_pool import OrderedPool
from fastgen.cli.transformers.stages.ordered_threads import OrderedThreads

Workers = OrderedPool | OrderedThreads

PROBE_SECONDS = 0.05
STEP_SECONDS = 0.0005
# An idle machine wakes a thread 0.1 ms late; one that waits for the interpreter gets it after up to 5 ms.
LONGEST_WAIT_SECONDS = 0.001


def workers_for(call: Callable[[], Any]) -> type[Workers]:
    """The kind of workers for tasks like `call`, which is called for PROBE_SECONDS, at least once."""
    if not can_fork() or waits_beside(call) <= LONGEST_WAIT_SECONDS:
        return OrderedThreads
    return OrderedPool


def can_fork() -> bool:
    """Whether a process can be forked that has been using libraries; macOS's own ones do not allow it."""
    return "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"


def waits_beside(call: Callable[[], Any]) -> float:
    """How many seconds this thread waits on average to go on after a short sleep, while another one repeats `call`."""
    ended = threading.Event()
    end = time.perf_counter() + PROBE_SECONDS

    def repeat() -> None:
        try:
            call()
            while time.perf_counter() < end:
                call()
        finally:
            ended.set()

    thread = threading.Thread(target=repeat, name="fastgen-probe", daemon=True)
    waited, steps = 0.0, 0
    thread.start()
    while not ended.is_set():
        begun = time.perf_counter()
        time.sleep(STEP_SECONDS)
        waited += time.perf_counter() - begun - STEP_SECONDS
        steps += 1
    thread.join()
    return waited / max(steps, 1)
