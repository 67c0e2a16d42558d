"""The tutorials and the README, as a reader follows them: files are saved, commands run, what is shown is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from python_process import REPOSITORY

pytest.importorskip("transformers")

PAGES = [
    "tutorial-script",
    pytest.param("tutorial-file", marks=pytest.mark.slow),
    pytest.param("tutorial-evaluation", marks=pytest.mark.slow),
]
NUMBER = r"\d+([.:]\d+)*"


def run_bash(commands: str, folder: Path) -> str:
    """Returns what the commands of one block print; the first that fails fails the test."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTGEN_")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    environment |= {"FASTGEN_CACHE": str(folder / "cache")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert done.returncode == 0, f"{commands}\nstatus {done.returncode}\n{done.stdout}"
    return done.stdout


def missing_lines(shown: str, printed: str) -> list[str]:
    """Returns the lines of `shown` with which no line of `printed` ends, in the same order.

    Numbers are not compared: times, and how far a killed run came, differ. An … in `shown` stands for any text.
    """
    lines = iter(re.sub(NUMBER, "#", printed).splitlines())
    ends = (re.escape(re.sub(NUMBER, "#", line)).replace("…", ".*") for line in shown.splitlines())
    patterns = [f"{end or '^'}$" for end in ends]
    return [pattern for pattern in patterns if not any(re.search(pattern, line) for line in lines)]


def test_shown_lines_that_are_not_printed_are_missing():
    printed = "loading demo\n50%\rready in 3.5 s\n\nequal\n"
    assert missing_lines("ready in 4.0 s\n\nequal\n", printed) == []
    assert missing_lines("ready … s\nequal\n", printed) == []
    assert missing_lines("equal\nready in 4.0 s\n", printed) == ["ready\\ in\\ \\#\\ s$"]
    assert missing_lines("ready in 4.0 s\n\n\n", printed) == ["^$"]


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_prints_what_its_page_shows(name, tmp_path):
    """Each line of a text block is printed by the commands before it, in that order; numbers may differ."""
    if name == "tutorial-evaluation":
        pytest.importorskip("lm_eval")
    text = (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    printed = ""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} >= {"bash", "python", "text"}
    for language, body in blocks:
        if language == "bash":
            printed = run_bash(body, tmp_path)
        elif language == "text":
            assert missing_lines(body, printed) == [], printed
        else:
            (tmp_path / re.match(r"# ([\w.]+)\n", body)[1]).write_text(body, encoding="utf-8")


def test_the_readme_generates_from_python(tmp_path):
    """Its last block of Python; test_docs.py runs the first."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (tmp_path / "generate.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], encoding="utf-8")
    shown = "wendy sold thirty one books for seven dollars and fifty cents on the third of may twenty twenty one\n"
    assert missing_lines(shown + "it is eight fifteen a m again\n", run_bash("python generate.py", tmp_path)) == []


def test_the_readme_generates_from_a_file(tmp_path):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^fastgen-generate-for-transformers demo .*", text, re.MULTILINE)
    (tmp_path / "fastgen").symlink_to(REPOSITORY / "fastgen")
    run_bash(command, tmp_path)
    assert (tmp_path / "out.txt").read_bytes().count(b"\n") == 500
