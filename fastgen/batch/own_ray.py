"""A Ray for one run that nobody else can use, and a process that leaves nothing of it behind, however the run ends.

    python own_ray.py FOLDER     waits for the end of its standard input, which the run holds open, then ends what Ray
                                 has left running and removes Ray's folder

Ray's processes watch each other, and none of them removes the folder when the run was killed. An agent of a raylet
that was killed may wait for minutes: it first reports to others that are gone, too. Where the system has /proc, the
processes are found by an environment variable and by their open files: one that changes its title overwrites its
environment.

Tests: tests/cli/transformers/test_cli_workers.py
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

VARIABLE = "RAY_TMPDIR"
SECONDS = 3.0  # in which Ray's processes end by themselves
OBJECT_STORE = 80 << 20  # bytes: batches are there until a worker has them, one for each
TOKEN = os.urandom(32).hex()  # Ray keeps it for as long as the process lives


@contextmanager
def own_ray(cpus: int) -> Iterator[dict[str, Any]]:
    """Arguments of ray.init. cpus: how many Ray is told that there are."""
    folder = tempfile.mkdtemp(prefix="fastgen-ray-", dir="/tmp")  # paths of sockets are short
    variables = {
        VARIABLE: folder,
        "RAY_AUTH_TOKEN": TOKEN,  # Ray would write one into the user's folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray has 15, so that a model waits for every other program
    }
    outlives = subprocess.Popen([sys.executable, __file__, folder], stdin=subprocess.PIPE)
    before = {name: os.environ.get(name) for name in (*variables, "RAY_AUTH_MODE")}  # ray.init sets the last one
    os.environ.update(variables)
    sizes = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE}
    try:
        yield {"address": "local", "include_dashboard": False, **sizes}
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        outlives.communicate()


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
