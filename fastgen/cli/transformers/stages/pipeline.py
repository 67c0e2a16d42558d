"""The stages of a run put together: read → tokenise → batch → generate → detokenise → write (§4.3 of the paper).

The main thread runs the model and does nothing else: what comes before and behind it happens in threads and workers,
a bounded number of batches away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fastgen.cli.errors import RunError
from fastgen.cli.transformers.resume.run_state import RunState
from fastgen.cli.transformers.stages.batches import Planner
from fastgen.cli.transformers.stages.choice import workers_for
from fastgen.cli.transformers.stages.generation import WithinMemory
from fastgen.cli.transformers.stages.items import Generated, Line
from fastgen.cli.transformers.stages.prefetcher import MakePrepare, Prefetcher
from fastgen.cli.transformers.stages.progress import Progress
from fastgen.cli.transformers.stages.transfer import Transfer
from fastgen.cli.transformers.stages.writer import MakeFinish, Output, Writer
from fastgen.cli.transformers.stop import Stop

PROBED_LINES = 32
PROBED_TOKENS = 32
# In a row, and a whole window of them: lines of one length, which come together, may all fail for their length.
MOST_FAILED_BATCHES = 3


@dataclass(frozen=True)
class Stages:
    """What a run does with its lines.

    make_prepare, make_finish: make what workers do ahead of the model and behind it. vocabulary: number of tokens.
    model_seconds: how long the model has been at work. workers: ahead of the model, and behind it.
    line_bytes: how much of a line is to be read.
    in_order: batches hold the lines as they stand in INPUT. random: gives the state of the random numbers, where
        samples are drawn.
    """

    make_prepare: MakePrepare
    planner: Planner
    transfer: Transfer
    generate: WithinMemory
    make_finish: MakeFinish
    vocabulary: int
    model_seconds: Callable[[], float]
    workers: tuple[int, int]
    line_bytes: int
    in_order: bool
    random: Callable[[], str] | None

    def state(self) -> RunState:
        """To go on with after the present batch."""
        return RunState(cells=self.generate.cells, random=None if self.random is None else self.random())


def run_stages(
    chunks: Iterator[list[Line]], stages: Stages, output: Output, failures: int, progress: Progress, stop: Stop
) -> bool:
    """Writes a record for every line to `output`; returns whether that is done, and not ended early by `stop`.

    failures: of the records that are there.
    """
    first_chunk = next(chunks, None)
    if first_chunk is None:
        return True
    prepare, finish = stages.make_prepare(), stages.make_finish()
    prepares = workers_for(lambda: prepare(first_chunk[:PROBED_LINES]))
    finishes = workers_for(lambda: finish(_sample(first_chunk[0], stages.vocabulary)))
    workers, first = stages.workers, first_chunk[0].number
    writer = Writer(stages.make_finish, finishes, workers[1], output, progress, first, failures, stages.in_order)
    chunks = itertools.chain([first_chunk], chunks)
    prefetcher = Prefetcher(chunks, stages.make_prepare, prepares, workers[0], stages.planner, stages.transfer)

    def idle(seconds: float) -> dict[str, float]:
        busy = {
            "read": prefetcher.reading_seconds,
            "tokenise": prefetcher.preparing_seconds / workers[0],
            "model": stages.model_seconds(),
            "detokenise": writer.finishing_seconds / workers[1],
            "write": writer.writing_seconds,
        }
        return {stage: max(0.0, 1 - share / seconds) for stage, share in busy.items()}

    progress.watch(idle)
    prefetcher.start()
    try:
        complete = _generate_all(prefetcher, stages, writer, stop)
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


def _generate_all(prefetcher: Prefetcher, stages: Stages, writer: Writer, stop: Stop) -> bool:
    """Whether there is no batch left; a batch in flight is finished before a request to stop is followed.

    Batches of which every line fails are held back until one does not: it may be something else than their lines that
    fails, and then they are left to a run that goes on. Raises RunError where there are several.
    """
    held: list[tuple[list[Generated], RunState]] = []
    failed, first = 0, None
    for batch in prefetcher:
        stop.finishing = True
        parts = list(stages.generate(batch))
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


def _sample(line: Line, vocabulary: int) -> Generated:
    """Sequences of all kinds of tokens, to see how they are turned into text."""
    tokens = np.arange(PROBED_LINES * PROBED_TOKENS) % vocabulary
    lines = [line] * PROBED_LINES
    return Generated(lines, [1] * PROBED_LINES, tokens.reshape(PROBED_LINES, -1), None, [])
