"""Progress goes to stderr: a bar on a terminal, a line now and then elsewhere, failures always."""

import io
import sys

import pytest

from fastgen.cli.transformers import progress
from fastgen.cli.transformers.items import Finished
from fastgen.cli.transformers.progress import Progress

BATCH = Finished(records=[(1, b"a\n"), (2, b"b\n")], tokens=7, failures=[(2, "is broken")])
STALLS = {"read": 0.25, "model": 0.5}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def start(total: int | None, done: int = 0, quiet: bool = False) -> Progress:
    started = Progress(total, done, quiet)
    started.watch(lambda seconds: STALLS)
    return started


def test_a_terminal_gets_a_bar_with_rates_and_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    shown = start(10, done=4)
    shown.finished(BATCH)
    shown._bar.refresh()
    shown.close()
    assert "6/10" in terminal.getvalue() and "tokens/s, stalled: read 25% model 50%" in terminal.getvalue()
    assert "line 2: is broken" in terminal.getvalue()


@pytest.mark.parametrize(("total", "expected"), [(10, "6 of 10 inputs"), (None, "6 inputs")])
def test_elsewhere_there_are_lines(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, total: int | None, expected: str
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    start(total, done=4).finished(BATCH)
    failure, line = capsys.readouterr().err.splitlines()
    assert failure.endswith("line 2: is broken")
    assert expected in line and "tokens/s, stalled: read 25% model 50%" in line
    assert line.endswith(" left") == (total is not None)


def test_quiet_names_failures_only(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    quiet = start(10, quiet=True)
    quiet.finished(BATCH)
    assert capsys.readouterr().err.splitlines() == ["fastgen-generate-for-transformers: line 2: is broken"]
    assert (quiet.inputs, quiet.tokens, quiet.failures) == (2, 7, 1)
