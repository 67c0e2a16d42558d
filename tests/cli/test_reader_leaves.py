"""A command whose reader is gone, as `| head` soon is, ends quietly with the status of a broken pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from python_process import REPOSITORY

FAIRSEQ = ["-c", "import sys; from fastgen.cli.fairseq.command import generate; sys.exit(generate())"]
SAMPLE = "fastgen/models/demo/data/sample.txt"
COMMANDS = {
    "the report": ["-m", "fastgen"],
    "its help": ["-m", "fastgen", "--help"],
    "verify": ["-m", "fastgen", "verify", "demo", SAMPLE, *"--lines 1 --max_new_tokens 1".split()],
    "the help of verify": ["-m", "fastgen", "verify", "--help"],
    "help": ["-m", "fastgen.cli.transformers.command", "--help-all"],
    "version": ["-m", "fastgen.cli.transformers.command", "--version"],
    "the version of fairseq's": [*FAIRSEQ, "--version"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_reader_a_command_ends_quietly(name):
    read, write = os.pipe()
    os.close(read)
    # Without a buffer argparse ignores the error, and exits with 0.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": ""}
    options = {"stdout": write, "stderr": subprocess.PIPE, "text": True, "cwd": REPOSITORY, "env": environment}
    done = subprocess.run([sys.executable, *COMMANDS[name]], **options)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_standard_output_is_no_error():
    command = f"{sys.executable} -m fastgen --version >&-"
    done = subprocess.run(["sh", "-c", command], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
