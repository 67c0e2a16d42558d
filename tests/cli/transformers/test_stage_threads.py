"""Threads before and behind the model hand things on in order, are bounded and raise what goes wrong."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from python_process import run_code

from fastgen.cli.ordered import Ahead, OrderedResults
from fastgen.cli.transformers.batching import Item, Limits, Planner
from fastgen.cli.transformers.lines import Line
from fastgen.cli.transformers.pipeline import BATCHES_AHEAD, Prefetcher


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_no_more_is_taken_ahead_than_there_is_room_for() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    ahead = iter(Ahead(items(), 3, "fastgen-test"))
    wait_until(lambda: len(taken) == 4)  # one is in the hands of the thread
    time.sleep(0.1)
    assert len(taken) == 4
    assert list(ahead) == list(range(20))


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise BrokenPipeError

    seen = []
    with pytest.raises(BrokenPipeError):
        for item in Ahead(items(), 3, "fastgen-test"):
            seen.append(item)
    assert seen == [1, 2]


def test_who_waits_for_an_item_is_told_when_there_will_be_none() -> None:
    go_on, seen = threading.Event(), []

    def items() -> Iterator[int]:
        yield 1
        go_on.wait()

    ahead = Ahead(items(), 3, "fastgen-test")
    thread = threading.Thread(target=lambda: seen.extend(ahead))
    thread.start()
    ahead.stop()
    thread.join()
    assert seen in ([], [1])
    go_on.set()
    wait_until(lambda: not threads("fastgen-test"))


def test_an_input_that_never_ends_does_not_keep_the_program() -> None:
    run_code(
        "import time; from fastgen.cli.ordered import Ahead\nAhead((time.sleep(600) for _ in range(9)), 2, 'reader')"
    )


def chunks(number: int) -> Iterator[list[Line]]:
    for first in range(1, 2 * number, 2):
        yield [Line(first, b"a"), Line(first + 1, b"b")]


def prefetcher(prepare: Callable[[list[Line]], list[Item]], number: int) -> Prefetcher:
    task = SimpleNamespace(prepare=prepare, collate=lambda items: {})
    return Prefetcher(chunks(number), task, Planner(Limits(2, None), 0), 3)


def items(lines: list[Line]) -> list[Item]:
    return [Item(line, length=1) for line in lines]


def test_chunks_are_batched_in_their_order_whoever_is_done_first() -> None:
    def late(lines: list[Line]) -> list[Item]:
        time.sleep(0.02 if lines[0].number % 4 == 1 else 0.0)
        return items(lines)

    batches = list(prefetcher(late, 30))
    assert [item.line.number for batch in batches for item in batch.items] == list(range(1, 61))


def test_a_prefetcher_that_is_stopped_leaves_no_threads() -> None:
    ahead = prefetcher(items, 1000)
    next(iter(ahead))
    ahead.stop()
    for name in ("fastgen-reader", "fastgen-planner", "fastgen-tokenise"):
        wait_until(lambda name=name: not threads(name))


def test_what_a_worker_raises_comes_after_the_batches_before_it() -> None:
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


def results(write: Callable[[Any], None], values: list[Any], limit: int = 2) -> OrderedResults:
    ordered = OrderedResults(write, limit)
    with ThreadPoolExecutor(3) as workers:
        for value in values:
            ordered.put(workers.submit(made, value))
    return ordered


def made(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    time.sleep(0.02 if value % 4 == 1 else 0.0)
    return value


def test_results_are_written_in_the_order_in_which_their_work_was_given_out() -> None:
    written: list[int] = []
    ordered = results(written.append, [*range(20)])
    ordered.wait()
    assert written == [*range(20)]
    ordered.close()


def test_put_waits_while_too_much_is_unfinished() -> None:
    go_on, put = threading.Event(), []
    written: list[int] = []

    def write(value: int) -> None:
        go_on.wait()
        written.append(value)

    ordered = OrderedResults(write, 3)

    def give_out() -> None:
        for value in range(8):
            done: Future[int] = Future()
            done.set_result(value)
            ordered.put(done)
            put.append(value)

    thread = threading.Thread(target=give_out)
    thread.start()
    wait_until(lambda: len(put) == 4)  # one is being written
    time.sleep(0.1)
    assert len(put) == 4
    go_on.set()
    thread.join()
    ordered.close()
    assert written == [*range(8)]


def test_a_task_that_raises_ends_the_run_after_those_before_it() -> None:
    written: list[int] = []
    with pytest.raises(ValueError, match="a bad task"):
        results(written.append, [*range(12), ValueError("a bad task"), *range(20)], limit=40).close()
    assert written == [*range(12)]


def test_an_error_of_write_is_raised() -> None:
    def broken(value: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        results(broken, [1, 2, 3]).close()


def test_kill_does_not_wait_for_a_write_that_never_ends() -> None:
    go_on, written = threading.Event(), []

    def write(value: int) -> None:
        go_on.wait()
        written.append(value)

    ordered = results(write, [0, 2, 3], limit=9)
    ordered.kill()  # comes back, although nothing can be written
    assert written == []
    go_on.set()
    wait_until(lambda: not threads("fastgen-writer"))
    assert written in ([], [0])
