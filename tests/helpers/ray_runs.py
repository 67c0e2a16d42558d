"""Workers in processes of Ray: how to change what one does, a cluster on this machine, and what is left of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

FOLDERS = "fastgen-ray-"
# Python runs this in every process that begins with the folder on its path, before anything else.
CHANGED = """
import os, wrapt
def change(pipeline):
{code}
wrapt.register_post_import_hook(change, "fastgen.batch.pipeline")
"""
# A worker ends when it gets one of these lines: each time, or the first time only, where ONCE is a file to make.
POISON = """
    generate = pipeline.SplitOnOOM.__call__
    def ending(self, batch, start=0):
        if {int(word) for word in os.environ["POISON"].split()} & {item.line.number for item in batch.items}:
            once = os.environ.get("ONCE")
            try:
                once and os.close(os.open(once, os.O_CREAT | os.O_EXCL))
                os._exit(9)
            except FileExistsError:
                pass
        return generate(self, batch, start)
    pipeline.SplitOnOOM.__call__ = ending
"""


def changed(folder: Path, code: str) -> str:
    """The PYTHONPATH of processes that are to run `code` behind the import of fastgen's pipeline."""
    (folder / "sitecustomize.py").write_text(CHANGED.format(code=code))
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


class Cluster:
    """Nodes of Ray on this machine: one for drivers, and one for each number of CPUs in `cpus`.

    In a process of its own: a process in which a run had a Ray with a token cannot use one that has none.
    """

    CODE = """
import sys
from ray.cluster_utils import Cluster
memory, *cpus = sys.argv[1:]
options = {"object_store_memory": int(memory), "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
nodes = [cluster.add_node(num_cpus=int(number), **options) for number in cpus]
print("address", cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""

    def __init__(self, *cpus: int, memory: int = 80 << 20) -> None:
        self._folder = tempfile.mkdtemp(prefix=FOLDERS, dir="/tmp")  # paths of sockets are short
        call = [sys.executable, "-c", self.CODE, str(memory), *map(str, cpus)]
        into = {**os.environ, "RAY_TMPDIR": self._folder}
        self._process = subprocess.Popen(call, env=into, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._wait("address")

    def remove_node(self) -> None:
        """Kills the last one, and waits for the end of its worker, which sees only later that its node is gone."""
        before = workers()
        print(file=self._process.stdin, flush=True)
        self._wait("removed")
        while not before - workers():
            time.sleep(0.05)

    def end(self) -> None:
        self._process.communicate()
        shutil.rmtree(self._folder)

    def _wait(self, word: str) -> str:
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise RuntimeError("the cluster has ended")


def workers() -> set[int]:
    """The processes of this machine that have a model."""
    found = psutil.process_iter(["cmdline"])
    return {process.pid for process in found if (process.info["cmdline"] or [""])[0].startswith("ray::Worker")}


def of_runs() -> dict[str, str]:
    """Processes, folders and shared memory that runs with workers have begun: what each is now called, by identity.

    A process changes its title while it lives.
    """
    places = [*Path("/tmp").glob(f"{FOLDERS}*"), *Path("/dev/shm").glob("*plasma*")]
    found = {str(place): str(place) for place in places}
    for process in psutil.process_iter(["cmdline", "name", "create_time"]):
        words = process.info["cmdline"] or [process.info["name"]]
        if any(FOLDERS in word for word in words) or words[0].startswith("ray::"):
            found[f"{process.pid} {process.info['create_time']}"] = f"{process.pid} {' '.join(words)}"
    return found


def titles(before: dict[str, str]) -> list[tuple[int, str]]:
    """The processes that runs have begun since, by number, and what each is now called."""
    since = [name.partition(" ") for identity, name in of_runs().items() if identity not in before]
    return [(int(pid), title) for pid, _, title in since if pid.isdecimal()]


def left_behind(before: dict[str, str]) -> list[str]:
    """What a run has left; processes that were killed may take a moment."""
    for _ in range(600):
        if not (left := [name for identity, name in of_runs().items() if identity not in before]):
            break
        time.sleep(0.1)
    return left
