"""A process that outlives a run, however that ends: it ends what Ray has left running, and removes Ray's folder.

    python cleaner.py FOLDER     waits for the end of its standard input, which the run holds open

Ray's processes watch each other, and none of them removes the folder when the run was killed. An agent of a raylet
that was killed may wait for minutes: it first reports to others that are gone, too. Where the system has /proc, the
processes are found by an environment variable and by their open files: one that changes its title overwrites its
environment.

Tests: tests/cli/transformers/test_cli_workers.py
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "RAY_TMPDIR"
SECONDS = 3.0  # in which they end by themselves


def main(folder: str) -> None:
    """Removes the folder when nobody uses it."""
    run = os.getppid()
    os.setsid()  # a Ctrl-C is not for this process
    sys.stdin.buffer.read()
    deadline = time.monotonic() + SECONDS
    while users := users_of(folder) - {run}:
        for process in users if time.monotonic() > deadline else ():
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    while os.path.exists(folder) and time.monotonic() < deadline + SECONDS:  # one that was killed may still write
        shutil.rmtree(folder, ignore_errors=True)


def users_of(folder: str) -> set[int]:
    """The processes that have the folder in their environment, or a file in it open."""
    found, entry, inside = set(), f"{VARIABLE}={folder}".encode(), f"{os.path.realpath(folder)}{os.sep}"
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (process / "environ").read_bytes().split(b"\0") or any(
                os.path.realpath(file).startswith(inside) for file in (process / "fd").iterdir()
            ):
                found.add(int(process.name))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
