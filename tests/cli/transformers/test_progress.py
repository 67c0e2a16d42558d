"""Progress goes to stderr: a bar on a terminal, otherwise a line now and then, failures always."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable

import pytest
from cli_loop import command, interrupted_after, write_lines
from cli_models import sentences

from fastgen.cli.transformers import progress
from fastgen.cli.transformers.progress import Progress

LINES = sentences(9)
BATCH = (2, 7, [(2, "is broken")])  # inputs, tokens, failures


def start(total: int | None, done: int = 0, quiet: bool = False) -> Progress:
    shown = Progress(quiet)
    shown.start(total, done, "tokens")
    return shown


@pytest.fixture
def terminal(monkeypatch):
    """Returns a function that makes stderr a terminal of some columns; its result returns the text written there."""
    opened = []

    def make(columns: int) -> Callable[[], str]:
        ours, theirs = pty.openpty()
        opened.append(ours)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        monkeypatch.setattr(sys, "stderr", os.fdopen(theirs, "w"))

        def written() -> str:
            sys.stderr.close()
            text = b""
            try:
                while block := os.read(ours, 4096):
                    text += block
            except OSError:  # the end, on Linux
                pass
            return text.decode()

        return written

    yield make
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_a_bar_of_its_width(terminal, columns):
    """For a stream of unknown length it cannot be filled."""
    written = terminal(columns)
    for total, done in ((None, 0), (10, 4)):
        shown = start(total, done)
        shown.finished(*BATCH)
        shown._bar.refresh()
        shown.close()
    text = written()
    assert re.search(r"\rinputs: 2, [\d.]+ inputs/s *\r", text)
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    bar = lines[-1]
    assert "fastgen-generate-for-transformers: line 2: is broken" in lines
    assert re.fullmatch(r" 60%\|.*\| 6 of 10 inputs, [\d.]+ inputs/s, \d\d:\d\d left", bar)
    assert len(bar) in (columns - 1, columns) and "█" in bar


@pytest.mark.parametrize(("total", "expected"), [(10, "6 of 10 inputs"), (None, "6 inputs")])
def test_without_a_terminal_progress_is_printed_in_lines(capsys, monkeypatch, total, expected):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    start(total, done=4).finished(*BATCH)
    failure, line = capsys.readouterr().err.splitlines()
    assert failure.endswith("line 2: is broken")
    rest = r", \d\d:\d\d left" if total else ""
    assert re.fullmatch(rf"{expected}, [\d.]+ inputs/s{rest}", line)


def test_messages_count_one_line_in_the_singular(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    shown = start(None)
    shown.finished(1, 7, [])
    shown.end()
    running, end = capsys.readouterr().err.splitlines()
    assert running.startswith("1 input, ") and end.startswith("1 line in ")


def test_quiet_names_failures_only(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    quiet = start(10, quiet=True)
    quiet.finished(*BATCH)
    assert capsys.readouterr().err.splitlines() == ["fastgen-generate-for-transformers: line 2: is broken"]
    quiet.note("nobody reads this")
    assert (quiet.inputs, quiet.amount, capsys.readouterr().err) == (2, 7, "")


def test_the_time_left_follows_the_speed_so_far(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    shown = start(100, done=10)
    for line in ("12 of 100 inputs, 0.5 inputs/s, 02:56 left", "14 of 100 inputs, 0.5 inputs/s, 02:52 left"):
        now[0] += 4.0
        shown.finished(*BATCH)
        assert capsys.readouterr().err.splitlines()[-1] == line
    shown.finished(0, 0, [])


@pytest.mark.usefixtures("one_thread")
def test_a_run_names_its_model_and_where_it_resumes(bart, tmp_path, capsys):
    source, output = write_lines(tmp_path / "in", LINES), tmp_path / "out"
    arguments = (bart, source, output, "--bs", 2, "--window", 0)
    with interrupted_after(2):
        assert command(*arguments) == 130
    assert capsys.readouterr().err.splitlines()[0] == f"loading {bart}"
    assert command(*arguments, "--resume") == 0
    captured = capsys.readouterr()
    said = captured.err.splitlines()
    assert said[:2] == [f"loading {bart}", "fastgen-generate-for-transformers: resuming: 4 of 9 lines are already done"]
    assert captured.out == "" and re.fullmatch(r"5 lines in [\d.]+ s, [\d.]+ inputs/s, \d+ tokens/s", said[-1])
    assert command(*arguments, "--overwrite", "--quiet") == 0
    assert capsys.readouterr() == ("", "")
