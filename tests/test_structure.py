"""Rules that no linter has: words of decoding, lengths of functions, names and lists of tests, versions."""

import ast
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from fastgen.models import LOWEST as OF_MODELS
from fastgen.optimizer import fairseq
from tools.changed_tests import has_code, named_tests

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest has brought it

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


PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def wanted():
    """The requirements of each extra, and those that every installation has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in extras.items()}


def constraints(python: str) -> dict[str, SpecifierSet]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(line.name): line.specifier for line in map(Requirement, lines) if holds(line, python)}


def holds(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


@pytest.mark.parametrize("python", PYTHONS)
def test_no_extra_refuses_the_version_of_the_constraints(wanted, python):
    left = constraints(python)
    checked = 0
    for extra, requirements in wanted.items():
        for requirement in requirements:
            for allowed in left.get(canonicalize_name(requirement.name), SpecifierSet()):
                if holds(requirement, python) and allowed.operator == "==":
                    assert requirement.specifier.contains(allowed.version), f"[{extra}] {requirement}: {allowed}"
                    checked += 1
    assert checked > 10


LOWEST = {**OF_MODELS, "fairseq": fairseq.LOWEST}
ROWS = json.loads((ROOT / "tools" / "matrix" / "results.json").read_text())


@pytest.mark.parametrize("host", LOWEST)
def test_the_matrix_begins_with_the_lowest_version(host):
    ran = sorted({Version(row[host]) for row in ROWS if row.get(host)})
    assert str(ran[0]) == LOWEST[host]
    assert [(row["name"], row["failed"]) for row in ROWS if row.get("failed")] == []
