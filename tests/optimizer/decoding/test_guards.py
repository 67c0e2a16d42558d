"""Guards notice what a program replaces in a model, and name it; functions of a host: test_replaced_code.py."""

import dataclasses
import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.decoding.faster_forwards import faster_forwards
from fastgen.optimizer.decoding.guards import Guards, KnownCode, is_user_code
from fastgen.provenance import PYTHON

REGISTRY = {"product": torch.mul}
OURS = __name__.partition(".")[0]
KNOWN = KnownCode(
    packages=PYTHON | {"torch", "fastgen", OURS},
    registered=lambda modules: {"REGISTRY.product": lambda: REGISTRY["product"]},
)


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
        self.activation, self.steps = torch.relu, [torch.relu, {"table": torch.ones(2)}]

    def method(self) -> None:
        pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(2))


def guards_of(model: nn.Module, known_code: KnownCode = KNOWN) -> Guards:
    return Guards(dict(model.named_modules()), known_code)


def replace_function_by_another_at_its_address(model: Model) -> None:
    model.blocks[0].activation = None
    gc.collect()
    model.blocks[0].activation = lambda states: states.relu() + 1


class OwnParameter(nn.Parameter):
    """A parameter class of user code, as quantization libraries have them."""


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "data of a weight": (
        lambda model: setattr(model.blocks[0].linear.weight, "data", torch.ones(4, 4)),
        "blocks.0.linear.weight was replaced",
    ),
    "strides of a weight": (
        lambda model: setattr(weight := model.blocks[0].linear.weight, "data", weight.data.t()),
        "blocks.0.linear.weight was replaced",
    ),
    "weight": (
        lambda model: setattr(model.blocks[1].linear, "weight", nn.Parameter(torch.ones(4, 4))),
        "blocks.1.linear.weight was replaced",
    ),
    "buffer": (
        lambda model: setattr(model.blocks[1], "positions", torch.ones(4)),
        "blocks.1.positions was replaced",
    ),
    "type": (lambda model: model.double(), "blocks.0.offset was replaced"),
    "number": (lambda model: setattr(model.blocks[0], "scale", 0.25), "blocks.0.scale was replaced"),
    "number by a tensor": (
        lambda model: setattr(model.blocks[0], "scale", torch.ones(2)),
        "blocks.0.scale was replaced",
    ),
    "number in a dictionary": (
        lambda model: model.blocks[0].options.update(scaled=torch.ones(2)),
        "blocks.0.options was replaced",
    ),
    "item of a list": (lambda model: model.blocks[0].sizes.append(3), "blocks.0.sizes was replaced"),
    "item of a dictionary": (
        lambda model: model.blocks[0].options.update(scaled=False),
        "blocks.0.options was replaced",
    ),
    "function in a list": (
        lambda model: model.blocks[0].steps.__setitem__(0, torch.tanh),
        "blocks.0.steps.0 was replaced",
    ),
    "tensor in a dictionary": (
        lambda model: model.blocks[1].steps[1].update(table=torch.ones(3)),
        "blocks.1.steps.1.table was replaced",
    ),
    "configuration": (lambda model: setattr(model.config, "layers", 3), "config.layers was replaced"),
    "another configuration": (lambda model: setattr(model, "config", Config()), "config was replaced"),
    "mode": (lambda model: model.blocks[1].eval(), "blocks.1.training was replaced"),
    "order of modules": (
        lambda model: model.blocks._modules.update({"0": model.blocks._modules.pop("0")}),
        "blocks._modules was replaced",
    ),
    "module": (lambda model: model.blocks.append(Block(model.config)), "blocks._modules was replaced"),
    "replaced module": (
        lambda model: setattr(model.blocks[0], "linear", nn.Linear(4, 4)),
        "blocks.0.linear was replaced",
    ),
    "class": (
        lambda model: setattr(model.blocks[0].linear, "__class__", type("Other", (nn.Linear,), {})),
        "blocks.0.linear was replaced",
    ),
    "class of the model": (
        lambda model: setattr(model, "__class__", type("Other", (Model,), {})),
        "the model was replaced",
    ),
    "hook": (
        lambda model: model.blocks[0].register_forward_hook(lambda *args: None),
        "blocks.0._forward_hooks was replaced",
    ),
    "hook before": (
        lambda model: model.blocks[0].register_forward_pre_hook(lambda *args: None),
        "blocks.0._forward_pre_hooks was replaced",
    ),
    "forward": (
        lambda model: setattr(model.blocks[0], "forward", lambda states: states),
        "blocks.0.forward was added",
    ),
    "function": (replace_function_by_another_at_its_address, "blocks.0.activation was replaced"),
    "removed attribute": (
        lambda model: delattr(model.blocks[0], "scale"),
        "an attribute was removed (KeyError('scale'))",
    ),
    "compiled": (
        lambda model: model.blocks[0].compile(backend="eager"),
        "blocks.0._compiled_call_impl was added",
    ),
}


UNUSUAL = {
    "sparse buffer": lambda model: model.register_buffer("unread", torch.eye(3).to_sparse()),
    "nested buffer": lambda model: model.register_buffer("unread", torch.nested.nested_tensor([torch.ones(2)])),
    "parameter of another class": lambda model: setattr(
        model.blocks[0].linear, "weight", OwnParameter(torch.randn(4, 4))
    ),
    "list in itself": lambda model: model.blocks[0].sizes.append(model.blocks[0].sizes),
}


