"""However a run of fastgen-generate-for-transformers ends, nothing is lost: whole lines, no orphans, and --resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_loop import command, write_lines
from cli_models import sentences

from fastgen.batch.errors import Stop
from fastgen.cli.transformers import command as module
from fastgen.cli.transformers.args import PROG

LINES = sentences(120)
# Scores in full precision: a batch must have the same bits with and without earlier batches.
FLAGS = "--bs 4 --window 16 --beam 2 --output_format jsonl --min_new_tokens 30 --max_new_tokens 30".split()
COMMAND = [sys.executable, "-m", "fastgen.cli.transformers.command"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}

# Every batch says that it has begun and waits until it is released, so that a run ends in the middle of one. It waits
# in steps: Python would not handle a signal that arrives just before a read that never returns.
HELD = """
import os, select, sys
from fastgen.cli.transformers.command import main
from fastgen.batch.pipeline import SplitOnOOM
generate, begun, go_on = SplitOnOOM.__call__, int(sys.argv.pop(1)), int(sys.argv.pop(1))
def held(self, batch):
    os.write(begun, b".")
    while not select.select([go_on], [], [], 0.1)[0]:
        pass
    os.read(go_on, 1)
    return generate(self, batch)
SplitOnOOM.__call__ = held
sys.exit(main())
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def expected(bart, tmp_path_factory):
    """The output of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("expected")
    assert command(bart, write_lines(folder / "in", LINES), folder / "out", *FLAGS) == 0
    return (folder / "out").read_bytes()


def written(part: Path) -> dict[int, str]:
    """Returns the records of complete batches in a journal, by their lines."""
    lines = part.read_bytes().split(b"\n")[1:-1] if part.exists() else []
    records: dict[int, str] = {}
    batch: dict[int, str] = {}
    for line in lines:
        payload = json.loads(line.partition(b" ")[2])
        if isinstance(payload, int):
            records |= batch
            batch = {}
        else:
            batch[payload[0]] = payload[-1]
    return records


class Run:
    """The command in its own process, with INPUT and OUTPUT in `folder`; it is held after some batches."""

    def __init__(self, bart: Path, folder: Path, batches: int = 8, **options: object) -> None:
        self.bart, self.source, self.output = bart, write_lines(folder / "in", LINES), folder / "out"
        self.part, self.batches, self.stderr = folder / "out.part", batches, b""
        self._begun, begun = os.pipe()
        go_on, self._go_on = os.pipe()
        os.write(self._go_on, b"." * batches)
        call = [sys.executable, "-c", HELD, str(begun), str(go_on), bart, self.source, self.output, *FLAGS]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pass_fds": (begun, go_on)}
        self.process = subprocess.Popen(call, env=ENVIRONMENT, **pipes, **options)
        os.close(begun)
        os.close(go_on)

    def wait_until_held(self, records: int = 20) -> None:
        """Waits until a batch is held, and so many records of earlier ones are written."""
        for _ in range(self.batches + 1):
            assert os.read(self._begun, 1), self.process.communicate()
        while len(written(self.part)) < records:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def wait_for_message(self, message: bytes) -> None:
        while message not in self.stderr:
            block = os.read(self.process.stderr.fileno(), 10_000)
            assert block, self.stderr
            self.stderr += block

    def release(self) -> None:
        """Releases all batches."""
        if self._go_on is not None:
            os.close(self._go_on)
            self._go_on = None

    def end(self) -> tuple[int, str]:
        """Returns status and stderr."""
        self.stderr += self.process.communicate()[1]
        return self.process.returncode, self.stderr.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.release()
        os.close(self._begun)

    def check_resumes(self, expected: bytes) -> None:
        """Asserts that the journal holds records of OUTPUT, and that --resume completes it."""
        lines, records = expected.decode().split("\n"), written(self.part)
        assert 20 <= len(records) < len(LINES) and not self.output.exists()
        assert records == {number: lines[number - 1] for number in records}
        assert command(self.bart, self.source, self.output, *FLAGS, "--resume") == 0
        assert self.output.read_bytes() == expected
        assert sorted(path.name for path in self.output.parent.iterdir()) == ["in", "out", "out.run.json"]


@pytest.fixture
def start(bart, tmp_path):
    runs: list[Run] = []

    def begin(**options: object) -> Run:
        runs.append(Run(bart, tmp_path, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def test_kill_9_of_the_command(start, expected):
    run = start()
    run.wait_until_held()
    run.process.kill()
    assert run.end()[0] == -signal.SIGKILL
    run.check_resumes(expected)


@pytest.mark.parametrize(("number", "ends_with"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_batch_in_flight(start, expected, number, ends_with):
    """It is sent to all processes, as a terminal and a scheduler do."""
    run = start(start_new_session=True)
    run.wait_until_held()
    os.killpg(run.process.pid, number)
    run.wait_for_message(b"finishing the batch in flight; a second Ctrl-C or SIGTERM stops immediately")
    run.release()
    status, stderr = run.end()
    assert status == ends_with and "Traceback" not in stderr
    lines = len(written(run.part))
    assert f"{lines} complete lines in {run.part}; the same run with --resume resumes" in stderr
    run.check_resumes(expected)


def test_ctrl_c_that_is_ignored_stays_so(start, expected):
    """Background jobs of scripts ignore it."""
    run = start(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    run.wait_until_held()
    run.process.send_signal(signal.SIGINT)
    run.release()
    assert run.end()[0] == 0
    assert run.output.read_bytes() == expected


@pytest.mark.parametrize(("number", "ends_with"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_ctrl_c_stops_immediately(start, number, ends_with):
    run = start(batches=0)
    run.wait_until_held(records=0)
    run.process.send_signal(number)
    run.wait_for_message(b"a second Ctrl-C or SIGTERM stops immediately")
    run.process.send_signal(number)
    status, stderr = run.end()  # the batch in flight never ends
    assert status == ends_with and "Traceback" not in stderr
    assert not run.output.exists()


def test_a_reader_that_leaves_ends_the_run(bart, tmp_path):
    call = [*COMMAND, bart, write_lines(tmp_path / "in", LINES), "-", *FLAGS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}  # holds a part of the output
    with subprocess.Popen(call, text=True, **pipes) as process:
        assert process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == 141  # as of a program that SIGPIPE has killed
    assert PROG not in stderr and "Traceback" not in stderr and "Exception ignored" not in stderr


def test_ctrl_c_leaves_the_records_of_a_stream_in_a_file(bart, tmp_path, expected):
    """It cannot be resumed, and no message promises that."""
    call = [*COMMAND, bart, "-", tmp_path / "out", *FLAGS]
    with subprocess.Popen(call, env=ENVIRONMENT, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write("".join(f"{line}\n" for line in LINES[:40]).encode())
        process.stdin.flush()
        while len(written(tmp_path / "out.part")) < 32:  # two windows; more lines may follow
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read().decode()
    assert process.returncode == 130
    assert f"32 records in {tmp_path / 'out.incomplete'}" in stderr
    assert "--resume" not in stderr and "Traceback" not in stderr
    lines = (tmp_path / "out.incomplete").read_bytes().splitlines(keepends=True)
    assert lines == expected.splitlines(keepends=True)[:32]
    assert [path.name for path in tmp_path.iterdir()] == ["out.incomplete"]


def test_a_librarys_interrupt_has_the_signals_status(monkeypatch):
    def interrupted(args: object, stop: Stop) -> int:
        stop.status = 143
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_run", interrupted)
    assert command("model", "in.txt", "out.txt") == 143
