"""Random calls of `generate` give what the unpatched library gives; `make fuzz` compares more of them."""

from __future__ import annotations

from collections import Counter

import pytest
from fuzz import run

from fastgen.optimizer.decoding import user_code
from fastgen.optimizer.transformers import checks, processors
from fastgen.testing import replaced

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("first", "comparisons"), [(0, 150), pytest.param(150, 1000, marks=pytest.mark.slow)])
def test_random_calls_give_what_the_unpatched_library_gives(first, comparisons):
    counts, differences = run(first=first, comparisons=comparisons)
    assert not [line for line in differences if line.startswith("different")]
    assert counts["equal, shared"] > comparisons / 2, counts
    assert sum(count for name, count in counts.items() if name.startswith("tie")) <= 1 + comparisons / 200, differences


def are_different_and_shared(counts: Counter[str]) -> bool:
    return counts["different, shared"] > 2


def test_fuzzer_finds_rows_that_are_not_reordered():
    with replaced("reorder a cache", lambda *args: None):
        assert are_different_and_shared(run(first=0, comparisons=100, is_enough=are_different_and_shared)[0])


def test_fuzzer_finds_scores_that_are_a_little_off():
    with replaced("shared attention", lambda exact, *args, **kwargs: 1.01 * exact(*args, **kwargs)):
        assert are_different_and_shared(run(first=0, comparisons=100, is_enough=are_different_and_shared)[0])


def are_different(counts: Counter[str]) -> bool:
    return any(name.startswith("different") for name in counts)


def finds_a_difference(context: str) -> bool:
    """Among 60 comparisons; those after the first difference would tell no more."""
    return are_different(run(first=0, comparisons=60, context=context, is_enough=are_different)[0])


def test_fuzzer_finds_helpers_of_the_program_that_go_unnoticed(monkeypatch):
    monkeypatch.setattr(user_code, "is_from", lambda value, packages: True)
    assert finds_a_difference("replaced helper")


def test_fuzzer_finds_an_own_class_that_is_trusted_with_other_flags():
    with replaced("likeness of a model", lambda *args: ()):
        assert finds_a_difference("flags of an own class")


def test_fuzzer_finds_a_model_that_is_not_looked_at_within_a_call():
    with replaced("changes in a call", lambda *args: False):
        assert finds_a_difference("captured, changes in a call")


def test_fuzzer_finds_functions_of_torch_that_go_unnoticed():
    with replaced("replaced functions", lambda *args: []):
        assert finds_a_difference("replaced functions")


def test_fuzzer_finds_values_of_each_row_that_go_unnoticed():
    with replaced("values of rows", lambda *args: []):
        assert finds_a_difference("values of each row")


def test_fuzzer_finds_calls_that_are_taken_for_the_librarys(monkeypatch):
    monkeypatch.setattr(checks, "_runs_library_code", lambda called: True)
    monkeypatch.setattr(processors, "is_user_code", lambda *args: False)
    assert finds_a_difference("replaced calls")