@pytest.mark.parametrize(
    ("put_in", "change"),
    [(None, change) for change in CHANGES] + [(unusual, "data of a weight") for unusual in UNUSUAL],
)
def test_each_replacement_is_named_by_its_path(put_in, change):
    """Models with unusual tensors are no exception."""
    model, (apply, text) = Model(), CHANGES[change]
    UNUSUAL.get(put_in, lambda model: None)(model)
    guards = guards_of(model)
    assert guards.check() is None and guards.check(between_steps=True) is None
    apply(model)
    assert guards.check() == text and guards.check(between_steps=True) == text
    assert guards_of(model).check() is None


def test_a_class_of_user_code_is_compared_between_steps(monkeypatch):
    model = Model()
    guards = guards_of(model, dataclasses.replace(KNOWN, packages=KNOWN.packages - {OURS}))
    monkeypatch.setattr(Block, "method", lambda self: None)
    assert guards.check(between_steps=True) == f"{__name__}.Block.method was replaced"


def test_functions_of_the_library_are_compared_once_per_call(monkeypatch):
    model = Model()
    guards = guards_of(model)
    for kind, name, function, text in (
        (nn.Linear, "forward", lambda self, states: states, "torch.nn.modules.linear.Linear.forward"),
        (Block, "__call__", lambda self: None, f"{__name__}.Block.a method"),
        (Block, "method", torch.ones(2), f"{__name__}.Block.method"),
    ):
        with monkeypatch.context() as patches:
            patches.setattr(kind, name, function, raising=False)
            assert guards.check() == f"{text} was replaced"
            assert guards.check(between_steps=True) is None
        assert guards.check() is None
    monkeypatch.delattr(Block, "method")
    assert guards.check() == f"{__name__}.Block.method was replaced"


def test_a_registered_function_is_compared_between_steps(monkeypatch):
    model = Model()
    guards = guards_of(model)
    monkeypatch.setitem(REGISTRY, "unused", torch.add)
    assert guards.check(between_steps=True) is None
    monkeypatch.setitem(REGISTRY, "product", torch.add)
    assert guards.check(between_steps=True) == "REGISTRY.product was replaced"


def test_a_global_hook_is_noticed_between_steps():
    model = Model()
    guards = guards_of(model)
    handle = torch_module.register_module_forward_hook(lambda *args: None)
    assert guards.check(between_steps=True) == "torch's global forward hooks was replaced"
    handle.remove()
    assert guards.check(between_steps=True) is None


def test_a_mask_that_a_prefill_lengthens_is_not_compared():
    model = nn.Linear(2, 2)
    model._future_mask = torch.empty(0)
    guards = guards_of(model, dataclasses.replace(KNOWN, not_of_a_step=frozenset({"_future_mask"})))
    model._future_mask = torch.zeros(3, 3)
    assert guards.check() is None


@pytest.mark.parametrize("before", [False, True])
def test_forwards_of_fastgen_are_not_compared_and_hide_nothing(before):
    model = Model()
    linear = model.blocks[0].linear
    guards = None if before else guards_of(model)
    forwards = {nn.Linear: lambda *args: None}
    with generate_call("test") as call, faster_forwards(call, {model: model.modules()}, forwards):
        assert "forward" in vars(linear)
        guards = guards or guards_of(model)
        assert guards.check() is None
        linear.scale = 2
        assert guards.check() == "blocks.0.linear.scale was added"
        del linear.scale
    assert guards.check() is None
    linear.first = 1
    assert guards.check() == "blocks.0.linear.first was added"


def test_guards_keep_nothing_alive_that_a_program_frees():
    model = Model()
    model.blocks[0].forward = model.blocks[0].forward  # a method that refers to its module
    model.blocks[0].parent = [model]
    model.blocks[0].activation = lambda states, owner=model: owner.blocks[1](states)
    model.blocks[0].register_forward_hook(lambda module, args, output, owner=model: output)
    guards = guards_of(model)
    freed = [weakref.ref(item) for item in (model, model.blocks[0].linear, model.blocks[0].linear.weight, model.config)]
    model.blocks[0].linear = nn.Linear(4, 4)
    gc.collect()
    assert [item() is None for item in freed] == [False, True, True, False]
    del model
    gc.collect()
    assert all(item() is None for item in freed)
    assert guards.check() is not None


class Decoder(json.JSONDecoder):
    pass


def test_objects_that_run_code_of_a_program_are_user_code(monkeypatch):
    packages = frozenset(PYTHON)
    library = json.JSONDecoder()
    assert not is_user_code([], packages) and not is_user_code([library, library], packages)
    assert is_user_code([library, Decoder()], packages)
    library.hook = lambda text: text
    assert is_user_code([library], packages)
    monkeypatch.setattr(json.JSONDecoder, "decode", lambda self, text: text)
    assert is_user_code([json.JSONDecoder()], packages)
    monkeypatch.undo()
    assert not is_user_code([json.JSONDecoder()], packages)
