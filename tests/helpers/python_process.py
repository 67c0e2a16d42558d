"""Runs Python in a process of its own: the effect of an import can be seen only once in a process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_python(*args: str, path: Path | str = "", cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """Runs `python args...` with fastgen and the modules in `path` importable, and no FASTGEN variables but `env`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FASTGEN_")}
    search = os.pathsep.join([str(path), str(REPOSITORY)] if path else [str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, *args],
        env=clean | {"PYTHONPATH": search} | env,
        cwd=cwd or REPOSITORY,
        capture_output=True,
        text=True,
    )


def run_functions(file: str, *names: str, **env: str) -> None:
    """Calls functions of a test file in a process of its own, such as those for which Triton must be imported anew."""
    path = Path(file)
    calls = "".join(f"{path.stem}.{name}()\n" for name in names)
    run_code(f"import {path.stem}\n{calls}", os.pathsep.join(map(str, (path.parent, Path(__file__).parent))), **env)


def run_code(code: str, path: Path | str = "", **env: str) -> str:
    """Returns the output of `code`; fails with its stderr if its exit status is not 0."""
    done = run_python("-c", code, path=path, **env)
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


# Each program runs in a fork of a process that has imported the libraries, and prints into a file.
FORKS = """
import json, os, sys, traceback
import torch, transformers

for number, code in enumerate(json.loads(sys.argv[1])):
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"exit status {status} of this program:\\n{code}"
    else:
        sys.argv[1:] = []
        os.dup2(os.open(f"{sys.path[0]}/{number}", os.O_CREAT | os.O_WRONLY), 1)
        exec(code, {"__name__": "__main__"})
        sys.exit()
"""


def run_programs(codes: Sequence[str], folder: Path, **env: str) -> list[str]:
    """Returns the outputs of programs that import transformers; fails with the stderr of the first that fails."""
    (folder / "forks.py").write_text(FORKS)
    done = run_python(str(folder / "forks.py"), json.dumps([*codes]), **env)
    assert not done.returncode, done.stderr
    return [(folder / str(number)).read_text() for number in range(len(codes))]
