"""docs/public-api.md names everything that is public."""

from __future__ import annotations

import re

from python_process import REPOSITORY

import fastgen


def test_the_page_of_public_names_has_those_of_fastgen():
    page = (REPOSITORY / "docs" / "public-api.md").read_text(encoding="utf-8")
    table = page.partition("**Not public**")[0]
    assert sorted(re.findall(r"`fastgen\.(\w+)`", table)) == sorted([*fastgen.__all__, "__version__"])
