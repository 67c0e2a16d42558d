"""What happens behind the model: tokens become records in workers, which are written in the order of INPUT."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from fastgen.cli.transformers.resume.run_state import RunState
from fastgen.cli.transformers.stages.choice import Workers
from fastgen.cli.transformers.stages.items import Finished, Generated
from fastgen.cli.transformers.stages.progress import Progress

TASKS_PER_WORKER = 8
# What is written after the last state is written again by a run that goes on after a kill.
SECONDS_BETWEEN_STATES = 1.0

# Makes, in a worker, the function that turns tokens into records there.
MakeFinish = Callable[[], Callable[[Generated], Finished]]


# What workers get, with what stays beside it.
Task = tuple[Generated, RunState | None]


class Output(Protocol):
    """Where records go: a part file or the standard output."""

    records: int

    def write(self, data: bytes, records: int) -> None:
        """Adds whole records."""

    def keep_state(self, state: bytes) -> None:
        """Keeps what a run that goes on after the present records has to start with."""


class Writer:
    """Takes what the model generates and writes it.

    make_finish: what workers do; `kind` says where they run. first: the number of the first line to be written.
    failures: of the records that were there before. in_order: batches hold the lines as they stand in INPUT, so that
        where one ends is where another run can go on with the same batches.
    """

    def __init__(
        self,
        make_finish: MakeFinish,
        kind: type[Workers],
        workers: int,
        output: Output,
        progress: Progress,
        first: int,
        failures: int,
        in_order: bool,
    ) -> None:
        self.writing_seconds = 0.0
        self._output = output
        self._progress = progress
        self._next = first
        self._early: dict[int, bytes] = {}  # records whose turn has not come, by line number
        self._failed: set[int] = set()  # those of `_early`
        self._state: RunState | None = None  # to go on with after what is written, and not kept yet
        self._kept = time.monotonic()
        self._failures = failures
        self._in_order = in_order
        self._pool = kind(
            partial(_finishing, make_finish), self._write, workers=workers, limit=TASKS_PER_WORKER * workers
        )

    @property
    def finishing_seconds(self) -> float:
        """Of all workers together."""
        return self._pool.busy_seconds

    def submit(self, generated: Generated, state: RunState | None) -> None:
        """Waits while too much is unfinished; raises what went wrong so far.

        state: to go on with after these records; None for a part of a batch. Failures are counted here.
        """
        self._pool.submit((generated, state))

    def close(self) -> None:
        """Waits until everything is written whose turn has come."""
        self._pool.close()
        self._keep_state()

    def kill(self) -> None:
        """Gives up what is not written."""
        self._pool.kill()

    def _write(self, task: Task, finished: Finished) -> None:
        """Called with the workers' results, in the order in which they were submitted."""
        begun = time.perf_counter()
        self._early.update(finished.records)
        self._failed.update(number for number, _ in finished.failures)
        ready = []
        while (record := self._early.pop(self._next, None)) is not None:
            ready.append(record)
            self._failures += self._next in self._failed
            self._failed.discard(self._next)
            self._next += 1
        _, state = task
        if ready:
            self._output.write(b"".join(ready), len(ready))
            goes_on = state is not None and not (self._in_order and self._early)
            self._state = replace(state, failures=self._failures) if goes_on else None
        if time.monotonic() - self._kept >= SECONDS_BETWEEN_STATES:
            self._keep_state()
        self._progress.finished(finished)
        self.writing_seconds += time.perf_counter() - begun

    def _keep_state(self) -> None:
        if self._state is not None:
            self._output.keep_state(self._state.to_bytes())
            self._state, self._kept = None, time.monotonic()


def _finishing(make_finish: MakeFinish) -> Callable[[Task], Finished]:
    finish = make_finish()
    return lambda task: finish(task[0])
