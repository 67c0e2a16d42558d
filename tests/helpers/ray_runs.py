"""Runs of the command with workers in processes of Ray: how to change what a worker does, and what is left of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

FOLDERS = "fastgen-ray-"
# Python runs this in every process that begins with the folder on its path, before anything else.
CHANGED = """
import os, wrapt
def change(pipeline):
{code}
wrapt.register_post_import_hook(change, "fastgen.cli.transformers.pipeline")
"""
# A worker ends when it gets one of these lines: each time, or the first time only, where ONCE is a file to make.
POISON = """
    generate = pipeline.WithinMemory.__call__
    def ending(self, batch, start=0):
        if {int(word) for word in os.environ["POISON"].split()} & {item.line.number for item in batch.items}:
            once = os.environ.get("ONCE")
            try:
                once and os.close(os.open(once, os.O_CREAT | os.O_EXCL))
                os._exit(9)
            except FileExistsError:
                pass
        return generate(self, batch, start)
    pipeline.WithinMemory.__call__ = ending
"""


def changed(folder: Path, code: str) -> str:
    """The PYTHONPATH of processes that are to run `code` behind the import of fastgen's pipeline."""
    (folder / "sitecustomize.py").write_text(CHANGED.format(code=code))
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def of_runs() -> Iterator[str]:
    """Processes and folders that runs with workers have begun."""
    yield from map(str, Path("/tmp").glob(f"{FOLDERS}*"))
    for process in psutil.process_iter(["cmdline", "name"]):
        words = process.info["cmdline"] or [process.info["name"]]
        if any(FOLDERS in word for word in words) or words[0].startswith("ray::"):
            yield f"{process.pid} {' '.join(words)}"


def left_behind(before: set[str]) -> list[str]:
    """What a run has left; processes that were killed may take a moment."""
    for _ in range(600):
        if not (left := sorted(set(of_runs()) - before)) and not set(Path("/dev/shm").glob("*plasma*")):
            break
        time.sleep(0.1)
    return left
