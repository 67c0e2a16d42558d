"""One wheel serves all versions of Python: installed without a compiler, its kernels compute in each that is here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_builds import NATIVE
from kernel_cases import all_cases, play_cases, write_cases
from python_process import REPOSITORY

from fastgen.ops import simd
from tools.release_check import MAX_WHEEL_BYTES

OLDEST = (3, 10)
PLAYER = REPOSITORY / "tests" / "helpers" / "kernel_player.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("wheel"),  # otherwise each worker would make one, in two minutes
    pytest.mark.skipif(sys.platform != "linux", reason="other platforms have kernels of other names"),
]


def pythons() -> list[str]:
    """Returns the interpreters of pyenv that fastgen supports, or this one."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    versions = sorted(path for path in root.glob("3.*/bin/python") if _version(path) >= OLDEST)
    return [str(path) for path in versions] or [sys.executable]


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.parents[1].name.split(".")[:2])


def run(*command: object, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make wheel` has made, if WHEEL_TO_TEST names it, or one made of the checkout."""
    if ready := os.environ.get("WHEEL_TO_TEST"):
        return Path(ready)
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    for name in ("fastgen", "csrc"):
        shutil.copytree(REPOSITORY / name, sources / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, sources)
    options = "--no-deps", "--no-build-isolation", "--wheel-dir", folder
    run(sys.executable, "-m", "pip", "wheel", *options, sources, env=os.environ | {"CUDA_HOME": str(folder)})
    (built,) = folder.glob("*.whl")
    return built


def installed(wheel: Path, python: str, folder: Path) -> Path:
    """Returns where the wheel is after its installation into a new environment of this Python; no compiler is found."""
    run(python, "-m", "venv", "--without-pip", folder)
    own = folder / "bin" / "python"
    options = "--quiet", "--no-deps", "--no-index", "--no-compile"
    run(sys.executable, "-m", "pip", "--python", own, "install", *options, wheel, env=os.environ | {"PATH": ""})
    (site,) = folder.glob("lib/python3*/site-packages")
    return site


def test_a_wheel_is_for_all_pythons_and_small(wheel: Path) -> None:
    assert "-py3-none-" in wheel.name
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_the_kernels_of_one_wheel_run_under_each_python(wheel: Path, tmp_path: Path) -> None:
    cases = all_cases()
    inputs = write_cases(cases, tmp_path)  # before an output is right, which no library may find there
    for number, python in enumerate(pythons()):
        site = installed(wheel, python, tmp_path / str(number))
        ngrams = site / "fastgen/ops/no_repeat_ngram/_cpu.so"
        for instructions in filter(simd._LIBRARIES.get, NATIVE):
            library = site / f"fastgen/ops/{simd._LIBRARIES[instructions]}.so"
            play_cases([tmp_path / str(number) / "bin/python", PLAYER, library, ngrams], inputs, cases)
            for case in cases:
                case.check()


def test_the_installed_wheel_says_which_build_runs(wheel: Path, tmp_path: Path) -> None:
    """With the torch and the transformers of this Python, from a folder that is no checkout."""
    site = installed(wheel, sys.executable, tmp_path / "here")
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    report = run(tmp_path / "here/bin/python", "-m", "fastgen", cwd=tmp_path, env=environment)
    assert f"C++ kernels: those for {simd.instructions()}\n" in report
    assert "runs from the source tree" not in report
