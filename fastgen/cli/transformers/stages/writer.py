"""What happens behind the model: tokens become records in workers, which are written in the order of INPUT."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from fastgen.cli.pipeline.results_in_order import ResultsInOrder
from fastgen.cli.transformers.files.standard_output import StandardOutput
from fastgen.cli.transformers.resume.part_file import PartFile
from fastgen.cli.transformers.resume.run_state import RunState
from fastgen.cli.transformers.stages.items import Finished, Generated
from fastgen.cli.transformers.stages.progress import Busy, Progress

TASKS_PER_WORKER = 8
# What is written after the last state is written again by a run that goes on after a kill.
SECONDS_BETWEEN_STATES = 1.0


class Writer:
    """Takes what the model generates and writes it.

    finish: what workers do. failures: of the records that are in `output`.
    in_order: batches hold the lines as they stand in INPUT, so that where one ends is where another run can go on with
        the same batches.
    """

    def __init__(
        self,
        finish: Callable[[Generated], Finished],
        workers: int,
        output: PartFile | StandardOutput,
        progress: Progress,
        failures: int,
        in_order: bool,
        busy: Busy,
    ) -> None:
        self._finish = busy.timed("detokenise", finish)
        self._output = output
        self._progress = progress
        self._next = output.records + 1  # the number of the line to be written next
        # By line number the records whose turn has not come, and whether their inputs failed.
        self._early: dict[int, tuple[bytes, bool]] = {}
        self._state: RunState | None = None  # to go on with after what is written, and not kept yet
        self._kept = time.monotonic()
        self._failures = failures
        self._in_order = in_order
        self._workers = ThreadPoolExecutor(workers, "fastgen-detokenise")
        self._results = ResultsInOrder(busy.timed("write", self._write), TASKS_PER_WORKER * workers)

    def submit(self, generated: Generated, state: RunState | None) -> None:
        """Waits while too much is unfinished; raises what went wrong so far.

        state: to go on with after these records; None for a part of a batch. Failures are counted here.
        """
        self._results.put(self._workers.submit(self._finish, generated), state)

    def close(self) -> None:
        """Waits until everything is written whose turn has come; raises what went wrong."""
        try:
            self._results.close()
        finally:
            self._workers.shutdown()
        self._keep_state()

    def kill(self) -> None:
        """Gives up what is not written, without waiting for what never ends."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._results.kill()

    def _write(self, finished: Finished, state: RunState | None) -> None:
        failed = dict(finished.failures)
        self._early.update((number, (record, number in failed)) for number, record in finished.records)
        ready = []
        while self._next in self._early:
            record, has_failed = self._early.pop(self._next)
            ready.append(record)
            self._failures += has_failed
            self._next += 1
        if ready:
            self._output.write(b"".join(ready), len(ready))
            goes_on = state is not None and not (self._in_order and self._early)
            self._state = replace(state, failures=self._failures) if goes_on else None
        if time.monotonic() - self._kept >= SECONDS_BETWEEN_STATES:
            self._keep_state()
        self._progress.finished(finished)

    def _keep_state(self) -> None:
        if self._state is not None:
            self._output.keep_state(asdict(self._state))
            self._state, self._kept = None, time.monotonic()
