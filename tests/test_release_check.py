"""`make release-check` refuses a changelog, a tag or files of distributions that are not those of the version."""

from __future__ import annotations

from pathlib import Path

import pytest

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
