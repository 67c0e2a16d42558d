"""OUTPUT -, devices and open descriptors get records as soon as it is their turn, and nothing else."""

import os
import subprocess
import sys
import time

import pytest
from cli_loop import command, plain_loop, write_lines
from cli_models import sentences
from python_process import REPOSITORY

from fastgen.batch.journal import StreamOutput
from fastgen.batch.part import Entry

LINES = sentences(9)
NOISY = """
import sys
from transformers import BartForConditionalGeneration as kind
from fastgen.cli.transformers.command import main
generate = kind.generate
def noisy(self, **inputs):
    print('noise')
    return generate(self, **inputs)
kind.generate = noisy
print('before', flush=True)
assert main(sys.argv[1:]) == 0
print('after')
"""
SLOWLY_READ = """
import os
from fastgen.batch.journal import StreamOutput
from fastgen.batch.part import Entry
os.set_blocking(1, False)
output = StreamOutput('-')
for number in range(1, 201):
    output.write([Entry(number, 1, None, None, False, b'x' * 9999 + b'\\n')])
"""

pytestmark = pytest.mark.usefixtures("one_thread")


def test_records_are_written_as_soon_as_it_is_their_turn(tmp_path):
    path = tmp_path / "pipe"
    path.write_bytes(b"")
    output = StreamOutput(str(path))
    for numbers, written in (((2, 3), b""), ((1, 6), b"1\n2\n3\n"), ((5, 4), b"1\n2\n3\n4\n5\n6\n")):
        output.write([Entry(number, 1, None, None, number == 3, b"%d\n" % number) for number in numbers])
        assert path.read_bytes() == written
    output.leave()
    assert (output.records, output.failures, output.generated) == (6, 1, 5)


@pytest.mark.parametrize("output", ("-", "/dev/stdout"))
def test_a_redirected_shell_sees_records_only(bart, tmp_path, output):
    """Python's own output goes to standard error; fastgen is on with any FASTGEN_AUTO."""
    environment = os.environ | {"FASTGEN_AUTO": "0", "FASTGEN_LOG": "debug", "PYTHONPATH": str(REPOSITORY)}
    with (tmp_path / "out").open("w") as stdout:
        call, files = [sys.executable, "-c", NOISY, bart, "-", output], {"stdout": stdout, "stderr": subprocess.PIPE}
        done = subprocess.run(call, input="\n".join(LINES), env=environment, text=True, **files)
    printed = (tmp_path / "out").read_text().splitlines()
    assert printed == ["before", *plain_loop(bart, LINES, 4), "after"], done.stderr
    assert "noise\n" in done.stderr and "9 lines in " in done.stderr
    assert "fastgen DEBUG: fastgen applied transformers.generate" in done.stderr


def test_a_slow_reader_is_waited_for():
    call = [sys.executable, "-c", SLOWLY_READ]
    with subprocess.Popen(call, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        time.sleep(0.5)  # so that the pipe is full before anything is read
        assert [len(line) for line in run.stdout] == [10_000] * 200
        errors = run.stderr.read().decode()
    assert run.returncode == 0, errors


def test_a_device_is_written_to(tmp_path, bart, capsys):
    source = write_lines(tmp_path / "in", LINES)
    assert command(bart, source, "/dev/null") == 0
    assert "9 lines in " in capsys.readouterr().err
    assert command(bart, source, "/dev/null", "--resume") == 2
    assert "--resume needs OUTPUT to be a file, and /dev/null" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ((), ("--overwrite",)))
def test_an_appending_descriptor_keeps_what_is_there(tmp_path, bart, flags):
    source, log = write_lines(tmp_path / "in", LINES), tmp_path / "log"
    log.write_text("before\n")
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    (tmp_path / "link").symlink_to(f"/dev/fd/{descriptor}")
    expected = plain_loop(bart, LINES, 4)
    assert command(bart, source, f"/dev/fd/{descriptor}", *flags) == 0
    assert command(bart, source, tmp_path / "link", *flags) == 0
    os.write(descriptor, b"after\n")
    os.close(descriptor)
    assert log.read_text().splitlines() == ["before", *expected, *expected, "after"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "link", "log"]


def test_descriptors_that_cannot_be_written_are_one_line(tmp_path, bart, capsys):
    source = write_lines(tmp_path / "in", LINES)
    reading, appending = os.open(source, os.O_RDONLY), os.open(source, os.O_WRONLY | os.O_APPEND)
    refused = {
        (f"/dev/fd/{reading}",): "cannot be written (Bad file descriptor)",
        ("/proc/self/fd/999",): "cannot be written (Bad file descriptor)",
        (f"/dev/fd/{appending}",): "is the same file as INPUT",
        (f"/dev/fd/{appending}", "--resume"): "--resume needs OUTPUT to be a file",
        (f"/dev/fd/{appending}", "--reference_path", source): f"--reference_path {source} needs OUTPUT to be a file",
    }
    for (output, *flags), message in refused.items():
        assert command(bart, source, output, *flags) == 2
        assert f"OUTPUT {output}: {message}" in capsys.readouterr().err
    os.close(reading)
    os.close(appending)
    assert source.read_text().splitlines() == LINES
