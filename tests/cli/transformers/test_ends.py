"""Whatever ends a run of fastgen-generate-for-transformers, nothing is lost: whole lines, no orphans, and --resume."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from cli_models import save_bart, sentences
from python_process import run_python

from fastgen.batch.progress import Stop
from fastgen.cli.transformers import command
from fastgen.cli.transformers.args import PROG
from fastgen.cli.transformers.command import main

LINES = sentences(120)
# Scores in full precision: a batch has to give the same bits whether others were generated before it or not.
FLAGS = (
    "--bs",
    "4",
    "--window",
    "16",
    "--beam",
    "2",
    "--output_format",
    "jsonl",
    "--min_new_tokens",
    "30",
    "--max_new_tokens",
    "30",
)

# Every batch says that it has begun and waits until it may go on, so that a run is ended in the middle of one.
HELD = """
import os, sys
from fastgen.cli.transformers.command import main
from fastgen.batch.pipeline import SplitOnOOM
generate, begun, go_on = SplitOnOOM.__call__, int(sys.argv.pop(1)), int(sys.argv.pop(1))
def held(self, batch):
    os.write(begun, b".")
    os.read(go_on, 1)
    return generate(self, batch)
SplitOnOOM.__call__ = held
sys.exit(main())
"""


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bart(tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def expected(bart: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a run that nothing ends writes."""
    folder = tmp_path_factory.mktemp("expected")
    source = write_input(folder)
    assert main([str(bart), str(source), str(folder / "out"), *FLAGS]) == 0
    return (folder / "out").read_bytes()


def write_input(folder: Path) -> Path:
    path = folder / "input.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


