"""Another project's fastgen on `sys.path`: the first patch and `python -m fastgen` say so in one line."""

import os
import sys
import types

import pytest
from python_process import REPOSITORY, run_python

from fastgen.patching import Patch, PatchSet
from fastgen.patching.namesakes import notice


@pytest.fixture
def packages(tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("fastgen-0.3.1.dist-info", "fastgen 0.3.1 in "),
        ("FastGen-1.0.dist-info", "fastgen 1.0 in "),
        ("fastgen.egg-info", "fastgen in "),
        ("fastgen-2-py3.11.egg-info", "fastgen 2-py3.11 in "),
    ],
)
def test_a_distribution_called_fastgen_is_named(monkeypatch, packages, name, shown):
    monkeypatch.setattr(sys, "path", [str(packages)])
    assert notice() == ""
    (packages / name).mkdir()
    assert notice().startswith(f"{shown}{packages} is another project")
    assert notice().count("\n") == 0 and str(REPOSITORY / "fastgen") in notice()


def test_a_module_fastgen_of_another_project_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "fastgen").mkdir()
    assert notice() == ""  # a folder without code
    (tmp_path / "fastgen" / "__init__.py").touch()
    assert notice().startswith(f"{tmp_path / 'fastgen'} is another project")


def test_fastgen_itself_is_not_another_project(monkeypatch, packages):
    """A checkout, an installation beside it, and entries of `sys.path` that are no folders."""
    for name in ("fastgen_generate-0.1.0.dist-info", "fastgen_generate.egg-info", "fastgens-1.dist-info", "fastgen"):
        (packages / name).mkdir()
    (packages / "fastgen" / "patching").mkdir()
    (packages / "fastgen" / "patching" / "patch_set.py").touch()
    (packages / "fastgen" / "__init__.py").touch()
    odd = ["", "no/such/site-packages", "a\0b", packages, 3, None]
    monkeypatch.setattr(sys, "path", [str(REPOSITORY), str(packages), *odd])
    assert notice() == ""


def test_the_first_patch_logs_the_notice_once(monkeypatch, caplog):
    host = types.ModuleType("namesake_host")
    host.first, host.second = (lambda: 1), (lambda: 2)
    monkeypatch.setitem(sys.modules, "namesake_host", host)
    patches = [
        Patch(name, f"namesake_host:{name}", f"{__name__}:replacement", lowest="0", parameters=(), group=name)
        for name in ("first", "second")
    ]
    patch_set = PatchSet(patches, notice=lambda: "another fastgen is installed")
    assert caplog.messages == []
    patch_set.arm()
    patch_set.arm(again=True)
    assert caplog.messages.count("another fastgen is installed") == 1
    patch_set.revert()


def replacement(original):
    return original()


@pytest.mark.parametrize("host", ["transformers"])
def test_python_m_fastgen_says_which_project_it_is_not(packages, host):
    """In its report, not again on stderr; a program's first patch warns on stderr."""
    pytest.importorskip(host)
    (packages / "fastgen-0.3.1.dist-info").mkdir()
    search = os.pathsep.join([str(REPOSITORY), str(packages)])
    done = run_python("-m", "fastgen", PYTHONPATH=search)
    line = f"fastgen 0.3.1 in {packages} is another project"
    assert done.stdout.count(line) == 1 and line not in done.stderr
    program = f"import fastgen; print('before'); import {host}.generation.utils"
    done = run_python("-c", program, PYTHONPATH=search)
    assert (done.returncode, done.stdout) == (0, "before\n")
    assert done.stderr.count(line) == 1
