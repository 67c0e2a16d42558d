"""Rules that no linter has: words of decoding, lengths of functions, names of tests, and the tests of a module."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tools.changed_tests import has_code, named_tests

ROOT = Path(__file__).parent.parent
HOSTS = re.compile("transformers|fairseq|hugging ?face", re.IGNORECASE)


def test_decoding_names_no_host():
    """It serves any host: facts of one would be wrong for the next."""
    files = sorted((ROOT / "fastgen/optimizer/decoding").glob("*.py"))
    lines = [(file.name, line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 500
    assert [(name, line) for name, line in lines if HOSTS.search(re.sub(r"tests/\S+", "", line))] == []


def test_functions_of_the_core_have_at_most_60_lines():
    files = [path for folder in ("ops", "optimizer") for path in (ROOT / "fastgen" / folder).rglob("*.py")]
    nodes = [(path.name, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    functions = [(name, node) for name, node in nodes if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 500
    assert [(name, node.name) for name, node in functions if node.end_lineno - node.lineno >= 60] == []


def test_names_of_tests_are_unique_in_the_project():
    places = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                places[node.name].append(str(file.relative_to(ROOT)))
    assert len(places) > 1000
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize("name", ["core.txt", "check.txt"])
def test_lists_of_tests_name_tests_that_exist(name):
    for line in (ROOT / "tests" / name).read_text(encoding="utf-8").splitlines():
        file, _, test = line.partition("::")
        assert (ROOT / file).exists(), line
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), line


def test_modules_name_the_tests_that_cover_them():
    """The docstring of each module that has code ends with `Tests:` and their paths."""
    modules = [path for path in sorted((ROOT / "fastgen").rglob("*.py")) if has_code(path)]
    assert len(modules) > 30
    assert [str(path) for path in modules if not named_tests(path)] == []
    assert [(str(path), name) for path in modules for name in named_tests(path) if not (ROOT / name).exists()] == []