class Run:
    """The command in a process of its own, with INPUT and OUTPUT in `folder`; after so many batches it is held."""

    def __init__(self, bart: Path, folder: Path, *flags: str, batches: int = 8, **options: object) -> None:
        self.part = folder / "out.part"
        self.output = folder / "out"
        self.batches = batches
        self._begun, begun = os.pipe()
        go_on, self._go_on = os.pipe()
        os.write(self._go_on, b"." * batches)
        call = [sys.executable, "-c", HELD, str(begun), str(go_on), bart, write_input(folder), self.output]
        environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.process = subprocess.Popen(
            [*call, *FLAGS, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=(begun, go_on),
            **options,
        )
        os.close(begun)
        os.close(go_on)
        self.children: list[psutil.Process] = []
        self.stderr = b""

    def wait_until_held(self, records: int = 20) -> None:
        """Until a batch has begun that may not go on, and so many records of those before it are written."""
        for _ in range(self.batches + 1):
            assert os.read(self._begun, 1), self.process.communicate()
        while self.records() < records:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def wait_for_message(self, message: bytes) -> None:
        while message not in self.stderr:
            written = os.read(self.process.stderr.fileno(), 10_000)
            assert written, self.stderr
            self.stderr += written

    def release(self) -> None:
        """Lets all batches go on."""
        if self._go_on is not None:
            os.close(self._go_on)
            self._go_on = None

    def records(self) -> int:
        return len(self.written())

    def written(self) -> dict[int, str]:
        """The records that are complete in the journal, by their lines."""
        lines = self.part.read_bytes().split(b"\n")[1:-1] if self.part.exists() else []
        found: dict[int, str] = {}
        batch: dict[int, str] = {}
        for line in lines:
            payload = json.loads(line.partition(b" ")[2])
            if isinstance(payload, int):
                found |= batch
                batch = {}
            else:
                batch[payload[0]] = payload[-1]
        return found

    def end(self) -> tuple[int, str]:
        """Status and stderr, when no process of the run is left."""
        self.stderr += self.process.communicate()[1]
        psutil.wait_procs(self.children)
        return self.process.returncode, self.stderr.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.release()
        os.close(self._begun)

    def check_part(self, expected: bytes, complete: int = 1) -> None:
        """The journal holds records of what OUTPUT will be, at least `complete` of them."""
        assert not self.output.exists()
        lines, written = expected.decode().split("\n"), self.written()
        assert len(written) >= complete
        assert written == {number: lines[number - 1] for number in written}

    def check_resumes(self, bart: Path, folder: Path, expected: bytes) -> None:
        before = self.records()
        source = folder / "input.txt"
        assert main([str(bart), str(source), str(self.output), *FLAGS, "--resume"]) == 0
        assert self.output.read_bytes() == expected
        assert 0 < before < len(LINES)
        assert sorted(path.name for path in folder.iterdir()) == ["input.txt", "out", "out.run.json"]


@pytest.fixture
def start(bart: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*flags: str, **options: object) -> Run:
        runs.append(Run(bart, tmp_path, *flags, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def test_kill_9_of_the_command(start: Callable[..., Run], bart: Path, tmp_path: Path, expected: bytes) -> None:
    run = start()
    run.wait_until_held()
    run.process.kill()
    assert run.end()[0] == -signal.SIGKILL
    run.check_part(expected, 20)
    run.check_resumes(bart, tmp_path, expected)


def test_ctrl_c_finishes_the_batch_in_flight(
    start: Callable[..., Run], bart: Path, tmp_path: Path, expected: bytes
) -> None:
    run = start()
    run.wait_until_held()
    run.process.send_signal(signal.SIGINT)
    run.wait_for_message(b"finishing the batch in flight; a second Ctrl-C or SIGTERM stops at once")
    run.release()
    status, stderr = run.end()
    assert status == 130
    assert f"{run.records()} lines are complete in {run.part}; the same run with --resume resumes" in stderr
    assert "Traceback" not in stderr
    run.check_part(expected, 20)
    run.check_resumes(bart, tmp_path, expected)


def test_sigterm_is_a_ctrl_c(start: Callable[..., Run], expected: bytes) -> None:
    run = start()
    run.wait_until_held()
    run.process.terminate()
    run.wait_for_message(b"finishing the batch in flight")
    run.release()
    assert run.end()[0] == 143
    run.check_part(expected, 20)


def test_sigterm_to_all_processes_finishes_the_batch_in_flight(
    start: Callable[..., Run], bart: Path, tmp_path: Path, expected: bytes
) -> None:
    run = start(start_new_session=True)
    run.wait_until_held()
    os.killpg(run.process.pid, signal.SIGTERM)
    run.wait_for_message(b"finishing the batch in flight")
    run.release()
    status, stderr = run.end()
    assert status == 143
    assert "Traceback" not in stderr
    run.check_part(expected, 20)
    run.check_resumes(bart, tmp_path, expected)


def test_ctrl_c_that_is_ignored_stays_so(start: Callable[..., Run], expected: bytes) -> None:
    """As of jobs that a script puts into the background."""
    run = start(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    run.wait_until_held()
    run.process.send_signal(signal.SIGINT)
    run.release()
    assert run.end()[0] == 0
    assert run.output.read_bytes() == expected


@pytest.mark.parametrize(("number", "ends_with"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_ctrl_c_stops_at_once(start: Callable[..., Run], number: signal.Signals, ends_with: int) -> None:
    run = start(batches=0)
    run.wait_until_held(records=0)
    run.process.send_signal(number)
    run.wait_for_message(b"a second Ctrl-C or SIGTERM stops at once")
    run.process.send_signal(number)
    status, stderr = run.end()  # of a run whose batch in flight never ends
    assert status == ends_with
    assert "Traceback" not in stderr
    assert not run.output.exists()


def test_a_full_disk_keeps_what_was_written(
    start: Callable[..., Run], bart: Path, tmp_path: Path, expected: bytes
) -> None:
    limit = 5000 + len(expected) // 2  # room for the signature
    run = start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    run.release()
    status, stderr = run.end()
    assert status == 1
    assert "File too large" in stderr and str(run.part) in stderr and "--resume" in stderr
    run.check_part(expected)
    run.check_resumes(bart, tmp_path, expected)


def test_a_line_of_many_megabytes_takes_little_memory(bart: Path, tmp_path: Path) -> None:
    peaks = []
    for size in (100, 60_000_000):
        (tmp_path / "in").write_text("word1 word2\n" + "word1 " * (size // 6) + "\nword3\n")
        args = [bart, tmp_path / "in", tmp_path / "out", "--max_tokenizer_length", "20", "--overwrite"]
        code = (
            "import resource, sys\nfrom fastgen.cli.transformers.command import main\nstatus = main(sys.argv[1:])\n"
            "print(status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = run_python("-c", code, *map(str, args), OMP_NUM_THREADS="1")
        status, kilobytes = map(int, done.stdout.split())
        assert status == 0, done.stderr
        peaks.append(kilobytes)
    assert peaks[1] - peaks[0] < 200_000, peaks


def test_a_reader_that_leaves_ends_the_run(bart: Path, tmp_path: Path) -> None:
    call = [sys.executable, "-m", "fastgen.cli.transformers.command", bart, write_input(tmp_path), "-", *FLAGS]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == 1
    assert f"{PROG}: error: the standard output was closed (broken pipe)" in stderr
    assert "Traceback" not in stderr and "Exception ignored" not in stderr


def test_ctrl_c_while_waiting_for_standard_input(bart: Path, expected: bytes) -> None:
    call = [sys.executable, "-m", "fastgen.cli.transformers.command", bart, "-", "-", *FLAGS]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write("".join(f"{line}\n" for line in LINES).encode())
        process.stdin.flush()
        first = [process.stdout.readline() for _ in range(16)]  # a window; and there may be more lines to come
        process.send_signal(signal.SIGINT)
        rest, stderr = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    written = b"".join(first) + rest
    assert written.endswith(b"\n") and expected.startswith(written)


def test_ctrl_c_leaves_the_records_of_a_stream_in_a_file(bart: Path, tmp_path: Path, expected: bytes) -> None:
    """It cannot be gone on with, and nothing promises that."""
    call = [sys.executable, "-m", "fastgen.cli.transformers.command", bart, "-", tmp_path / "out", *FLAGS]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write("".join(f"{line}\n" for line in LINES[:40]).encode())
        process.stdin.flush()
        run = Run.__new__(Run)
        run.part = tmp_path / "out.part"
        while run.records() < 32:  # two windows
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read().decode()
    assert process.returncode == 130
    assert f"32 records are in {tmp_path / 'out.incomplete'}" in stderr and "--resume" not in stderr
    lines = (tmp_path / "out.incomplete").read_bytes().splitlines(keepends=True)
    assert lines == expected.splitlines(keepends=True)[:32]
    assert [path.name for path in tmp_path.iterdir()] == ["out.incomplete"]


def test_no_run_takes_over_the_part_of_another(
    start: Callable[..., Run], bart: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = start()
    run.wait_until_held()
    source = tmp_path / "input.txt"
    for flags in ((), ("--resume",)):
        assert main([str(bart), str(source), str(run.output), *FLAGS, *flags]) == 2
        assert str(run.part) in capsys.readouterr().err
    assert run.process.poll() is None


def test_an_interrupt_that_a_library_raises_anew_has_the_status_of_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object, stop: Stop) -> int:
        stop.status = 143
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupted)
    assert main(["model", "in.txt", "out.txt"]) == 143
