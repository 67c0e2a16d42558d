"""OUTPUT - puts records on standard output, and nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

from python_process import REPOSITORY, run_python


def test_standard_output_holds_records_only_and_is_given_back(tmp_path: Path) -> None:
    done = run_python(
        "-c",
        "import ctypes, os, subprocess, sys\n"
        "from fastgen.cli.transformers.files.standard_output import StandardOutput\n"
        "print('before')\n"
        "with StandardOutput() as output:\n"
        "    print('Python')\n"
        "    ctypes.CDLL(None).printf(b'C\\n')\n"
        "    os.write(1, b'descriptor\\n')\n"
        "    subprocess.run(['echo', 'process'])\n"
        "    output.write(b'one\\ntwo\\n', 2)\n"
        "    output.keep_state(b'')\n"
        "    assert (output.records, output.state) == (2, None)\n"
        "    output.complete()\n"
        "print('after')\n",
    )
    assert done.stdout == "before\none\ntwo\nafter\n"
    assert sorted(done.stderr.split()) == ["C", "Python", "descriptor", "process"]


def test_a_reader_of_standard_output_that_is_gone_is_an_error_and_a_slow_one_is_waited_for() -> None:
    code = (
        "import os, sys\n"
        "from fastgen.cli.transformers.files.standard_output import StandardOutput\n"
        "os.set_blocking(1, False)\n"
        "with StandardOutput() as output:\n"
        "    try:\n"
        "        for _ in range(200):\n"
        "            output.write(b'x' * 9999 + b'\\n', 1)\n"
        "    except BrokenPipeError:\n"
        "        sys.exit(f'gone after {output.records} records')\n"
    )
    for lines, status in ((200, 0), (3, 1)):
        run = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        time.sleep(0.5)  # so that the pipe is full before anything is read
        assert [len(run.stdout.readline()) for _ in range(lines)] == [10_000] * lines
        run.stdout.close()
        errors = run.stderr.read().decode()
        run.stderr.close()
        assert run.wait() == status, errors
        assert errors.startswith("gone after") == bool(status) and "Traceback" not in errors, errors


def test_standard_output_that_is_closed_is_an_input_error() -> None:
    code = "from fastgen.cli.transformers.files.standard_output import StandardOutput\nStandardOutput()"
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "{code}" >&-'],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "InputError: OUTPUT -: standard output is closed" in done.stderr
