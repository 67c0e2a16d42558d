"""Threads before and behind the model hand things on in order, are bounded and raise what goes wrong."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from python_process import run_code

from fastgen.cli.transformers.resume.run_state import RunState
from fastgen.cli.transformers.stages import writer as behind
from fastgen.cli.transformers.stages.batches import Limits, Planner, pad_text
from fastgen.cli.transformers.stages.items import Finished, Generated, Line, Prepared
from fastgen.cli.transformers.stages.prefetcher import BATCHES_AHEAD, Ahead, Prefetcher
from fastgen.cli.transformers.stages.progress import Busy, Progress
from fastgen.cli.transformers.stages.writer import Writer

STAGES = {"read": 1, "tokenise": 3, "model": 1, "detokenise": 3, "write": 1}


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
        "import time; from fastgen.cli.transformers.stages.prefetcher import Ahead\n"
        "Ahead((time.sleep(600) for _ in range(9)), 2, 'reader')"
    )


def chunks(number: int) -> Iterator[list[Line]]:
    for first in range(1, 2 * number, 2):
        yield [Line(first, b"a"), Line(first + 1, b"b")]


def prefetcher(prepare: Callable[[list[Line]], list[Prepared]], number: int) -> Prefetcher:
    planner = Planner(Limits(2, None), 0, pad_text(0, False))
    return Prefetcher(chunks(number), prepare, 3, planner, Busy(STAGES))


def test_chunks_are_batched_in_their_order_whoever_is_done_first() -> None:
    def late(lines: list[Line]) -> list[Prepared]:
        time.sleep(0.02 if lines[0].number % 4 == 1 else 0.0)
        return [Prepared({"input_ids": np.array([line.number])}) for line in lines]

    batches = list(prefetcher(late, 30))
    assert [line.number for batch in batches for line in batch.lines] == list(range(1, 61))


def test_a_prefetcher_that_is_stopped_leaves_no_threads() -> None:
    ahead = prefetcher(lambda lines: [Prepared({"input_ids": np.array([1])}) for _ in lines], 1000)
    next(iter(ahead))
    ahead.stop()
    for name in ("fastgen-reader", "fastgen-planner", "fastgen-tokenise"):
        wait_until(lambda name=name: not threads(name))


def test_what_a_worker_raises_comes_after_the_batches_before_it() -> None:
    def prepare(lines: list[Line]) -> list[Prepared]:
        if lines[0].number > 2 * BATCHES_AHEAD:
            raise ValueError("a bad task")
        return [Prepared({"input_ids": np.array([1])}) for _ in lines]

    seen, ahead = [], prefetcher(prepare, 30)
    with pytest.raises(ValueError, match="a bad task"):
        for batch in ahead:
            seen.append(batch)
    assert len(seen) == BATCHES_AHEAD
    ahead.stop()  # its reader waits for room


class Output:
    """Keeps what is written; `write` may be another function."""

    def __init__(self, write: Callable[[bytes], None] | None = None) -> None:
        self.records = 0
        self.data = b""
        self.states: list[tuple[int, Any]] = []
        self._write = write

    def write(self, data: bytes, records: int) -> None:
        if self._write is not None:
            self._write(data)
        self.data += data
        self.records += records

    def keep_state(self, state: Any) -> None:
        self.states.append((self.records, state))


def generated(*numbers: int) -> Generated:
    return Generated([Line(number, b"") for number in numbers], [], np.empty((0, 0)), None, [])


def finish(batch: Generated) -> Finished:
    if batch.lines[0].number == 13:
        raise ValueError("a bad task")
    time.sleep(0.02 if batch.lines[0].number % 4 == 1 else 0.0)
    return Finished([(line.number, f"{line.number}\n".encode()) for line in batch.lines], 0, [])


def writer(output: Output) -> Writer:
    return Writer(finish, 3, output, Progress(None, 0, True), 0, False, Busy(STAGES))


def text(*numbers: int) -> bytes:
    return b"".join(b"%d\n" % number for number in numbers)


def test_records_are_written_in_the_order_of_their_lines() -> None:
    output = Output()
    write = writer(output)
    for numbers in ((2, 3), (1, 6), (5, 4), (7,)):
        write.submit(generated(*numbers), RunState())
    write.close()
    assert output.data == text(*range(1, 8)) and [records for records, _ in output.states] == [7]


def test_a_state_is_kept_with_the_records_it_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "SECONDS_BETWEEN_STATES", 0.0)
    output = Output()
    write = writer(output)
    for number in range(1, 5):
        write.submit(generated(number), RunState(cells=number))
    write.submit(generated(5), None)  # a part of a batch
    write.close()
    assert [records for records, _ in output.states] == [1, 2, 3, 4]


def test_submit_of_the_writer_waits_while_too_much_is_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "TASKS_PER_WORKER", 1)
    go_on, submitted = threading.Event(), []
    output = Output(lambda data: go_on.wait() and None)
    write = writer(output)

    def submit() -> None:
        for number in range(1, 9):
            write.submit(generated(number), None)
            submitted.append(number)

    thread = threading.Thread(target=submit)
    thread.start()
    wait_until(lambda: len(submitted) == 4)  # one is being written
    time.sleep(0.1)
    assert len(submitted) == 4
    go_on.set()
    thread.join()
    write.close()
    assert output.data == text(*range(1, 9))


def test_a_task_that_raises_ends_the_run_after_those_before_it() -> None:
    output = Output()
    write = writer(output)
    with pytest.raises(ValueError, match="a bad task"):
        for number in range(1, 100):
            write.submit(generated(number), None)
    assert output.data == text(*range(1, 13))
    with pytest.raises(ValueError, match="a bad task"):
        write.close()


def test_an_error_of_write_is_raised() -> None:
    def broken(data: bytes) -> None:
        raise BrokenPipeError

    write = writer(Output(broken))
    write.submit(generated(1), None)
    with pytest.raises(BrokenPipeError):
        write.close()


def test_kill_gives_up_what_is_not_written() -> None:
    go_on, begun = threading.Event(), []

    def third_is_held(data: bytes) -> None:
        begun.append(data)
        if len(begun) == 3:
            go_on.wait()

    output = Output(third_is_held)
    write = writer(output)
    for number in range(1, 13):
        write.submit(generated(number), None)
    wait_until(lambda: len(begun) == 3)
    write.kill()
    go_on.set()
    wait_until(lambda: not threads("fastgen-writer") and not threads("fastgen-detokenise"))
    assert output.data == text(1, 2, 3)


def test_kill_does_not_wait_for_a_write_that_never_ends() -> None:
    go_on = threading.Event()
    write = writer(Output(lambda data: go_on.wait() and None))
    for number in range(1, 13):
        write.submit(generated(number), None)
    write.kill()  # comes back, although the write goes on only after it
    go_on.set()
    wait_until(lambda: not threads("fastgen-writer"))
