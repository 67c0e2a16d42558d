"""Random calls of `generate` give what the unpatched library gives; `make fuzz` compares more of them."""

import gc
from collections import Counter

import pytest
import torch
from fuzz import run

import fastgen
from fastgen.ops import cpu_linear
from fastgen.optimizer.decoding import user_code
from fastgen.testing import ANY_SIZE, costs, force, replaced

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


# Every product goes through oneDNN, of models whose weights change in every possible way.


def has_stale_products(comparisons: int) -> bool:
    with force(cpu_linear.ONEDNN), costs(**ANY_SIZE):
        return has_differed(run(0, comparisons, context="changes between calls", is_enough=has_differed)[0])


def test_products_are_those_of_weights_that_have_changed():
    assert not has_stale_products(comparisons=25)


def test_fuzzer_finds_copies_of_weights_that_are_stale(monkeypatch):
    copies = {}

    def multiply(rows, weight, bias=None):
        copy = copies.setdefault((weight.data_ptr(), weight.shape), weight.detach().clone())
        return cpu_linear.onednn_linear(rows, copy, bias)

    monkeypatch.setitem(cpu_linear.gemm_backends(torch.float32), cpu_linear.ONEDNN, multiply)
    assert has_stale_products(comparisons=40)


def growth(comparisons: int) -> int:
    """The bytes of all tensors after these comparisons that the same ones before them have not left."""
    lives = []
    for _ in range(2):
        run(0, comparisons)
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        storages = [one.untyped_storage() for one in tensors if one.layout == torch.strided]
        lives.append(sum({one.data_ptr(): one.nbytes() for one in storages}.values()))
    return lives[1] - lives[0]


def test_nothing_that_fastgen_keeps_of_models_grows():
    assert growth(comparisons=40) < 1 << 20  # other prompts, other reports


def test_growth_is_seen(monkeypatch):
    tensors, explain = [], fastgen.explain
    monkeypatch.setattr(fastgen, "explain", lambda: tensors.append(torch.zeros(1 << 16)) or explain())
    assert growth(comparisons=10) > 1 << 20
