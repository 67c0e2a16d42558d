"""Facts of a model come from one walk, and are valid until something is replaced: test_guards.py."""

import gc
import weakref

import pytest
import torch
from torch import nn

from fastgen.optimizer.decoding.guards import KnownCode
from fastgen.optimizer.decoding.model_info import facts_of
from fastgen.provenance import PYTHON

KNOWN = KnownCode(packages=PYTHON | {"torch", "fastgen", __name__.partition(".")[0]}, hooks=frozenset({"torch"}))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).eval()


def test_facts_are_read_again_when_something_was_replaced():
    layers = model()
    facts = facts_of(layers, KNOWN)
    assert facts_of(layers, KNOWN) is facts and list(facts.modules) == ["", "0", "1"]
    layers[0].weight = nn.Parameter(torch.ones(4, 4))
    assert facts_of(layers, KNOWN) is not facts


FACTS = {
    "training": (lambda layers: layers.train(), "training", "1 is in training mode with p=0.1, where rows differ"),
    "modules in training": (lambda layers: layers[1].train(), "in_training", ["1"]),
    "compiled": (lambda layers: layers[0].compile(backend="eager"), "compiled", ["0"]),
    "hooks": (lambda layers: layers[0].register_forward_hook(model), "hooks", [("0", f"{__name__}.model")]),
    "devices": (lambda layers: layers, "devices", {torch.device("cpu")}),
}


@pytest.mark.parametrize("what", FACTS)
def test_a_walk_reads_facts(what):
    change, name, expected = FACTS[what]
    change(layers := model())
    assert getattr(facts_of(layers, KNOWN), name) == expected


def test_code_of_a_program_is_named():
    layers = model()
    layers[0].forward = layers[1].hook = lambda states: states
    packages = (KNOWN.packages | {"transformers"}) - {__name__.partition(".")[0]}
    facts = facts_of(layers, KnownCode(packages=packages))
    assert facts.user_code == ["the forward of module 0", "hook of module 1"]
    assert facts.altered == {"0", "1"}


def test_facts_keep_neither_model_nor_weights_alive():
    layers = model()
    layers[0].parent = [layers]
    facts_of(layers, KNOWN)
    alive, weight = weakref.ref(layers), weakref.ref(layers[0].weight)
    layers[0].weight = nn.Parameter(torch.ones(4, 4))
    gc.collect()
    assert weight() is None
    del layers
    gc.collect()
    assert alive() is None
