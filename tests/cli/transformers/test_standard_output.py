"""OUTPUT - and devices take records as soon as their turn has come, and nothing else."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_models import save_bart, sentences
from python_process import REPOSITORY, run_python

from fastgen.batch.journal import Entry, StreamOutput
from fastgen.cli.transformers.command import main

CODE = "from fastgen.batch.journal import Entry, StreamOutput\n"


def entry(number: int, failed: bool = False) -> Entry:
    return Entry(number, 1, None, failed, b"%d\n" % number)


def test_records_are_written_in_the_order_of_their_lines_as_soon_as_their_turn_has_come(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    path.write_bytes(b"")
    output = StreamOutput(str(path))
    for numbers, written in (((2, 3), b""), ((1, 6), b"1\n2\n3\n"), ((5, 4), b"1\n2\n3\n4\n5\n6\n")):
        output.write([entry(number, failed=number == 3) for number in numbers])
        assert path.read_bytes() == written
    output.leave()
    assert (output.records, output.failures, output.generated) == (6, 1, 5)


def test_what_python_prints_meanwhile_goes_to_standard_error(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_text("a\n")
    code = (
        "import sys\nfrom transformers import BartForConditionalGeneration as kind\n"
        "from fastgen.cli.transformers.command import main\ngenerate = kind.generate\n"
        "def noisy(self, **inputs):\n    print('noise')\n    return generate(self, **inputs)\n"
        "kind.generate = noisy\nprint('before', flush=True)\nassert main(sys.argv[1:]) == 0\nprint('after')\n"
    )
    done = run_python("-c", code, str(save_bart(tmp_path / "bart")), str(source), "-")
    before, record, after = done.stdout.splitlines()
    assert (before, after) == ("before", "after") and record != "noise" and "noise\n" in done.stderr


def test_a_reader_that_is_gone_is_an_error_and_a_slow_one_is_waited_for() -> None:
    code = CODE + (
        "import os, sys\nos.set_blocking(1, False)\noutput = StreamOutput('-')\n"
        "try:\n    for number in range(1, 201):\n"
        "        output.write([Entry(number, 1, None, False, b'x' * 9999 + b'\\n')])\n"
        "except BrokenPipeError:\n    sys.exit(f'gone after {output.records} records')\n"
    )
    for lines, status in ((200, 0), (3, 1)):
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as run:
            time.sleep(0.5)  # so that the pipe is full before anything is read
            assert [len(run.stdout.readline()) for _ in range(lines)] == [10_000] * lines
            run.stdout.close()
            errors = run.stderr.read().decode()
        assert run.returncode == status, errors
        assert errors.startswith("gone after") == bool(status) and "Traceback" not in errors, errors


@pytest.mark.usefixtures("one_thread")
def test_a_device_is_written_to(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "in"
    source.write_text("".join(f"{line}\n" for line in sentences(5)))
    command = [str(save_bart(tmp_path / "bart")), str(source), "/dev/null"]
    assert main(command) == 0
    assert "5 lines in " in capsys.readouterr().err
    assert main([*command, "--resume"]) == 2
    assert "--resume needs OUTPUT to be a file, and /dev/null" in capsys.readouterr().err
