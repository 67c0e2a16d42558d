"""`make` recognizes an environment in which somebody else has installed this checkout."""

import json
import os
from pathlib import Path

import pytest

from tools import is_installed


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that writes an installation of the folder `checkout`, as pip does, with a time of its own."""
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.setattr(is_installed.sys, "path", [str(site)])

    def write(source: dict | None, seconds: float = 1000.0) -> Path:
        folder = site / "fastgen_generate-0.1.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fastgen-generate\nVersion: 0.1\n")
        if source is not None:
            (folder / "direct_url.json").write_text(json.dumps(source))
        (folder / "RECORD").touch()
        os.utime(folder / "RECORD", (seconds, seconds))
        return checkout

    return write


def source_of(tmp_path: Path, folder: str = "checkout", editable: bool = True) -> dict:
    return {"url": (tmp_path / folder).as_uri(), "dir_info": {"editable": True} if editable else {}}


def test_an_editable_installation_of_the_checkout_is_used(install, tmp_path):
    checkout = install(source_of(tmp_path))
    kernel = checkout / "kernel.cpp"
    kernel.touch()
    os.utime(kernel, (999.0, 999.0))
    assert is_installed.is_installed(checkout, [kernel])
    os.utime(kernel, (1001.0, 1001.0))
    assert not is_installed.is_installed(checkout, [kernel])


@pytest.mark.parametrize(
    "source", [{"folder": "another"}, {"editable": False}, None], ids=("another", "copied", "of an index")
)
def test_another_installation_is_not_used(install, tmp_path, source):
    assert not is_installed.is_installed(install(source and source_of(tmp_path, **source)), [])


def test_nothing_installed_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(is_installed.sys, "path", [str(tmp_path)])
    assert not is_installed.is_installed(tmp_path, [])
