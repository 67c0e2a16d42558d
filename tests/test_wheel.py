"""One wheel serves all versions of Python: its kernels load and run in each installed one, without a compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from python_process import REPOSITORY

OLDEST = (3, 10)
# Loads each kernel with ctypes, as fastgen does, and normalizes two rows with those that this CPU can run.
LOADS = """
import ctypes, pathlib, sys
site, flags = pathlib.Path(sys.argv[1]), pathlib.Path("/proc/cpuinfo").read_text().split()
needs = {"_x86_avx2": "avx2", "_x86_avx512": "avx512f", "_x86_avx512_bf16": "avx512_bf16"}
for path in sorted(site.rglob("*.so")):
    library, instructions = ctypes.CDLL(str(path)), needs.get(path.stem)
    if instructions in flags:
        library.fastgen_threads(None, None, None)
        rows, weight, output = (ctypes.c_float * 8)(*range(8)), (ctypes.c_float * 4)(1, 2, 3, 4), (ctypes.c_float * 8)()
        norm = library.fastgen_rms_norm
        norm.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float, ctypes.c_int32]
        norm(rows, weight, output, 2, 4, 0.0, 1)
        for row in range(2):
            values = rows[4 * row : 4 * row + 4]
            scale = (sum(value * value for value in values) / 4) ** -0.5
            expected = [value * scale * factor for value, factor in zip(values, weight)]
            assert all(abs(a - b) < 1e-5 for a, b in zip(output[4 * row : 4 * row + 4], expected))
    print(path.stem)
"""


def pythons() -> list[str]:
    """Returns the interpreters of pyenv that fastgen supports, or this one."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    versions = sorted(path for path in root.glob("3.*/bin/python") if _version(path) >= OLDEST)
    return [str(path) for path in versions] or [sys.executable]


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.parents[1].name.split(".")[:2])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("fastgen", "csrc"):
        shutil.copytree(REPOSITORY / name, sources / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, sources)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    done = subprocess.run(
        [*pip, folder, sources], capture_output=True, text=True, env=os.environ | {"CUDA_HOME": str(folder)}
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have kernels of other names")
def test_the_kernels_of_one_wheel_run_under_each_python(wheel, tmp_path):
    assert "-py3-none-linux_" in wheel.name and wheel.stat().st_size < 4 << 20  # most of it the demo model
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path)
    kernels = {path.stem for path in tmp_path.rglob("*.so")}
    assert "_cpu" in kernels
    for python in pythons():
        done = subprocess.run([python, "-c", LOADS, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, f"{python}: {done.stderr}"
        assert set(done.stdout.split()) == kernels
