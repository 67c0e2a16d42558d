"""OpenMP's variables in the commands: set before torch is loaded, unless users set them; quotas; freed memory."""

import platform
import sys

import pytest
from python_process import run_code, run_python

from fastgen.batch import threads

BLOCK = 64 << 20  # bytes
SHOWN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
# A stand-in for torch that prints the environment.
TORCH = f"""
import os
print(*(os.environ.get(name) for name in {SHOWN}))
os._exit(0)
"""
COMMANDS = {
    "transformers": "from fastgen.cli.transformers.command import main; main(['demo', __file__, 'out.txt'])",
    "fairseq generate": "from fastgen.cli.fairseq.command import generate; generate(['DATA', '--path', 'x'])",
    "fairseq eval_lm": "from fastgen.cli.fairseq.command import eval_lm; eval_lm(['DATA', '--path', 'x'])",
    "script": "import torch",
}


@pytest.fixture
def environment_at_torch(tmp_path):
    """Runs a command up to its import of torch; returns the variables of SHOWN at that time."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)

    def run(command: str) -> list[str]:
        if command.startswith("fairseq"):
            pytest.importorskip("fairseq")
        (tmp_path / "run.py").write_text(COMMANDS[command])
        program = ["-m", "fastgen", "run.py"] if command == "script" else ["run.py"]
        return run_python(*program, path=tmp_path, cwd=tmp_path).stdout.split()[-3:]

    return run


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in SHOWN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_spin_count_is_set_when_torch_is_loaded(command, environment_at_torch):
    assert environment_at_torch(command)[:2] == [str(threads.SPIN_COUNT), "None"]


@pytest.mark.parametrize("environ", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE"}], ids=["count", "policy"])
def test_variables_of_the_user_stay(environ):
    before = dict(environ)
    threads.set_variables(environ, 4, None)
    assert environ == before


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is the OpenMP of torch's wheels for Linux")
def test_libgomp_takes_the_spin_count(tmp_path):
    (tmp_path / "run.py").write_text("import torch; print(torch.ones(2).sum())")
    done = run_python("-m", "fastgen", "run.py", cwd=tmp_path, OMP_DISPLAY_ENV="VERBOSE")
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP here")
    assert f"GOMP_SPINCOUNT = '{threads.SPIN_COUNT}'" in done.stderr


def test_nothing_is_set_after_torch_is_loaded():
    code = "import os, torch; from fastgen.batch import threads; threads.set_openmp_variables(); print(os.environ)"
    assert "GOMP_SPINCOUNT" not in run_code(code)


@pytest.mark.parametrize(
    ("quota", "expected"), [(None, None), (1.5, "1"), (0.3, "1"), (2.0, "2"), (4.0, None), (9.0, None)]
)
def test_threads_do_not_exceed_the_quota(quota, expected):
    environ = {}
    threads.set_variables(environ, 4, quota)
    assert environ.get("OMP_NUM_THREADS") == expected
    threads.set_variables(environ := {"OMP_NUM_THREADS": "3"}, 4, quota)
    assert environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (1.5, 1), (0.3, 1), (2.0, 2), (9.0, 8)])
def test_cpus_of_the_quota_are_shared_among_workers(quota, expected, monkeypatch):
    monkeypatch.setattr(threads, "process_cpus", lambda: 8)
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    assert threads.usable_cpus() == threads.threads_per_worker(1) == expected
    assert threads.threads_per_worker(2) == max(1, expected // 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.threads_per_worker(2) == min(3, max(1, expected // 2))


VERSION_2 = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
VERSION_1 = {
    "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n1:name=systemd:/docker/abc\n",
    "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
QUOTA_OF_ROOT = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n"}
NESTED = {"cpu.max": 2, "a.scope/cpu.max": 3}
IN_A_GROUP = {"proc/self/cgroup": "0::/user.slice/a.scope\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (VERSION_2, 1.5),
        (VERSION_2 | {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (IN_A_GROUP | {"sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n"}, 3.0),
        (IN_A_GROUP | {f"sys/fs/cgroup/user.slice/{name}": f"{n}00000 100000\n" for name, n in NESTED.items()}, 2.0),
        (VERSION_1, 0.5),
        (VERSION_1 | {"sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "-1\n"}, None),
        # In a container the path is that of the host, and its folder is mounted as the root.
        ({name: text for name, text in VERSION_1.items() if "docker" not in name} | QUOTA_OF_ROOT, 2.0),
        ({"proc/self/cgroup": "3:cpuset:/\n0::/\n"}, None),
        ({"proc/self/cgroup": "0::/../b\n", "sys/fs/cgroup/cpu.max": "what is this\n"}, None),
        ({}, None),
    ],
)
def test_a_quota_is_read_from_control_groups(files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.cpu_quota(tmp_path) == expected


# Prints the pages that the second of two equal blocks needs, of which the first was freed.
BLOCKS = f"""
import ctypes, resource
from fastgen.batch import threads
threads.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t({BLOCK}))
    ctypes.memset(block, 1, {BLOCK})
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    libc.free(ctypes.c_void_p(block))
print(pages)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have settings of their own")
@pytest.mark.parametrize("environ", [{}, {"MALLOC_MMAP_THRESHOLD_": "131072"}], ids=["default", "of the user"])
def test_freed_memory_is_kept_unless_the_user_sets_malloc(environ):
    pages = int(run_code(BLOCKS, **environ))
    assert pages > BLOCK // 8192 if environ else pages < BLOCK // 65536
