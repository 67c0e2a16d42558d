"""Random calls of `generate` give what the unpatched library gives; `make fuzz` compares more of them."""

from __future__ import annotations

import pytest
from fuzz import run

from fastgen.ops import shared_attention
from fastgen.optimizer.decoding import kv_cache

pytestmark = pytest.mark.usefixtures("one_thread")


def test_random_calls_give_what_the_unpatched_library_gives():
    counts, differences = run(first=0, comparisons=20_000, seconds=120)
    assert not [line for line in differences if line.startswith("different")]
    total = sum(counts.values())
    assert total >= 50 and counts["equal, shared"] > total / 2, counts
    assert sum(count for name, count in counts.items() if name.startswith("tie")) <= 1 + total / 200, differences


def test_fuzzer_finds_rows_that_are_not_reordered(monkeypatch):
    monkeypatch.setattr(kv_cache.KVCache, "reorder", lambda self, *args: None)
    counts, _ = run(first=0, comparisons=150)
    assert counts["different, shared"] > 5


def test_fuzzer_finds_scores_that_are_a_little_off(monkeypatch):
    exact = shared_attention._softmax
    monkeypatch.setattr(shared_attention, "_softmax", lambda *args: 1.01 * exact(*args))
    counts, _ = run(first=0, comparisons=150)
    assert counts["different, shared"] > 5
