"""A fairseq that Python cannot import: one line says which distribution works."""

from __future__ import annotations

import pytest
from python_process import run_python

OLD = """
from dataclasses import dataclass

@dataclass
class Config:
    common: list = []
"""
LINE = "the fairseq that is installed cannot be imported by Python"
HELP = "(accepted: ve-fairseq, the same code for Python 3.11 and newer)"


@pytest.fixture
def old_fairseq(tmp_path):
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "fairseq" / "__init__.py").write_text(OLD)
    return tmp_path


def test_a_program_gets_the_line_and_its_error(old_fairseq):
    done = run_python("-c", "import fastgen, fairseq", path=old_fairseq)
    assert done.returncode == 1
    assert done.stderr.count(LINE) == 1 and HELP in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ValueError: mutable default")


def test_other_errors_get_no_line(old_fairseq):
    (old_fairseq / "fairseq" / "__init__.py").write_text("raise ValueError('something else')")
    done = run_python("-c", "import fastgen, fairseq", path=old_fairseq)
    assert LINE not in done.stderr and done.stderr.splitlines()[-1] == "ValueError: something else"


@pytest.mark.parametrize("command", ["generate", "eval_lm"])
def test_the_commands_say_it_in_one_line(command, old_fairseq):
    code = f"import sys; from fastgen.cli.fairseq.command import {command}; sys.exit({command}())"
    done = run_python("-c", code, path=old_fairseq)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and LINE in done.stderr and HELP in done.stderr


def test_a_fairseq_that_works_is_loaded_as_ever():
    pytest.importorskip("fairseq")
    code = "import fastgen, fairseq; print(type(fairseq.__loader__).__name__, type(fairseq.__spec__.loader).__name__)"
    loaders = run_python("-c", code).stdout.split()
    plain = run_python("-c", code.replace("fastgen, ", ""), FASTGEN_DISABLE="1").stdout.split()
    assert "_ExplainingLoader" not in loaders and len(loaders) == len(plain) == 2
