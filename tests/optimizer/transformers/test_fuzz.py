"""Random calls of `generate` give what the unpatched library gives; `make fuzz` compares more of them."""

from __future__ import annotations

import pytest
from fuzz import run

from fastgen.ops import shared_attention
from fastgen.optimizer.decoding import kv_cache

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("first", "comparisons"), [(0, 150), pytest.param(150, 1000, marks=pytest.mark.slow)])
def test_random_calls_give_what_the_unpatched_library_gives(first, comparisons):
    counts, differences = run(first=first, comparisons=comparisons)
    assert not [line for line in differences if line.startswith("different")]
    assert counts["equal, shared"] > comparisons / 2, counts
    assert sum(count for name, count in counts.items() if name.startswith("tie")) <= 1 + comparisons / 200, differences


def test_fuzzer_finds_rows_that_are_not_reordered(monkeypatch):
    monkeypatch.setattr(kv_cache.KVCache, "reorder", lambda self, *args: None)
    counts, _ = run(first=0, comparisons=100)
    assert counts["different, shared"] > 2


def test_fuzzer_finds_scores_that_are_a_little_off(monkeypatch):
    exact = shared_attention._softmax
    monkeypatch.setattr(shared_attention, "_softmax", lambda *args: 1.01 * exact(*args))
    counts, _ = run(first=0, comparisons=100)
    assert counts["different, shared"] > 2
