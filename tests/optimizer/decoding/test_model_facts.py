"""Facts of a model come from one walk and hold until something is replaced; code: test_replaced_code.py."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn

from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.decoding.faster_forwards import faster_forwards
from fastgen.optimizer.decoding.model_facts import facts_of
from fastgen.optimizer.decoding.user_code import KnownCode
from fastgen.provenance import PYTHON

KNOWN = KnownCode(packages=PYTHON | {"torch", "fastgen", __name__.partition(".")[0]}, hooks=frozenset({"torch"}))


class Config:
    def __init__(self) -> None:
        self.layers = 2


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)
        self.config, self.scale, self.sizes, self.options = config, 0.5, [1, 2], {"scaled": True}
        self.register_buffer("positions", torch.arange(4.0))
        self.offset = nn.Parameter(torch.ones(1))
        self.activation = torch.relu


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(2))


def replace_function_by_another_at_its_address(model: Model) -> None:
    model.blocks[0].activation = None
    gc.collect()
    model.blocks[0].activation = lambda states: states.relu() + 1


class OwnParameter(nn.Parameter):
    """A parameter class of user code, as quantization libraries have them."""


CHANGES = {
    "data of a weight": lambda model: setattr(model.blocks[0].linear.weight, "data", torch.ones(4, 4)),
    "strides of a weight": lambda model: setattr(weight := model.blocks[0].linear.weight, "data", weight.data.t()),
    "weight": lambda model: setattr(model.blocks[1].linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "buffer": lambda model: setattr(model.blocks[1], "positions", torch.ones(4)),
    "type": lambda model: model.double(),
    "number": lambda model: setattr(model.blocks[0], "scale", 0.25),
    "item of a list": lambda model: model.blocks[0].sizes.append(3),
    "item of a dictionary": lambda model: model.blocks[0].options.update(scaled=False),
    "configuration": lambda model: setattr(model.config, "layers", 3),
    "mode": lambda model: model.blocks[1].eval(),
    "equal number": lambda model: setattr(model.blocks[1], "offset", nn.Parameter(torch.ones(1))),
    "order of modules": lambda model: model.blocks._modules.update({"0": model.blocks._modules.pop("0")}),
    "module": lambda model: model.blocks.append(Block(model.config)),
    "replaced module": lambda model: setattr(model.blocks[0], "linear", nn.Linear(4, 4)),
    "class": lambda model: setattr(model.blocks[0].linear, "__class__", type("Other", (nn.Linear,), {})),
    "hook": lambda model: model.blocks[0].register_forward_hook(lambda *args: None),
    "hook before": lambda model: model.blocks[0].register_forward_pre_hook(lambda *args: None),
    "forward": lambda model: setattr(model.blocks[0], "forward", lambda states: states),
    "function": replace_function_by_another_at_its_address,
    "compiled": lambda model: model.blocks[0].compile(backend="eager"),
}


UNUSUAL = {
    "sparse buffer": lambda model: model.register_buffer("unread", torch.eye(3).to_sparse()),
    "nested buffer": lambda model: model.register_buffer("unread", torch.nested.nested_tensor([torch.ones(2)])),
    "parameter of another class": lambda model: setattr(
        model.blocks[0].linear, "weight", OwnParameter(torch.randn(4, 4))
    ),
}


@pytest.mark.parametrize(
    ("put_in", "change"),
    [(None, change) for change in CHANGES] + [(unusual, "data of a weight") for unusual in UNUSUAL],
)
def test_facts_are_invalidated_by_any_replacement(put_in, change):
    """Models with unusual tensors are no exception."""
    model = Model()
    UNUSUAL.get(put_in, lambda model: None)(model)
    facts = facts_of(model, KNOWN)
    assert facts_of(model, KNOWN) is facts
    snapshot = facts.snapshot()
    assert snapshot.is_current()
    CHANGES[change](model)
    assert not facts.is_current() and not snapshot.is_current()
    assert facts_of(model, KNOWN) is not facts


def test_a_mask_that_a_prefill_lengthens_keeps_facts():
    model = nn.Linear(2, 2)
    model._future_mask = torch.empty(0)
    facts = facts_of(model, dataclasses.replace(KNOWN, not_of_a_step=frozenset({"_future_mask"})))
    model._future_mask = torch.zeros(3, 3)
    assert facts.is_current()


@pytest.mark.parametrize("before", [False, True])
def test_forwards_of_fastgen_keep_facts_and_hide_no_attribute(before):
    model = Model()
    linear = model.blocks[0].linear
    facts = None if before else facts_of(model, KNOWN)
    forwards = {nn.Linear: lambda *args: None}
    with generate_call("test") as call, faster_forwards(call, {model: model.modules()}, forwards):
        assert "forward" in vars(linear)
        facts = facts or facts_of(model, KNOWN)
        assert facts.is_current()
        linear.scale = 2
        assert not facts.is_current()
        del linear.scale
    assert facts.is_current()
    linear.first, linear.second = 1, 2  # as many as were taken off
    assert not facts.is_current()


def test_facts_keep_neither_model_nor_weights_alive():
    model = Model()
    model.blocks[0].forward = model.blocks[0].forward  # a method that refers to its module
    model.blocks[0].parent = [model]
    facts_of(model, KNOWN)
    weight = weakref.ref(model.blocks[0].linear.weight)
    model.blocks[0].linear.weight = nn.Parameter(torch.ones(4, 4))
    gc.collect()
    assert weight() is None
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
