"""A peer in an environment of its own: the process that runs its program, and the environment's folder.

The programs, and what they answer, are in peer_programs (answer.py). An environment is the folder `.venv-NAME` of the
checkout, with the packages of peer_programs/NAME.txt.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

Tokens = list[list[int]]

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "peer_programs"
LONGEST_ANSWER = 900  # seconds
# PyPI's builds of these need CUDA's libraries: beside a CPU build of torch they cannot be imported.
_NEED_CUDA = ("torchaudio", "torchvision", "torchcodec")


class Answer(NamedTuple):
    """One call of a peer. seconds: measured in its process; tokens: new ones of each row."""

    seconds: float
    tokens: Tokens


class PeerError(Exception):
    """A peer that has no figure: the message says why."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment. An empty name stands for this Python's."""

    name: str

    @property
    def folder(self) -> Path:
        return ROOT / f".venv-{self.name}"

    @property
    def requirements(self) -> Path:
        return PROGRAMS / f"{self.name}.txt"

    @property
    def command(self) -> str:
        """What installs it."""
        return f"python benchmarks/peers.py --install {self.name}"

    def python(self) -> str:
        """Its interpreter; raises PeerError where it is not installed."""
        if not self.name:
            return sys.executable
        python = self.folder / "bin" / "python"
        if not python.exists():
            raise PeerError(f"not installed: {self.command}")
        return str(python)

    def install(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        pip = [self.python(), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--requirement", str(self.requirements)], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *_NEED_CUDA], check=True)


def write_task(folder: Path, model: Any, inputs: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> None:
    """What programs read. arguments: of `generate`."""
    model.save_pretrained(folder / "model")
    torch.save(dict(inputs), folder / "inputs.pt")
    (folder / "arguments.json").write_text(json.dumps(dict(arguments)), encoding="utf-8")


class PeerProcess:
    """A peer that has loaded its model. A context manager, which ends the process."""

    def __init__(
        self,
        environment: Environment,
        program: str,
        folder: Path,
        dtype: str,
        threads: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """folder: what `write_task` has written. Raises PeerError where the peer cannot do this work.

        variables: of the process's environment, besides this one's.
        """
        self._errors = Path(tempfile.mkdtemp(dir=folder)) / "stderr"
        command = [environment.python(), str(PROGRAMS / program), str(folder), dtype, str(threads)]
        pipe = subprocess.PIPE
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **(variables or {})}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, env=variables, start_new_session=True
            )
        try:
            self.versions: dict[str, str] = self._read()["versions"]
        except PeerError:
            self.close()
            raise

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self) -> Answer:
        """Raises PeerError."""
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._end()) from None
        told = self._read()
        return Answer(told["seconds"], told["tokens"])

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it has started
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        """Its next answer. Raises PeerError: with its reason, with how it ended, or if it does not answer."""
        if not select.select([self._process.stdout], [], [], LONGEST_ANSWER)[0]:
            raise PeerError(f"no answer within {LONGEST_ANSWER} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._end())
        told = json.loads(line)
        if "reason" in told:
            raise PeerError(told["reason"])
        return told

    def _end(self) -> str:
        status = self._process.wait()
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        lines = self._errors.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing on standard error")
        return f"ended with status {status}: {last}"
