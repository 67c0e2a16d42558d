"""Random calls of `generate` agree with the unpatched library; `make fuzz` compares more of them."""

import gc
from collections import Counter

import pytest
import torch
from fuzz import run
from hooks import ANY_SIZE, costs, force, replaced

import fastgen
from fastgen.ops import cpu_linear
from fastgen.optimizer.decoding import guards

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("first", "comparisons"), [(0, 150), pytest.param(150, 1000, marks=pytest.mark.slow)])
def test_random_calls_agree_with_the_unpatched_library(first, comparisons):
    counts, differences = run(first=first, comparisons=comparisons)
    assert not [line for line in differences if line.startswith("different")]
    assert counts["equal, shared"] > comparisons / 2, counts
    assert sum(count for name, count in counts.items() if name.startswith("tie")) <= 1 + comparisons / 200, differences


BREAKS = {  # part, its replacement, the contexts of the calls that must differ
    "rows that are not reordered": ("reorder a cache", lambda *args: None, ""),
    "scores that are a little off": ("shared attention", lambda exact, *args, **keys: 1.01 * exact(*args, **keys), ""),
    "a model that is not checked": ("changes in a call", lambda *args, **keys: None, "captured, changes in a call"),
}


def has_differed(counts: Counter[str]) -> bool:
    return any(name.startswith("different") for name in counts)


@pytest.mark.parametrize("what", BREAKS)
def test_fuzzer_finds_what_is_broken(what):
    """One of 100 comparisons differs; it stops at the first."""
    part, by, context = BREAKS[what]
    with replaced(part, by):
        assert has_differed(run(first=0, comparisons=100, context=context, is_enough=has_differed)[0])


def test_fuzzer_finds_user_code_that_goes_unnoticed(monkeypatch):
    monkeypatch.setattr(guards, "is_from", lambda value, packages: True)
    assert has_differed(run(first=0, comparisons=60, context="replaced helper", is_enough=has_differed)[0])


# Products through oneDNN, of models whose weights change in every possible way.


def has_stale_products(comparisons: int) -> bool:
    with force(cpu_linear.ONEDNN), costs(**ANY_SIZE):
        return has_differed(run(0, comparisons, context="changes between calls", is_enough=has_differed)[0])


def test_products_use_the_changed_weights():
    assert not has_stale_products(comparisons=25)


def test_fuzzer_finds_stale_copies_of_weights(monkeypatch):
    copies = {}

    def multiply(rows, weight, bias=None):
        copy = copies.setdefault((weight.data_ptr(), weight.shape), weight.detach().clone())
        return cpu_linear.onednn_linear(rows, copy, bias)

    monkeypatch.setitem(cpu_linear.gemm_backends(torch.float32), cpu_linear.ONEDNN, multiply)
    assert has_stale_products(comparisons=40)


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]


def growth(comparisons: int) -> int:
    """Returns by how many bytes all tensors grow in the second of two equal series of comparisons."""
    earlier, lives = live_tensors(), []  # what other tests left is not freed between the two series
    for _ in range(2):
        run(0, comparisons)
        storages = [tensor.untyped_storage() for tensor in live_tensors() if tensor.layout == torch.strided]
        lives.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
    del earlier
    return lives[1] - lives[0]


def test_memory_that_fastgen_keeps_of_models_does_not_grow():
    assert growth(comparisons=40) < 1 << 20  # other prompts, other reports


def test_growth_of_memory_is_seen(monkeypatch):
    tensors, explain = [], fastgen.explain
    monkeypatch.setattr(fastgen, "explain", lambda: tensors.append(torch.zeros(1 << 16)) or explain())
    assert growth(comparisons=10) > 1 << 20
