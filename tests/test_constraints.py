"""Versions: constraints.txt suits the extras for every supported Python; tested ranges are those of the matrix."""

import json
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from fastgen.optimizer import fairseq, transformers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest has brought it

ROOT = Path(__file__).parent.parent
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


TESTED = {"transformers": transformers.TESTED, "fairseq": fairseq.TESTED}
ROWS = json.loads((ROOT / "tools" / "matrix" / "results.json").read_text())


@pytest.mark.parametrize("host", TESTED)
def test_tested_versions_are_those_of_the_matrix(host):
    ran = sorted({Version(row[host]) for row in ROWS if row.get(host)})
    assert (str(ran[0]), str(ran[-1])) == TESTED[host]
    assert [(row["name"], row["failed"]) for row in ROWS if row["failed"]] == []
