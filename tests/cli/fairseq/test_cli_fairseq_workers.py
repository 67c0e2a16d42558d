"""Workers write lines in the order of the batches, are bounded, and leave out lines only after an error."""

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fastgen.cli.fairseq.pipeline import UNFINISHED_BATCHES_PER_WORKER, Workers

pytestmark = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="workers are forked")


class Doubling:
    """A stand-in for Printer: a batch is a number and the seconds that it takes, or the file that it waits for."""

    def lines(self, batch: tuple[int, Any]) -> int:
        number, wait_for = batch
        if isinstance(wait_for, Path):
            while not wait_for.exists():
                time.sleep(0.01)
        else:
            time.sleep(wait_for)
        return 2 * number


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lines_come_in_the_order_of_the_batches(count):
    written: list[int] = []
    with Workers(Doubling(), written.append, count) as workers:
        for number in range(20):
            workers.submit((number, 0.02 if number % 4 == 0 else 0.0))
        workers.wait()
        assert written == [2 * number for number in range(20)]
        workers.submit((20, 0.0))
    assert written[-1] == 40


def test_submit_waits_for_unfinished_batches(tmp_path):
    file, limit = tmp_path / "all of it", 2 * UNFINISHED_BATCHES_PER_WORKER
    written: list[int] = []
    submitted: list[int] = []
    with Workers(Doubling(), written.append, 2) as workers:

        def submit_all() -> None:
            for number in range(limit + 5):
                workers.submit((number, file))
                submitted.append(number)

        thread = threading.Thread(target=submit_all)
        thread.start()
        while len(submitted) < limit:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(submitted) == limit and written == []
        file.touch()
        thread.join()
    assert written == [2 * number for number in range(limit + 5)]


def test_nothing_is_written_after_a_failed_batch():
    written = []

    def write(result: int) -> None:
        if result == 6:
            raise OSError(28, "No space left on device")
        written.append(result)

    with pytest.raises(OSError, match="No space left"), Workers(Doubling(), write, 2) as workers:
        for number in range(1000):
            workers.submit((number, 0.0))
    assert written == [0, 2, 4]


def test_batches_before_an_error_of_user_code_are_written():
    written: list[int] = []
    with pytest.raises(KeyError), Workers(Doubling(), written.append, 2) as workers:
        for number in range(5):
            workers.submit((number, 0.05))
        raise KeyError("the caller's own")
    assert written == [0, 2, 4, 6, 8]


def test_nothing_is_written_after_an_interruption(tmp_path):
    file, written = tmp_path / "all of it", []
    with pytest.raises(KeyboardInterrupt), Workers(Doubling(), written.append, 1) as workers:
        for number in range(3):
            workers.submit((number, file))
        file.touch()
        raise KeyboardInterrupt
    assert written == []
