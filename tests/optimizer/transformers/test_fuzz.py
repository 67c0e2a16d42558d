"""Random calls of `generate` give what the unpatched library gives; `make fuzz` compares more of them."""

from __future__ import annotations

from collections import Counter

import pytest
from fuzz import run

from fastgen.optimizer.decoding import user_code
from fastgen.testing import replaced

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("first", "comparisons"), [(0, 150), pytest.param(150, 1000, marks=pytest.mark.slow)])
def test_random_calls_give_what_the_unpatched_library_gives(first, comparisons):
    counts, differences = run(first=first, comparisons=comparisons)
    assert not [line for line in differences if line.startswith("different")]
    assert counts["equal, shared"] > comparisons / 2, counts
    assert sum(count for name, count in counts.items() if name.startswith("tie")) <= 1 + comparisons / 200, differences


BREAKS = {  # part, what it gives in place of its result, the contexts of the calls that have to tell
    "rows that are not reordered": ("reorder a cache", lambda *args: None, ""),
    "scores that are a little off": ("shared attention", lambda exact, *args, **keys: 1.01 * exact(*args, **keys), ""),
    "a class that is trusted with other flags": ("likeness of a model", lambda *args: (), "flags of an own class"),
    "a model that is not looked at": ("changes in a call", lambda *args: False, "captured, changes in a call"),
}


def has_differed(counts: Counter[str]) -> bool:
    return any(name.startswith("different") for name in counts)


@pytest.mark.parametrize("what", BREAKS)
def test_fuzzer_finds_what_is_broken(what):
    """Among 100 comparisons; those after the first difference would tell no more."""
    part, by, context = BREAKS[what]
    with replaced(part, by):
        assert has_differed(run(first=0, comparisons=100, context=context, is_enough=has_differed)[0])


def test_fuzzer_finds_helpers_of_the_program_that_go_unnoticed(monkeypatch):
    monkeypatch.setattr(user_code, "is_from", lambda value, packages: True)
    assert has_differed(run(first=0, comparisons=60, context="replaced helper", is_enough=has_differed)[0])
