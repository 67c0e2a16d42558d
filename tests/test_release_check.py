"""`make release-check` refuses a changelog, a tag or files of distributions that are not those of the version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from python_process import REPOSITORY

import fastgen
from tools import release_check

CHANGELOG = "# Changes\n\n## 0.2.0, 1 December 2026\n\n- Faster.\n\n## 0.1.0, not yet released\n"
WHEEL = "fastgen_generate-0.2.0-py3-none-manylinux_2_28_x86_64.whl"


def test_the_changelog_begins_with_the_version():
    text = Path(release_check.ROOT, "CHANGELOG.md").read_text(encoding="utf-8")
    assert release_check.changelog_problems(text, fastgen.__version__, "") == []


@pytest.mark.parametrize(
    ("version", "tag", "problem"),
    [
        ("0.2.0", "v0.2.0", None),
        ("0.3.0", "", "an entry for 0.3.0"),
        ("0.2.0", "v0.2.1", "the tag is v0.2.1 (accepted: v0.2.0)"),
        ("0.3.0.dev0", "", None),
        ("0.3.0.dev0", "v0.3.0", "0.3.0.dev0 is not a release"),
    ],
)
def test_a_release_has_an_entry_and_its_tag(version, tag, problem):
    problems = release_check.changelog_problems(CHANGELOG, version, tag)
    assert problems == [] if problem is None else len(problems) == 1 and problem in problems[0]


def test_a_tagged_version_has_a_date():
    (problem,) = release_check.changelog_problems(CHANGELOG.replace("1 December 2026", "soon"), "0.2.0", "v0.2.0")
    assert "dates 0.2.0 'soon'" in problem


def test_a_release_is_sources_and_small_wheels(tmp_path, monkeypatch):
    assert len(release_check.distribution_problems(tmp_path, "0.2.0")) == 2
    for name in (WHEEL, "fastgen_generate-0.2.0.tar.gz"):
        (tmp_path / name).write_bytes(b"12345")
    assert release_check.distribution_problems(tmp_path, "0.2.0") == []
    monkeypatch.setattr(release_check, "MAX_WHEEL_BYTES", 5)
    (tmp_path / "fastgen_generate-0.1.0.tar.gz").touch()
    other, large = release_check.distribution_problems(tmp_path, "0.2.0")
    assert other.startswith("fastgen_generate-0.1.0.tar.gz is none of") and "has 5 bytes" in large


BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
IN_A_WORKFLOW = {"SERVER_URL": "https://example.org", "REPOSITORY": "some/fork", "REF_NAME": "v0.2.0"}


def sources(folder: Path, variables: dict[str, str]) -> Path:
    """Returns the archive of sources that is built of a copy of the checkout, with these variables of a workflow."""
    checkout = folder / "checkout"
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "data")
    for name in ("fastgen", "csrc", "tests"):
        shutil.copytree(REPOSITORY / name, checkout / name, ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, checkout)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    environment = clean | {f"GITHUB_{name}": value for name, value in variables.items()}
    subprocess.run(
        [sys.executable, "-c", BUILD, folder], cwd=checkout, env=environment, check=True, capture_output=True
    )
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_the_package_index_shows_links_that_lead_to_the_tag(tmp_path):
    archive = sources(tmp_path, IN_A_WORKFLOW)
    assert release_check.metadata_problems(archive) == []
    with tarfile.open(archive) as opened:
        text = opened.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO").read().decode()
    assert "\nProject-URL: Repository, https://example.org/some/fork\n" in text
    assert "\nDescription-Content-Type: text/markdown\n" in text
    for link in ("raw/v0.2.0/docs/speed.svg", "blob/v0.2.0/docs/commands.md", "blob/v0.2.0/CONTRIBUTING.md"):
        assert f"](https://example.org/some/fork/{link})" in text


def test_a_release_without_an_address_is_refused(tmp_path):
    relative, addresses = release_check.metadata_problems(sources(tmp_path, {}))
    assert "links to docs/" in relative and "GITHUB_REPOSITORY" in relative
    assert addresses.endswith("has no addresses of the project")


def test_sources_with_tests_are_refused(tmp_path):
    (tmp_path / "PKG-INFO").write_text("Name: x\nProject-URL: Repository, https://example.org\n")
    archive = tmp_path / "x-1.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("PKG-INFO", "tests/test_x.py"):
            packed.add(tmp_path / "PKG-INFO", f"x-1/{name}")
    (problem,) = release_check.metadata_problems(archive)
    assert problem == "x-1.tar.gz has x-1/tests/test_x.py, but not all that it needs"
