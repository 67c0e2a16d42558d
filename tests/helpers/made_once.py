"""Folders that are filled once for all workers of pytest-xdist."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(basetemp: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder `name` of this run of pytest; the first worker that asks lets `make` fill it, others wait.

    basetemp: `tmp_path_factory.getbasetemp()` of this worker.
    """
    folder = (basetemp.parent if "PYTEST_XDIST_WORKER" in os.environ else basetemp) / name
    done = folder / "done"
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder
