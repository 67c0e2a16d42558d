"""A job that only writes a journal. As a program: killed before each line of the modules that it uses, and resumed."""

import os
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from fastgen.batch import files, journal, part
from fastgen.batch.config import BatchConfig
from fastgen.batch.journal import Journal
from fastgen.batch.part import Entry


def job(path: Path, total: int, longest: int = 40) -> None:
    """Writes, or resumes, an OUTPUT of so many random records in batches of three."""
    output = Journal(BatchConfig("model", "in", str(path), resume=True))
    try:
        if output.check({"--total": total}):
            return
        output.begin({"--total": total})
        for first in range(1, total + 1, 3):
            batch = range(first, min(first + 3, total + 1))
            if all(output.entry(number) for number in batch):
                continue
            assert not any(output.entry(number) for number in batch)  # a batch is there or not
            draw = random.Random(first)
            records = [f"{number} {draw.random()} {'x' * draw.randint(0, longest)}\n" for number in batch]
            output.write([Entry(n, 1, None, None, False, record.encode()) for n, record in zip(batch, records)])
        output.complete()
        output.leave()
    except BaseException:
        output.leave()
        raise


def status_in_child(action: Callable[[], object]) -> int:
    if (child := os.fork()) == 0:
        try:
            action()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def crash_before(line: int, output: Path) -> None:
    """Ends the process before this line of the three modules is run; counts lines as they are run."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in (files.__file__, journal.__file__, part.__file__):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os._exit(9)
        return trace

    sys.settrace(trace)
    job(output, 7)


def crash_everywhere(folder: Path) -> int:
    """Crashes before every line, and completes each journal to the same bytes; returns how many lines there are."""
    job(folder / "whole", 7)
    output = folder / "work" / "out"
    line, status = 0, 9
    while status == 9:
        line += 1
        shutil.rmtree(output.parent, ignore_errors=True)
        output.parent.mkdir()
        status = status_in_child(partial(crash_before, line, output))
        assert status_in_child(partial(job, output, 7)) == 0, line
        assert output.read_bytes() == (folder / "whole").read_bytes(), line
        names = set(os.listdir(output.parent))
        assert {"out", "out.run.json"} <= names and not {"out.part", "out.part.new"} & names, (line, names)
    assert status == 0
    return line - 1


if __name__ == "__main__":
    print(crash_everywhere(Path(sys.argv[1])))
