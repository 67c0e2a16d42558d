"""Threads hand results on in order, are bounded and raise what goes wrong; which workers there are is measured."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from python_process import run_code

from fastgen.cli.pipeline.ordered_pool import OrderedPool, WorkerError
from fastgen.cli.transformers.stages import choice
from fastgen.cli.transformers.stages.ordered_threads import OrderedThreads


def pool(write: Callable[[Any], None], work: Callable[[Any], Any], **options: int) -> OrderedThreads:
    return OrderedThreads(lambda: work, lambda task, result: write(result), **{"workers": 3, "limit": 100} | options)


def double_late(task: tuple[int, float]) -> int:
    number, seconds = task
    time.sleep(seconds)
    return 2 * number


def test_results_come_in_the_order_of_the_tasks() -> None:
    written: list[int] = []
    threads = pool(written.append, double_late)
    for number in range(30):
        threads.submit((number, 0.02 if number % 4 == 0 else 0.0))
    threads.close()
    assert written == [2 * number for number in range(30)]
    assert threads.busy_seconds >= 8 * 0.02


@pytest.mark.parametrize("kind", (OrderedThreads, OrderedPool))
def test_each_result_comes_with_its_task(kind) -> None:
    written: list[tuple[Any, int]] = []
    workers = kind(lambda: double_late, lambda *pair: written.append(pair), workers=2, limit=4)
    tasks = [(number, 0.01 * (number % 3)) for number in range(8)]
    workers.submit(*tasks)
    workers.close()
    assert written == [(task, 2 * task[0]) for task in tasks]


def test_submit_waits_while_too_much_is_unfinished() -> None:
    go_on, written, submitted = threading.Event(), [], []

    def write(result: int) -> None:
        go_on.wait()
        written.append(result)

    threads = pool(write, lambda task: task, limit=2)

    def submit() -> None:
        for number in range(6):
            threads.submit(number)
            submitted.append(number)

    thread = threading.Thread(target=submit)
    thread.start()
    time.sleep(0.2)
    assert len(submitted) == 3  # one is being written
    go_on.set()
    thread.join()
    threads.close()
    assert written == [0, 1, 2, 3, 4, 5]


def test_a_task_that_raises_ends_the_run_after_those_before_it() -> None:
    def work(task: int) -> int:
        if task == 3:
            raise ValueError("a bad\ntask")
        return task

    written: list[int] = []
    threads = pool(written.append, work, limit=2)
    with pytest.raises(WorkerError, match=r"^ValueError: a bad task$") as caught:
        for number in range(100):
            threads.submit(number)
    assert written == [0, 1, 2]
    assert "in work" in str(caught.value.__cause__)
    with pytest.raises(WorkerError):
        threads.close()


def test_an_error_of_write_is_raised() -> None:
    def write(result: int) -> None:
        raise BrokenPipeError

    threads = pool(write, lambda task: task)
    threads.submit(1)
    with pytest.raises(BrokenPipeError):
        threads.close()


def test_kill_gives_up_what_is_not_written() -> None:
    written: list[int] = []
    threads = pool(written.append, double_late, workers=1)
    for number in range(50):
        threads.submit((number, 0.02))
    threads.kill()
    time.sleep(0.3)
    assert len(written) < 10
    assert not any(thread.name.startswith("fastgen-worker") for thread in threading.enumerate())


def test_a_task_that_never_ends_does_not_keep_the_program() -> None:
    run_code(
        "import time; from fastgen.cli.transformers.stages.ordered_threads import OrderedThreads\n"
        "threads = OrderedThreads(lambda: time.sleep, print, workers=1, limit=2)\n"
        "threads.submit(600, 600); threads.kill()"
    )


def hold_the_interpreter() -> None:
    sum(range(20_000))
    for _ in range(100_000):
        pass


@pytest.mark.skipif(not choice.can_fork(), reason="there are only threads here")
def test_what_holds_the_interpreter_goes_to_processes() -> None:
    assert choice.workers_for(hold_the_interpreter) is OrderedPool
    # Other programs may delay a thread as well, and then processes are the safe choice: so one measurement of several.
    assert OrderedThreads in [choice.workers_for(lambda: time.sleep(0.01)) for _ in range(10)]


def test_where_nothing_can_be_forked_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "can_fork", lambda: False)
    assert choice.workers_for(hold_the_interpreter) is OrderedThreads
