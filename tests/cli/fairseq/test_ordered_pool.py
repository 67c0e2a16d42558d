"""The pool hands results on in order, is bounded, notices what goes wrong, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fastgen.cli.fairseq.workers import OrderedPool, WorkerError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the workers are forked")


def double_late(task: tuple[int, float]) -> int:
    number, seconds = task
    time.sleep(seconds)
    return 2 * number


def do(task: Any) -> Any:
    """A number is returned; otherwise what its name says."""
    if task == "raise":
        raise ValueError("a bad\ntask")
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "exit":
        os._exit(3)
    if task == "die while writing":
        Connection._send = die_while_writing
    return task


def die_while_writing(connection: Connection, data: bytes) -> None:
    os.write(connection.fileno(), bytes(data)[:-1])
    os.kill(os.getpid(), signal.SIGKILL)


def pool(write: Callable[[Any], None], work: Callable[[Any], Any] = do, **options: int) -> OrderedPool:
    return OrderedPool(lambda place: work, write, **{"workers": 3, "limit": 100} | options)


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


def test_results_come_in_the_order_of_the_tasks() -> None:
    written = []
    with pool(written.append, double_late) as p:
        for number in range(30):
            p.submit((number, 0.02 if number % 4 == 0 else 0.0))
    assert written == [2 * number for number in range(30)]
    assert alive(p.pids) == []


def number_of_the_task(place: int) -> Callable[[float], int]:
    done = count()

    def work(seconds: float) -> int:
        time.sleep(seconds)
        return next(done)

    return work


def test_a_worker_does_the_tasks_in_their_order() -> None:
    written = []
    with OrderedPool(number_of_the_task, written.append, workers=1, limit=100) as p:
        for seconds in (0.3, 0.0, 0.0, 0.0):
            p.submit(seconds)
    assert written == [0, 1, 2, 3]


def test_submit_waits_while_too_much_is_unfinished(tmp_path: Path) -> None:
    go_on, written, taken = tmp_path / "go on", [], []

    def wait_for_file(task: int) -> int:
        while not go_on.exists():
            time.sleep(0.01)
        return task

    def give_all() -> None:
        with pool(written.append, wait_for_file, limit=5) as p:
            for number in range(20):
                p.submit(number)
                taken.append(number)

    thread = threading.Thread(target=give_all)
    thread.start()
    while len(taken) < 5:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(taken) == 5 and written == []
    go_on.touch()
    thread.join()
    assert written == list(range(20))


def test_everything_is_written_after_waiting() -> None:
    written = []
    with pool(written.append, double_late) as p:
        for number in range(20):
            p.submit((number, 0.02 if number % 4 == 1 else 0.0))
        p.wait()
        assert written == [2 * number for number in range(20)]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("raise", "^ValueError: a bad task$"),
        ("die", "was ended by SIGKILL$"),
        ("die while writing", "was ended by SIGKILL$"),
        ("exit", "ended with status 3"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_what_goes_wrong_in_a_worker_is_raised_in_its_place(task: str, message: str, workers: int) -> None:
    written = []
    with pytest.raises(WorkerError, match=message), pool(written.append, workers=workers) as p:
        for each in [0, 1, 2, 3, task, 4, 5]:
            p.submit(each)
    assert written == [0, 1, 2, 3]
    assert alive(p.pids) == []


def test_the_cause_of_an_error_is_the_workers_traceback() -> None:
    with pytest.raises(WorkerError) as raised, pool(print) as p:
        p.submit("raise")
    assert "in do" in str(raised.value.__cause__)


def test_an_idle_worker_that_dies_ends_the_run() -> None:
    with pytest.raises(WorkerError, match="SIGKILL"), pool(print) as p:
        os.kill(p.pids[0], signal.SIGKILL)
        while True:
            p.submit(0)
            time.sleep(0.01)
    assert alive(p.pids) == []


def test_workers_that_cannot_start_say_why() -> None:
    def start(place: int) -> Callable[[Any], Any]:
        raise ImportError("Please install it")

    message = "^ImportError: Please install it$"
    with pytest.raises(WorkerError, match=message), OrderedPool(start, print, workers=2, limit=10) as p:
        for number in range(5):
            p.submit(number)


def test_an_error_of_write_is_raised_as_it_is() -> None:
    def write(result: int) -> None:
        if result == 3:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), pool(write) as p:
        for number in range(1000):
            p.submit(number)
    assert alive(p.pids) == []


def test_what_was_submitted_before_the_caller_failed_is_written() -> None:
    written = []
    with pytest.raises(KeyError), pool(written.append, double_late) as p:
        for number in range(5):
            p.submit((number, 0.05))
        raise KeyError("the caller's own")
    assert written == [0, 2, 4, 6, 8]
    assert alive(p.pids) == []


def test_an_interruption_waits_for_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), pool(print, double_late) as p:
        p.submit((0, 1e6))  # never done
        time.sleep(0.1)
        raise KeyboardInterrupt
    assert alive(p.pids) == []


def test_an_interruption_of_write_ends_the_run() -> None:
    written = []

    def write(result: int) -> None:
        if result == 3:
            raise KeyboardInterrupt
        written.append(result)

    with pytest.raises(KeyboardInterrupt), pool(write) as p:
        for number in range(1000):
            p.submit(number)
    assert written == [0, 1, 2]
    assert alive(p.pids) == []


def test_nothing_is_written_behind_what_could_not_be() -> None:
    written = []

    def write(result: int) -> None:
        if result == 3:
            raise OSError(28, "No space left on device")
        written.append(result)

    with pytest.raises(OSError, match="No space left"), pool(write) as p:
        for number in range(10):
            p.submit(number)
    assert written == [0, 1, 2]


def test_ctrl_c_does_not_reach_the_workers() -> None:
    written = []
    with pool(written.append, double_late) as p:
        p.submit((1, 0.3))
        time.sleep(0.1)
        for pid in p.pids:
            os.kill(pid, signal.SIGINT)
    assert written == [2]


def test_a_large_task_and_a_large_result_go_through() -> None:
    written = []
    with pool(written.append, workers=2) as p:
        for _ in range(4):
            p.submit(b"x" * 5_000_000)
    assert [len(each) for each in written] == [5_000_000] * 4


LONG_TASK = """
import os, time
from fastgen.cli.fairseq.workers import OrderedPool
pool = OrderedPool(lambda place: time.sleep, print, workers=1, limit=5)
pool.submit(1e6)
print(*pool.pids, flush=True)
time.sleep(1e6)
"""


def test_a_worker_ends_with_a_parent_that_is_killed_even_in_the_middle_of_a_task() -> None:
    with subprocess.Popen([sys.executable, "-c", LONG_TASK], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert alive([pid]) == [pid]
        parent.kill()
    while alive([pid]):
        time.sleep(0.05)
