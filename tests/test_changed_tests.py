"""`make check CHANGED=1` selects the tests of changed files, in a repository that each test writes."""

import subprocess
from pathlib import Path

import pytest

from tools.changed_tests import changed_files, find_tests

FILES = {
    "fastgen/module.py": '"""Does it.\n\nTests: tests/test_one.py, tests/gpu/\n"""\ndef function(): ...\n',
    "fastgen/without.py": '"""Does it."""\ndef function(): ...\n',
    "fastgen/__init__.py": '"""Has names only."""\n',
    "csrc/kernel.cpp": "",
    "tests/helpers/models.py": "",
    "tests/helpers/cases.py": "import models\n",
    "tests/helpers/program.py": "",
    "tests/test_one.py": "from models import tiny\n",
    "tests/test_two.py": "from cases import CASES\n",
    "tests/test_three.py": 'PROGRAM = HELPERS / "program.py"\n',
    "tests/gpu/conftest.py": "",
}


@pytest.fixture
def repository(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Change")


def test_commits_of_the_branch_and_the_working_tree_count(repository):
    assert changed_files(repository) == []
    git(repository, "checkout", "--quiet", "-b", "branch")
    (repository / "csrc/kernel.cpp").write_text("// committed")
    (repository / "tests/test_two.py").unlink()
    commit(repository)
    (repository / "fastgen/module.py").write_text('"""Edited."""\n')
    (repository / "fastgen/added.py").write_text("")
    assert changed_files(repository) == ["csrc/kernel.cpp", "fastgen/added.py", "fastgen/module.py"]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("fastgen/module.py", {"tests/test_one.py", "tests/gpu/"}),
        ("fastgen/__init__.py", set()),
        ("csrc/kernel.cpp", {"tests/ops"}),
        ("tests/test_two.py", {"tests/test_two.py"}),
        ("tests/helpers/models.py", {"tests/test_one.py", "tests/test_two.py"}),
        ("tests/helpers/program.py", {"tests/test_three.py"}),
        ("tests/gpu/conftest.py", {"tests/gpu"}),
        ("LICENSE", set()),
    ],
)
def test_a_changed_file_has_its_tests(repository, changed, tests):
    assert find_tests(changed, repository) == tests


def test_a_module_that_names_no_tests_is_an_error(repository):
    with pytest.raises(LookupError, match=r"fastgen/without\.py has no tests: its docstring has to end in `Tests:`"):
        find_tests("fastgen/without.py", repository)
