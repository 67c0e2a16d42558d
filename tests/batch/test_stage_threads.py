"""Threads before and after the model keep the order, are bounded and pass errors on."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from fastgen.batch.errors import Stop
from fastgen.batch.files import Line
from fastgen.batch.pipeline import BATCHES_AHEAD, RESULTS_PER_WORKER, Ahead, Pipeline, Prefetcher
from fastgen.batch.planner import Batch, Item, Planner


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_no_more_items_are_read_ahead_than_the_limit():
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    ahead = iter(Ahead(items(), 3, "fastgen-test"))
    wait_until(lambda: len(taken) == 4)  # the thread holds one
    time.sleep(0.1)
    assert len(taken) == 4
    assert list(ahead) == list(range(20))


def test_a_waiting_reader_learns_of_the_end():
    resume, seen = threading.Event(), []

    def items() -> Iterator[int]:
        yield 1
        resume.wait()

    ahead = Ahead(items(), 3, "fastgen-test")
    thread = threading.Thread(target=lambda: seen.extend(ahead))
    thread.start()
    ahead.stop()
    thread.join()
    assert seen in ([], [1])
    resume.set()
    wait_until(lambda: not threads("fastgen-test"))


def chunks(number: int) -> Iterator[list[Line]]:
    for first in range(1, 2 * number, 2):
        yield [Line(first, b"a"), Line(first + 1, b"b")]


def prefetcher(prepare: Callable[[list[Line]], list[Item]], number: int) -> Prefetcher:
    task = SimpleNamespace(prepare=prepare, collate=lambda items: {}, args=SimpleNamespace(preprocess_workers=3))
    return Prefetcher(chunks(number), task, Planner(2, None, 99, sorts=False))


def items(lines: list[Line]) -> list[Item]:
    return [Item(line, length=1) for line in lines]


def test_chunks_are_batched_in_order_however_workers_finish():
    def late(lines: list[Line]) -> list[Item]:
        time.sleep(0.02 if lines[0].number % 4 == 1 else 0.0)
        return items(lines)

    batches = list(prefetcher(late, 30))
    assert [item.line.number for batch in batches for item in batch.items] == list(range(1, 61))


def test_a_prefetcher_that_is_stopped_leaves_no_threads():
    ahead = prefetcher(items, 1000)
    next(iter(ahead))
    ahead.stop()
    for name in ("fastgen-reader", "fastgen-planner", "fastgen-tokenize"):
        wait_until(lambda name=name: not threads(name))


def test_an_error_of_a_worker_comes_after_earlier_batches():
    def prepare(lines: list[Line]) -> list[Item]:
        if lines[0].number > 2 * BATCHES_AHEAD:
            raise ValueError("a bad task")
        return items(lines)

    seen, ahead = [], prefetcher(prepare, 30)
    with pytest.raises(ValueError, match="a bad task"):
        for batch in ahead:
            seen.append(batch)
    assert len(seen) == BATCHES_AHEAD
    ahead.stop()  # its reader waits for room


def after_the_model(write: Callable[[int], None], workers: int = 3) -> tuple[Pipeline, list[int]]:
    """Returns a pipeline that writes the numbers of its batches, and the numbers that the model has seen."""
    generated: list[int] = []

    def generate(batch: Batch) -> list[int]:
        generated.append(batch.number)
        return [batch.number]

    def finish(number: int) -> float:
        time.sleep(0.02 if number % 4 == 1 else 0.0)
        return 1.0

    def run(batches: Iterator[Batch], stop: Stop) -> Iterator[tuple[Batch, list[int]]]:
        return ((batch, generate(batch)) for batch in batches)

    runner = SimpleNamespace(run=run, finish=finish)
    return Pipeline(runner, lambda items, amount: write(items[0].line.number), Stop(), workers), generated


def numbered(number: int) -> Iterator[Batch]:
    return (Batch([], [Item(Line(place, b""))], place) for place in range(number))


def run_all(pipeline: Pipeline, number: int) -> None:
    try:
        for _ in pipeline.run(numbered(number)):
            pass
        pipeline.close()
    finally:
        pipeline.kill()  # so that no threads are left to the next test


def test_batches_are_written_in_their_order_by_several_workers():
    written: list[int] = []
    run_all(after_the_model(written.append)[0], 40)
    assert written == [*range(40)]


@pytest.fixture
def blocked():
    """A function that writes numbers once an event is set; the event, and the written numbers."""
    resume, written = threading.Event(), []

    def write(number: int) -> None:
        resume.wait()
        written.append(number)

    yield write, resume, written
    resume.set()


def test_the_model_waits_for_unwritten_batches(blocked):
    write, resume, written = blocked
    pipeline, generated = after_the_model(write, workers=1)
    thread = threading.Thread(target=run_all, args=(pipeline, 20))
    thread.start()
    wait_until(lambda: len(generated) == RESULTS_PER_WORKER + 1)
    time.sleep(0.1)
    assert len(generated) == RESULTS_PER_WORKER + 1
    resume.set()
    thread.join()
    assert written == [*range(20)]


def test_nothing_is_written_after_a_batch_that_cannot_be():
    written: list[int] = []

    def full(number: int) -> None:
        if number == 5:
            raise OSError("the disk is full")
        written.append(number)

    with pytest.raises(OSError, match="the disk is full"):
        run_all(after_the_model(full)[0], 40)
    assert written == [*range(5)]


def test_a_killed_pipeline_does_not_wait_for_a_write(blocked):
    write, resume, written = blocked
    pipeline, _ = after_the_model(write)
    for _ in pipeline.run(numbered(5)):
        pass
    pipeline.kill()  # returns, although nothing can be written
    assert written == []
    resume.set()
    wait_until(lambda: not threads("fastgen-detokenize"))
    assert written in ([], [0], [0, 1], [0, 1, 2])
