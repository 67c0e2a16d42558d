"""The stages of a run put together: read → tokenise → batch → generate → detokenise → write (§4.3 of the paper).

The main thread runs the model and does nothing else: what comes before and behind it happens in other threads, a
bounded number of batches away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from fastgen.cli.errors import RunError
from fastgen.cli.transformers.files.standard_output import StandardOutput
from fastgen.cli.transformers.resume.part_file import PartFile
from fastgen.cli.transformers.resume.run_state import RunState
from fastgen.cli.transformers.stages.batches import Planner
from fastgen.cli.transformers.stages.generation import WithinMemory
from fastgen.cli.transformers.stages.items import Finished, Generated, Line, Prepared
from fastgen.cli.transformers.stages.prefetcher import Prefetcher
from fastgen.cli.transformers.stages.progress import Busy, Progress
from fastgen.cli.transformers.stages.writer import Writer
from fastgen.cli.transformers.stop import Stop

# In a row, and a whole window of them: lines of one length, which come together, may all fail for their length.
MOST_FAILED_BATCHES = 3


@dataclass(frozen=True)
class Stages:
    """What a run does with its lines.

    prepare, finish: what workers do ahead of the model and behind it; threads share them. workers: how many of both.
    line_bytes: how much of a line is to be read. lines_at_once: how many a worker prepares.
    in_order: batches hold the lines as they stand in INPUT. random: gives the state of the random numbers, where
        samples are drawn.
    """

    prepare: Callable[[list[Line]], list[Prepared]]
    planner: Planner
    generate: WithinMemory
    finish: Callable[[Generated], Finished]
    workers: tuple[int, int]
    line_bytes: int
    lines_at_once: int
    in_order: bool
    random: Callable[[], str] | None

    def state(self) -> RunState:
        """To go on with after the present batch."""
        return RunState(cells=self.generate.cells, random=None if self.random is None else self.random())


def run_stages(
    chunks: Iterator[list[Line]],
    stages: Stages,
    output: PartFile | StandardOutput,
    failures: int,
    progress: Progress,
    stop: Stop,
) -> bool:
    """Writes a record for every line to `output`; returns whether that is done, and not ended early by `stop`.

    failures: of the records that are there.
    """
    ahead, behind = stages.workers
    busy = Busy({"read": 1, "tokenise": ahead, "model": 1, "detokenise": behind, "write": 1})
    progress.watch(busy.idle)
    writer = Writer(stages.finish, behind, output, progress, failures, stages.in_order, busy)
    prefetcher = Prefetcher(chunks, stages.prepare, ahead, stages.planner, busy)
    try:
        complete = _generate_all(prefetcher, stages, busy, writer, stop)
    except KeyboardInterrupt:
        if stop.requests > 1:
            writer.kill()
            raise
        complete = False
    except Exception:
        # What was generated before is complete, and it is wanted; this error is the one to be raised.
        with suppress(Exception):
            writer.close()
        raise
    finally:
        prefetcher.stop()
    _finish(writer, stop)
    return complete


def _generate_all(prefetcher: Prefetcher, stages: Stages, busy: Busy, writer: Writer, stop: Stop) -> bool:
    """Whether there is no batch left; a batch in flight is finished before a request to stop is followed.

    Batches of which every line fails are held back until one does not: it may be something else than their lines that
    fails, and then they are left to a run that goes on. Raises RunError where there are several.
    """
    held: list[tuple[list[Generated], RunState]] = []
    failed, first = 0, None
    generate = busy.timed("model", lambda batch: list(stages.generate(batch)))
    for batch in prefetcher:
        stop.finishing = True
        parts = generate(batch)
        held.append((parts, stages.state()))
        if any(part.lines for part in parts):
            failed = 0
        elif batch.lines:
            failed += 1
            first = parts[0].not_generated[-1] if failed == 1 else first
            if failed >= MOST_FAILED_BATCHES and batch.ends_window:
                raise RunError(f"every line of {failed} batches failed; line {first.line.number}: {first.error}")
        if not failed:
            _submit(held, writer)
        stop.finishing = False
        if stop.requests:
            return False
    _submit(held, writer)
    return True


def _submit(held: list[tuple[list[Generated], RunState]], writer: Writer) -> None:
    for (*parts, last), state in held:
        for part in parts:
            writer.submit(part, None)
        writer.submit(last, state)
    held.clear()


def _finish(writer: Writer, stop: Stop) -> None:
    stop.finishing = True
    try:
        writer.close()
    except KeyboardInterrupt:
        writer.kill()
        raise
