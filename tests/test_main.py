"""`python -m fastgen` prints a report, or runs a program as Python would."""

from importlib.util import find_spec

import pytest
from python_process import REPOSITORY, run_python

import fastgen
from fastgen.ops import OPERATIONS
from fastgen.optimizer import PATCHES
from fastgen.optimizer.decoding.cost_model import CPU

SHOW = """
import sys
from pathlib import Path
print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name, __doc__, sep="\\n")
number: 1 = 0
print(sys.modules["__main__"].__dict__ is globals(), "main" in globals(), __annotations__)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "show.py").write_text(SHOW)
    (tmp_path / "sub" / "__main__.py").write_text(SHOW)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(SHOW)
    return tmp_path


def same_as_python(folder, *args):
    """Runs a program with and without fastgen; fails unless both print and exit alike."""
    plain = run_python(*args, cwd=folder)
    under = run_python("-m", "fastgen", *args, cwd=folder)
    assert (under.stdout, under.returncode) == (plain.stdout, plain.returncode)
    return under


@pytest.mark.parametrize(
    "args",
    [
        ["sub/show.py", "-m", "--help", "--", "x"],
        ["sub"],
        ["-m", "package", "--version", "x"],
        ["-m", "sub.show", "-h"],
    ],
    ids=["script", "folder", "package", "module"],
)
def test_a_program_sees_the_same_as_under_python(folder, args):
    args = [str(folder / "sub") if word == "sub" else word for word in args]
    assert "__main__" in same_as_python(folder, *args).stdout


@pytest.mark.parametrize(
    ("ending", "status"),
    [("sys.exit(3)", 3), ("sys.exit('message')", 1), ("raise KeyError(1)", 1), ("sys.exit()", 0), ("def", 1)],
)
def test_a_program_ends_with_its_own_status(folder, ending, status):
    (folder / "ending.py").write_text(f"import sys\n{ending}\n")
    under = same_as_python(folder, "ending.py")
    assert under.returncode == status
    if status == 1:
        assert under.stderr.splitlines()[-1] == run_python("ending.py", cwd=folder).stderr.splitlines()[-1]


def test_a_program_runs_with_the_patches_armed(folder):
    (folder / "armed.py").write_text("import sys; print([str(s.state) for s in sys.modules['fastgen'].status()][0])")
    for auto in ("0", "1"):  # running a program under fastgen asks for it
        assert run_python("-m", "fastgen", "armed.py", cwd=folder, FASTGEN_AUTO=auto).stdout.strip() == "pending"


def test_threads_and_workers_find_the_main_module(folder):
    (folder / "late.py").write_text(
        """
import multiprocessing, pickle, sys, threading

def function(x):
    return x + 1

def late():
    threading.main_thread().join()
    print(pickle.loads(pickle.dumps(function))(1))

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(function, [1, 2]))
    threading.Thread(target=late).start()
    sys.exit(0)
"""
    )
    assert same_as_python(folder, "late.py").stdout == "[2, 3]\n2\n"


def test_a_missing_program_is_one_clear_line(folder):
    missing = run_python("-m", "fastgen", "no_such.py", "x", cwd=folder)
    assert missing.returncode == 2
    assert missing.stderr == "python -m fastgen: can't open file 'no_such.py': no such file\n"
    missing = same_as_python(folder, "-m", "no_such_module.x")
    assert missing.stderr.startswith("python -m fastgen: cannot find 'no_such_module.x': ")
    assert missing.stderr.count("\n") == 1
    assert run_python("-m", "fastgen", "-m").stderr == "python -m fastgen: -m needs the name of a module\n"
    unknown = run_python("-m", "fastgen", "--no-such-option", "x.py")
    assert unknown.returncode == 2 and "unrecognized arguments: --no-such-option" in unknown.stderr


def test_help_and_version_are_printed():
    assert run_python("-m", "fastgen", "--version").stdout == f"fastgen {fastgen.__version__}\n"
    assert "SCRIPT [ARGUMENT ...]" in run_python("-m", "fastgen", "--help").stdout


def test_the_report_shows_patches_and_kernels_in_one_screen():
    transformers = pytest.importorskip("transformers")
    done = run_python("-m", "fastgen")
    assert done.returncode == 0 and done.stderr == "", done.stderr  # nothing that hosts log at their import
    lines = done.stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    assert lines[0].startswith(f"fastgen {fastgen.__version__}, Python ")
    assert f"transformers {transformers.__version__}" in lines[0]
    assert lines[1].startswith(f"runs from the source tree {REPOSITORY}")
    assert f"Rates of a CPU: {CPU}" in lines
    states = [line.split()[:2] for line in lines[lines.index("Patches") + 1 : lines.index("Kernels") - 1]]
    groups = dict.fromkeys(patch.group for patch in PATCHES if find_spec(patch.host))
    assert [name for name, _ in states if name != "fairseq"] == list(groups)
    assert {state for name, state in states if name.startswith("transformers.")} == {"applied"}
    kernels = [line.split() for line in lines[lines.index("Kernels") + 1 :]]
    assert len(kernels) == len(OPERATIONS) and kernels[0][:2] == ["shared", "attention"]
    assert all("torch" in words or "BLAS" in words for words in kernels)


def test_the_report_tells_why_a_host_is_not_patched(tmp_path):
    for host in ("transformers", "fairseq"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "__init__.py").write_text("raise ImportError('broken installation')")
    done = run_python("-m", "fastgen", path=tmp_path)
    assert done.returncode == 0, done.stderr
    reason = "import transformers.generation.utils: ImportError: broken installation"
    assert done.stdout.count(f"pending  {reason}") == 2  # shared_caches, loops
    done = run_python("-m", "fastgen", FASTGEN_DISABLE="1", path=tmp_path)
    assert "\nNothing is patched: FASTGEN_DISABLE=1.\n" in done.stdout


INSTALLATION = """
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from fastgen.__main__ import _source_tree

folders = {folders}
read_text = lambda name: {direct_url!r}
installed = lambda folder: SimpleNamespace(locate_file=lambda file: Path(folder, file), read_text=read_text)
metadata.distributions = lambda name: map(installed, folders)
print(*_source_tree(Path({tree!r})), sep="\\n")
"""


def source_tree_lines(tree, folders, direct_url=None):
    """Returns what the report says of `tree` if fastgen is installed in `folders`."""
    code = INSTALLATION.format(tree=str(tree), folders=list(map(str, folders)), direct_url=direct_url)
    return run_python("-c", code).stdout.splitlines()


def test_the_report_names_the_source_tree_it_runs_from(tmp_path):
    tree, site = tmp_path / "checkout", tmp_path / "site-packages"
    for folder in (tree / "fastgen", site / "fastgen"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    assert source_tree_lines(site, [site]) == [""]
    (tree / "setup.py").touch()
    runs = f"runs from the source tree {tree}"
    assert source_tree_lines(tree, [tree]) == [f"{runs}, not installed: pip install -e {tree}"]
    hidden = source_tree_lines(tree, [tree, site])
    assert hidden[0] == runs and hidden[1].startswith(f"It hides the fastgen installed in {site}, ")
    assert hidden[2] == f"Use another folder, or pip install -e {tree}"
    (site / "fastgen" / "__init__.py").unlink()
    assert source_tree_lines(tree, [site], '{"dir_info": {"editable": true}}') == [runs]
