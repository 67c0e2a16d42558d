"""One run at a time writes to a journal, also on file systems without locks; a machine that is gone blocks no other."""

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_loop import command, plain_loop, write_lines
from cli_models import sentences
from python_process import REPOSITORY

from fastgen.batch import part
from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError, RunError
from fastgen.batch.journal import Journal
from fastgen.batch.part import Entry

LINES = sentences(9)
OF_A_GONE_MACHINE = (
    "filelock/2\npid=1\nhost=gone\nmode=lease\ntoken=1\nduration={}\nrun=process 1 on gone, started then\n"
)
FIRST, SECOND = (Entry(number, 1, None, None, False, b"text\n") for number in (1, 2))


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks; returns a function that sets the number of its error."""

    def set_error(number: int) -> None:
        def flock(*_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    set_error(errno.EOPNOTSUPP)
    return set_error


@pytest.fixture
def short_lease(monkeypatch):
    monkeypatch.setattr(part, "LEASE", 0.2)


def journal(folder: Path, resume: bool = True) -> Journal:
    opened = Journal(BatchConfig("model", "in", str(folder / "out"), resume=resume))
    opened.begin({"--beam": 4})
    return opened


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_a_run_goes_on_with_a_warning(bart, tmp_path, no_locks, number, capsys):
    no_locks(number)
    source, output = write_lines(tmp_path / "in.txt", LINES), tmp_path / "out.txt"
    assert command(bart, source, output, "--bs", 4, "--quiet") == 0
    assert output.read_text().splitlines() == plain_loop(bart, LINES, 4)
    assert names(tmp_path) == ["in.txt", "out.txt", "out.txt.run.json"]
    said = capsys.readouterr().err
    assert f"has no locks ({os.strerror(number)}): the file {output}.part.lease serves as one" in said


def test_other_errors_of_a_lock_are_one_clear_line(bart, tmp_path, no_locks, capsys):
    no_locks(errno.EIO)
    source = write_lines(tmp_path / "in.txt", LINES)
    assert command(bart, source, tmp_path / "out.txt") == 2
    assert "out.txt: cannot be written (Input/output error)\n" in capsys.readouterr().err


@pytest.mark.parametrize("has_locks", [True, False])
def test_the_message_names_the_run_and_its_file(tmp_path, monkeypatch, no_locks, has_locks):
    if has_locks:
        monkeypatch.undo()
    other = journal(tmp_path, resume=False)
    monkeypatch.setattr(part, "PATIENCE", 0.1)
    with pytest.raises(InputError) as refused:
        journal(tmp_path)
    run = rf"process {os.getpid()} on {re.escape(socket.gethostname())}, started \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\S+"
    file = tmp_path / f"out.part.{'lock' if has_locks else 'lease'}"
    end = "" if has_locks else "; resume=True takes the lock over if that run's machine no longer exists"
    expected = rf"{run}, by its lock {re.escape(str(file))} \(wait for it, or end it{end}\)$"
    assert re.search(expected, str(refused.value))
    other.leave()
    assert names(tmp_path) == []


def test_a_resumed_run_takes_over_from_a_machine_that_is_gone(tmp_path, no_locks, short_lease):
    first = journal(tmp_path, resume=False)
    first.write([FIRST])
    first.leave()
    (tmp_path / "out.part.lease").write_text(OF_A_GONE_MACHINE.format(part.LEASE))
    with pytest.raises(InputError, match=r"process 1 on gone, started then, by its lock .*out\.part\.lease"):
        journal(tmp_path, resume=False)
    said: list[str] = []
    second = Journal(BatchConfig("model", "in", str(tmp_path / "out"), resume=True), said.append)
    second.begin({"--beam": 4})
    assert said[1].endswith("whether that run is alive: process 1 on gone, started then")
    second.write([SECOND])
    second.complete()
    second.leave()
    assert names(tmp_path) == ["out", "out.run.json"]


def test_a_killed_process_of_this_machine_is_taken_over(tmp_path, no_locks):
    code = (
        "import errno, fcntl, os\ndef flock(*_): raise OSError(errno.ENOLCK, 'none')\nfcntl.flock = flock\n"
        "from fastgen.batch.config import BatchConfig\nfrom fastgen.batch.journal import Journal\n"
        f"output = Journal(BatchConfig('model', 'in', {str(tmp_path / 'out')!r}))\n"
        "output.begin({'--beam': 4})\nos._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 9
    assert (tmp_path / "out.part.lease").exists()
    with pytest.raises(InputError, match=r"out\.part already exists"):  # the lock was free
        journal(tmp_path, resume=False)
    journal(tmp_path).leave()


def test_a_run_that_lost_its_lease_leaves_the_journal_alone(tmp_path, no_locks, short_lease):
    first = journal(tmp_path, resume=False)
    first.write([FIRST])
    (tmp_path / "out.part.lease").unlink()
    second = journal(tmp_path)
    second.write([SECOND])
    while not first._lock.is_lost:  # until its thread sees it
        time.sleep(0.01)
    with pytest.raises(RunError, match=r"another run has taken over .*out\.part: process"):
        first.write([SECOND])
    with pytest.raises(RunError, match="another run has taken over"):
        first.complete()
    assert first.leave() == ""
    second.complete()
    second.leave()
    assert (tmp_path / "out").read_bytes() == b"text\ntext\n" and names(tmp_path) == ["out", "out.run.json"]
