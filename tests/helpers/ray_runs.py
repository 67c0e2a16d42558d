"""Workers in processes of Ray: a cluster on this machine, and a way to change the code of a worker."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

# Python runs this first in every process that has the folder on its path.
SITE = """
import pathlib, wrapt
code = pathlib.Path(__file__).with_name("change.py")
wrapt.register_post_import_hook(lambda pipeline: exec(code.read_text(), vars(pipeline)), {module!r})
"""


def changed(folder: Path, code: str) -> str:
    """Returns a PYTHONPATH for processes that run `code` inside fastgen's pipeline after they have imported it."""
    (folder / "sitecustomize.py").write_text(SITE.format(module="fastgen.batch.pipeline"))
    (folder / "change.py").write_text(code)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


class Cluster:
    """Nodes of Ray on this machine, in a process of its own: one for drivers, and one for each number in `cpus`."""

    CODE = """
import sys
from ray.cluster_utils import Cluster
memory, *cpus = map(int, sys.argv[1:])
options = {"object_store_memory": memory, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
nodes = [cluster.add_node(num_cpus=number, **options) for number in cpus]
print("address", cluster.address, flush=True)
for line in sys.stdin:
    if line == "remove\\n":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    else:
        nodes.append(cluster.add_node(num_cpus=cpus[-1], **options))
    print("done", flush=True)
cluster.shutdown()
"""

    def __init__(self, *cpus: int, memory: int = 80 << 20, **env: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="fastgen-ray-", dir="/tmp")  # paths of sockets are short
        call = [sys.executable, "-c", self.CODE, str(memory), *map(str, cpus)]
        env = {**os.environ, "RAY_TMPDIR": self._folder, "RAY_AUTH_MODE": "disabled", **env}
        self._process = subprocess.Popen(call, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._wait("address")

    def remove_node(self) -> None:
        """Kills the last node, and waits for the end of its worker, which sees only later that its node is gone."""
        workers = self._workers()
        self._ask("remove")
        while all(worker.is_running() for worker in workers):
            time.sleep(0.05)

    def add_node(self) -> None:
        """Puts a node in the place of the one that was removed."""
        self._ask("add")

    def end(self) -> None:
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)  # processes that were killed may still write

    def _ask(self, word: str) -> None:
        print(word, file=self._process.stdin, flush=True)
        self._wait("done")

    def _wait(self, word: str) -> str:
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise RuntimeError("the cluster has ended")

    def _workers(self) -> list[psutil.Process]:
        """Returns the processes of this cluster that have a model."""
        processes = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in processes if _command(process).startswith("ray::Worker")]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
