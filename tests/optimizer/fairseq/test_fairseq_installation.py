"""Without a fairseq that Python can import, one line says how to install one, without torchaudio."""

import re
from importlib import metadata

import pytest
from python_process import run_python

from fastgen.optimizer.fairseq import how_to_install

OLD = """
from dataclasses import dataclass

@dataclass
class Config:
    common: list = []
"""
LINE = "cannot import the fairseq that is installed (accepted: ve-fairseq, the same code for Python 3.11 and 3.12)"


@pytest.fixture
def old_fairseq(tmp_path):
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "fairseq" / "__init__.py").write_text(OLD)
    return tmp_path


def test_user_code_gets_the_line_and_its_error(old_fairseq):
    done = run_python("-c", "import fastgen, fairseq", path=old_fairseq)
    assert done.returncode == 1
    assert done.stderr.count(LINE) == 1
    assert done.stderr.splitlines()[-1].startswith("ValueError: mutable default")


def test_other_errors_get_no_line(old_fairseq):
    (old_fairseq / "fairseq" / "__init__.py").write_text("raise ValueError('something else')")
    done = run_python("-c", "import fastgen, fairseq", path=old_fairseq)
    assert LINE not in done.stderr and done.stderr.splitlines()[-1] == "ValueError: something else"


@pytest.mark.parametrize("command", ["generate", "eval_lm"])
def test_the_commands_print_one_line(command, old_fairseq):
    code = f"import sys; from fastgen.cli.fairseq.command import {command}; sys.exit({command}())"
    done = run_python("-c", code, path=old_fairseq)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and LINE in done.stderr


NO_FAIRSEQ = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "fairseq" else find_spec(name, *package)
sys.version_info = (3, {minor}, 0)
from fastgen.cli.fairseq.command import {command}
sys.exit({command}())
"""


@pytest.mark.parametrize("command", ["generate", "eval_lm"])
@pytest.mark.parametrize(
    ("minor", "line"),
    [
        (10, "see docs/fairseq.md, Install: "),
        (11, "pip install --no-deps ve-fairseq==0.12.3 && pip install 'numpy<2' bitarray "),
        (13, "no build of it exists for Python 3.13 (accepted: 3.10 to 3.12)"),
    ],
)
def test_without_fairseq_commands_name_a_way_without_torchaudio(command, minor, line):
    done = run_python("-c", NO_FAIRSEQ.format(command=command, minor=minor))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"error: needs the package fairseq: {line}" in done.stderr and "torchaudio" not in done.stderr


def test_the_line_names_all_requirements_but_torchaudio():
    pytest.importorskip("fairseq")
    names = {re.split(r"[^\w-]", line)[0] for line in metadata.requires("ve-fairseq") if "extra ==" not in line}
    named = set(re.findall(r"[\w-]+", how_to_install()))
    assert names - {"torch", "torchaudio", "tqdm", "packaging"} <= named  # transformers brings the last two


def test_a_fairseq_that_works_has_its_usual_loader():
    pytest.importorskip("fairseq")
    code = "import fastgen, fairseq; print(type(fairseq.__loader__).__name__, type(fairseq.__spec__.loader).__name__)"
    assert run_python("-c", code).stdout.split() == ["SourceFileLoader"] * 2
