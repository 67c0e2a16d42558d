"""`make demo` measures three ways after a warm-up, and ends with what a newcomer wants to see."""

import re
from pathlib import Path

import pytest

import fastgen
from fastgen.models.demo import sample_path
from tools import demo


@pytest.fixture
def sample(tmp_path):
    path = tmp_path / "sample.txt"
    path.write_text("".join(line + "\n" for line in sorted(sample_path().read_text().splitlines(), key=len)[:6]))
    return path


def test_the_demo_ends_with_pairs_a_sentence_and_a_path(sample, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "QUIET", 1.0)
    assert demo.main(sample, tmp_path / "output.txt") == 0
    text, progress = capsys.readouterr()
    assert progress.count("running ") == 3 and progress.count("| 0/1 ") == 2 and "6 lines in " in progress
    lines, outputs = sample.read_text().splitlines(), (tmp_path / "output.txt").read_text().splitlines()
    for name in demo.WAYS:
        assert re.search(
            rf"^  {name} +[\d.]+ s +[\d.]+ lines/s( +other programs: \d+% of the CPUs)?$", text, re.MULTILINE
        )
    assert "6 of 6 outputs are equal in all three." in text
    pairs = "\n\n".join(f"{line}\n  → {output}" for line, output in list(zip(lines, outputs))[:3])
    end = r"\n\nThe command was [\d.]+ times as fast as .*\n\nAll outputs are in .*output\.txt\.\n$"
    assert re.search(re.escape(pairs) + end, text, re.DOTALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.txt", "sample.txt"]


@pytest.fixture
def simulated(monkeypatch):
    """Ways that copy their lines and take 8, 4 and 2 seconds, on a quiet machine; returns their calls."""
    calls, now = [], [0.0]

    def way(name: str, seconds: float):
        def call(source: Path, output: Path) -> None:
            calls.append((name, source.name))
            now[0] += seconds if source.name == "source.txt" else 100.0
            output.write_text(source.read_text())

        return call

    monkeypatch.setattr(demo.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(demo.Load, "share", lambda load: 0.04)
    monkeypatch.setattr(demo, "WAYS", {"loop": way("loop", 8), "fast": way("fast", 4), "command": way("command", 2)})
    return calls


def test_each_way_of_the_demo_is_warmed_up_and_measured(simulated, sample, tmp_path, capsys):
    assert demo.main(sample, tmp_path / "output.txt") == 0
    assert simulated == [(name, f"{file}.txt") for name in demo.WAYS for file in ("first", "source")]
    text = " ".join(capsys.readouterr().out.split())
    assert "The command was 4.0 times as fast as the loop around transformers alone" in text
    assert "that loop was 2.0 times as fast with `import fastgen`" in text
    assert text.count("other programs: 4% of the CPUs") == 3


def test_seconds_of_a_busy_machine_are_not_compared(simulated, sample, tmp_path, monkeypatch, capsys):
    shares = iter([0.02, 0.61, 0.03])
    monkeypatch.setattr(demo.Load, "share", lambda load: next(shares))
    assert demo.main(sample, tmp_path / "output.txt") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Other programs took up to 61% of the CPUs, so these seconds do not say" in text and "times as" not in text


def test_a_slow_demo_takes_fewer_lines(simulated, sample, tmp_path, monkeypatch, capsys):
    copy = demo.WAYS["loop"]

    def stopped(source: Path, output: Path) -> None:
        copy(source, output)
        output.write_text("".join(source.read_text().splitlines(keepends=True)[:3]))

    monkeypatch.setitem(demo.WAYS, "loop", stopped)
    assert demo.main(sample, tmp_path / "output.txt") == 0
    text = capsys.readouterr().out
    assert "That was slow: all ways get these 3 of the 6 lines only." in text
    assert "3 of 3 outputs are equal in all three." in text
    assert len((tmp_path / "output.txt").read_text().splitlines()) == 3


def test_a_loop_begins_no_batch_after_its_time(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BS", 2)
    demo.user_loop(sample, tmp_path / "output.txt", seconds=-1.0)
    assert len((tmp_path / "output.txt").read_text().splitlines()) == 2


def test_outputs_of_the_demo_that_differ_are_counted(sample, tmp_path, monkeypatch, capsys):
    def same(source: Path, output: Path) -> None:
        output.write_text(source.read_text())

    def another(source: Path, output: Path) -> None:
        output.write_text("another\n" + source.read_text().partition("\n")[2])

    monkeypatch.setattr(demo, "WAYS", {"loop": same, "fast": same, "command": another})
    assert demo.main(sample, tmp_path / "output.txt") == 1
    assert "5 of 6 outputs are equal in all three." in capsys.readouterr().out


@pytest.mark.parametrize(("loop", "goes_to_fastgen"), [(demo.plain_loop, False), (demo.fastgen_loop, True)])
def test_the_demos_loops_run_without_and_with_fastgen(loop, goes_to_fastgen, sample, tmp_path):
    before = fastgen.explain()
    loop(sample, tmp_path / "output.txt")
    assert (fastgen.explain() is not before) == goes_to_fastgen
