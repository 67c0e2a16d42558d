"""Tests of what older versions of a library do not do, or do wrong by themselves."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(library: str, lowest: str, why: str) -> pytest.MarkDecorator:
    """A mark that skips where `library` is older than `lowest`, because of `why`."""
    return pytest.mark.skipif(Version(version(library)) < Version(lowest), reason=f"{library} before {lowest}: {why}")
