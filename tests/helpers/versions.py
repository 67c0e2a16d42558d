"""Tests of what older versions of a library do not do, or do wrong by themselves."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.version import Version
from transformers.integrations import peft as integration


def needs(library: str, lowest: str, why: str) -> pytest.MarkDecorator:
    """A mark that skips where `library` is older than `lowest`, because of `why`."""
    return pytest.mark.skipif(Version(version(library)) < Version(lowest), reason=f"{library} before {lowest}: {why}")


def has_peft() -> bool:
    """Whether transformers takes adapters of the peft that is installed, which may be too old for it."""
    try:
        return Version(version("peft")) >= Version(getattr(integration, "MIN_PEFT_VERSION", "0"))
    except PackageNotFoundError:
        return False


needs_peft = pytest.mark.skipif(not has_peft(), reason="no peft that this transformers can use")
