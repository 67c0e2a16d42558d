"""Calls measured in turns, the ratio that their seconds allow, the memory they add, and the load of other programs."""

import mmap
import os

import pytest

from fastgen.optimizer.decoding import timing
from fastgen.optimizer.decoding.timing import Load, Ratio, describe_load, in_turns, peak_memory, ratio_of


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def ways_of(clock: list[float], order: list[int], *seconds: float) -> list:
    def way(number: int) -> None:
        order.append(number)
        clock[0] += seconds[number]

    return [lambda number=number: way(number) for number in range(len(seconds))]


def test_calls_take_turns_and_the_first_rotates(clock):
    order: list[int] = []
    assert in_turns(ways_of(clock, order, 4.0, 2.0)) == [[4.0] * 5, [2.0] * 5]
    assert order == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize(("seconds", "turns"), [(100.0, 5), (0.75, 7), (0.001, 15)])
def test_short_calls_have_more_turns(clock, seconds, turns):
    assert [len(each) for each in in_turns(ways_of(clock, [], seconds, seconds))] == [turns, turns]


def test_a_ratio_is_the_median_of_the_turns():
    measured = ratio_of([4.0, 4.4, 4.8, 3.6, 4.0], [2.0] * 5)
    assert measured == Ratio(2.0, 1.8, 2.4, 5)
    assert str(measured) == "2.00 times as fast (1.80 to 2.40 in 5 turns)"


@pytest.mark.parametrize(("turns", "left_out"), [(5, 0), (7, 0), (8, 1), (10, 1), (11, 2), (15, 3)])
def test_extreme_turns_are_left_out_where_there_are_many(turns, left_out):
    measured = ratio_of([100.0 + turn for turn in range(turns)], [100.0] * turns)
    assert (measured.low, measured.high) == (1 + 0.01 * left_out, 1 + 0.01 * (turns - 1 - left_out))


def test_turns_that_disagree_have_no_ratio():
    reason = ratio_of([0.9, 1.0, 1.57, 0.12, 1.1], [1.0] * 5)
    assert reason == "no ratio: 5 turns differ too much, 0.12 to 1.57 times as fast"


def test_a_call_that_is_too_short_has_no_ratio():
    reason = ratio_of([0.02, 0.02, 0.02], [0.004, 0.004, 0.004])
    assert reason == "no ratio: a call of 4.0 ms is too short to compare (at least 10 ms)"


def touch(megabytes: int) -> None:
    with mmap.mmap(-1, megabytes << 20) as memory:
        for place in range(0, len(memory), mmap.PAGESIZE):
            memory[place] = 1


def test_memory_is_the_peak_that_a_call_adds():
    added = peak_memory(lambda: touch(200))
    if added is None:
        pytest.skip("this system does not say how much memory a process has had")
    assert 190 << 20 < added < 300 << 20
    assert peak_memory(lambda: touch(20)) < 100 << 20, "the peak of an earlier call does not count"


def test_memory_that_the_system_does_not_say_is_unknown(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(timing, "PROC", tmp_path / "none")
    assert peak_memory(lambda: called.append(1)) is None and called == [1]


@pytest.fixture
def machine(clock, monkeypatch, tmp_path):
    """A machine of two CPUs; returns a function that sets the seconds that they worked, and those of this process."""
    monkeypatch.setattr(timing, "PROC", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "self" / "task" / "9").mkdir(parents=True)
    (tmp_path / "7").mkdir()
    (tmp_path / "self" / "task" / "9" / "children").write_text("7 8")

    def worked(all_cpus: float, this: float, child: float) -> None:
        part = int(all_cpus * ticks / 4)
        (tmp_path / "stat").write_text(f"cpu  {part} {part} {part} 999 999 0 0 {part} 0 0\ncpu0 1 2 3\n")
        for name, seconds in (("self", this), ("7", child)):
            fields = ["S", *["1"] * 10, str(int(seconds * ticks)), "0", "0", "0", "20"]
            (tmp_path / name / "stat").write_text(f"9 (a name) b) {' '.join(fields)}\n")

    return worked


def test_load_is_the_share_of_programs_that_are_not_ours(machine, clock):
    machine(100.0, 10.0, 5.0)
    load = Load()
    clock[0] += 10.0
    machine(116.0, 16.0, 7.0)
    assert load.share() == pytest.approx(8 / 20)
    machine(900.0, 16.0, 7.0)
    assert load.share() == 1.0
    machine(100.0, 90.0, 7.0)
    assert load.share() == 0.0


def test_a_system_without_figures_of_its_cpus_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "PROC", tmp_path / "none")
    assert Load().share() is None
    assert describe_load(None) == "" and describe_load(0.124) == "other programs took 12% of the CPUs"
