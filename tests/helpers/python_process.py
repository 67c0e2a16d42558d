"""Runs Python in a process of its own: the effect of an import can be seen only once in a process."""

import os
import subprocess
import sys
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
