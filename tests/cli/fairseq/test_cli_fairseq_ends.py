"""However a run of fastgen-generate-for-fairseq ends, it says why, and leaves whole lines and no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from python_process import REPOSITORY, run_python

from fastgen.cli.fairseq.command import generate

# A command has time to end in order, even on a busy machine.
COMMAND = """
import sys
from fastgen.cli.fairseq.command import generate
from fastgen.cli import exits
exits.SECONDS_TO_END = 1e6
sys.exit(generate())
"""
# The command waits after each batch that it writes, until the file of its first argument exists.
HELD = """
import pathlib, sys, time
from fastgen.cli.fairseq import pipeline
write, go = pipeline.Generation.write, pathlib.Path(sys.argv.pop(1))
def held(self, result):
    write(self, result)
    while not go.exists():
        time.sleep(0.02)
pipeline.Generation.write = held
"""
# One line at a time and long outputs, which are more than a pipe holds.
LONG = "--batch-size 1 --beam 8 --min-len 150 --max-len-b 200 --remove-bpe --tokenizer moses".split()


class Run:
    """The command in its own session, writing into files; it is held after its first batch."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.out, self.err, self.go = folder / "out", folder / "err", folder / "go"
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        call = [sys.executable, "-c", HELD + COMMAND, self.go, *args]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(call, env=env, stdout=out, stderr=err, start_new_session=True)

    def wait_for_output(self) -> list[psutil.Process]:
        """Waits for the first lines; returns the processes that the command has started."""
        while not self.out.stat().st_size:
            assert self.process.poll() is None, self.err.read_text()
            time.sleep(0.02)
        return sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.pid)

    def release(self) -> None:
        self.go.touch()

    def lines(self) -> list[str]:
        text = self.out.read_text()
        assert text.endswith("\n")
        return text.splitlines()

    def last_error(self) -> str:
        return self.err.read_text().splitlines()[-1]


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(processes: list[psutil.Process]) -> None:
    while not all(map(is_gone, processes)):
        time.sleep(0.05)


class TestProcesses:
    @pytest.mark.parametrize("whole_group", [True, False])
    def test_ctrl_c_ends_every_process(self, data, tmp_path, whole_group):
        run = Run(tmp_path, *data.generation, *LONG)
        processes = run.wait_for_output()
        assert len(processes) >= 2
        if whole_group:
            os.killpg(run.process.pid, signal.SIGINT)
        else:
            run.process.send_signal(signal.SIGINT)
        assert run.process.wait() == 130
        wait_until_gone(processes)
        assert run.last_error() == "fastgen-generate-for-fairseq: interrupted"
        assert len(run.lines()) % 5 == 0  # S, T, H, D and P of whole sentences

    def test_a_killed_worker_ends_the_run(self, data, tmp_path):
        run = Run(tmp_path, *data.generation, *LONG, "--num-workers", "0", "--postprocess-workers", "2")
        workers = run.wait_for_output()
        assert len(workers) == 2
        workers[1].kill()
        wait_until_gone(workers[1:])
        run.release()
        assert run.process.wait() == 1
        assert run.last_error().endswith(" error: a worker process was ended before its work was done")
        wait_until_gone(workers)
        assert len(run.lines()) % 5 == 0

    def test_workers_do_not_outlive_a_killed_command(self, data, tmp_path):
        run = Run(tmp_path, *data.generation, *LONG, "--num-workers", "0", "--postprocess-workers", "2")
        workers = run.wait_for_output()
        run.process.kill()
        run.process.wait()
        wait_until_gone(workers)


class RaisesLate:
    """A --bpe that decodes the three texts of 20 sentences, and no more."""

    calls = 0

    def __init__(self, *unused: Any) -> None:
        type(self).calls = 0

    def decode(self, text: str) -> str:
        type(self).calls += 1
        if self.calls > 60:
            raise ValueError("no more\nof this")
        return text


def test_an_exception_in_a_worker_follows_earlier_lines(data, capfd, monkeypatch):
    from fairseq.data.encoders import BPE_REGISTRY

    monkeypatch.setitem(BPE_REGISTRY, "byte_bpe", RaisesLate)
    flags = "--num-workers 0 --batch-size 4 --bpe byte_bpe --postprocess-workers 1".split()
    assert generate([*data.generation, *flags]) == 1
    captured = capfd.readouterr()
    error = "fastgen-generate-for-fairseq: error: in a worker process: ValueError: no more of this"
    assert captured.err.splitlines()[-1] == error
    # The batch of the 21st sentence is not complete.
    assert [line[:2] for line in captured.out.splitlines()] == ["S-", "T-", "H-", "D-", "P-"] * 20


def test_a_reader_that_closes_ends_the_run_quietly(data):
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMMAND, *data.generation, *LONG]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        first = [process.stdout.readline()[:2] for _ in range(3)]
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 141
    assert first == ["S-", "T-", "H-"]
    assert "Traceback" not in errors and "error" not in errors.splitlines()[-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full disk")
def test_a_full_disk_ends_the_run(data, capfd, tmp_path):
    (tmp_path / "generate-test.txt").symlink_to("/dev/full")
    assert generate([*data.generation, "--num-workers", "0", "--results-path", str(tmp_path)]) == 1
    assert "No space left on device" in capfd.readouterr().err.splitlines()[-1]


DEFERRED = """
import sys
from fastgen.cli.fairseq import command
command._import("fastgen.cli.fairseq.args", is_program=True)
from fairseq.criterions.sentence_prediction import f1_score, pearsonr
from fairseq.tasks.audio_classification import sklearn_metrics
before = {"sklearn", "scipy.stats"} & sys.modules.keys()
print(len(before), f1_score([1, 0, 1], [1, 1, 1]), sklearn_metrics.accuracy_score([1, 0], [1, 1]))
print(round(pearsonr([1, 2, 3], [1, 2, 3])[0], 6), {"sklearn", "scipy.stats"} <= sys.modules.keys())
"""


def test_packages_of_training_are_imported_when_needed():
    pytest.importorskip("sklearn")
    assert run_python("-c", DEFERRED).stdout.splitlines()[-2:] == ["0 0.8 0.5", "1.0 True"]
