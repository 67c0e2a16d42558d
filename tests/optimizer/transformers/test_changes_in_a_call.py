"""User code that runs in each step may change the model: the following steps are those of the library."""

from random import Random
from typing import Any

import pytest
import torch
from fuzz_changes import CHANGES, USER_CODE, adapter, forward_hook
from parity import run_both
from reports import replays
from tiny_models import tiny, token_ids
from torch import nn

import fastgen

STEPS = 36
AT = 18  # steps after which the model is changed
LOOPS = {"greedy": {}, "beams": {"num_beams": 3}, "samples": {"do_sample": True, "num_return_sequences": 3}}


def hook_of_all_modules(random: Random, model: Any) -> None:
    def flip(module: nn.Module, args: Any, output: Any) -> Any:
        return output.flip(-1) if isinstance(module, nn.Linear) and module.out_features == 99 else output

    model.handle = nn.modules.module.register_module_forward_hook(flip)


def nothing(random: Random, model: Any) -> None:
    pass


def generate(model: Any, change: Any, kind: str = "processor", **arguments: Any) -> torch.Tensor:
    changing = USER_CODE[kind](lambda: change(Random(1), model), AT)
    length = {"max_new_tokens": STEPS, "min_new_tokens": STEPS}
    return model.generate(token_ids(2, 9), **changing, **length, **arguments)


def generated(change: Any, *kind: str, name: str = "llama", **arguments: Any) -> list[torch.Tensor]:
    """Returns the outputs of four calls on one model, which is changed within the third."""
    model = tiny(name, attention_dropout=0.3)
    if change is adapter:
        change(Random(1), model.eval())
        model.eval()
    try:
        outputs = [generate(model, each, *kind, **arguments) for each in (nothing, nothing, change)]
        model.eval()
        return [*outputs, generate(model, nothing, *kind, **arguments)]
    finally:
        if hasattr(model, "handle"):
            model.handle.remove()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        *(pytest.param("processor", arguments, id=name) for name, arguments in LOOPS.items()),
        *(pytest.param(kind, {}, id=kind) for kind in ("criterion", "streamer")),
        pytest.param("prefix function", {"num_beams": 2}, id="prefix function"),
        pytest.param("processor", {"name": "prophetnet"}, id="ProphetNet"),
    ],
)
@pytest.mark.parametrize("change", [*CHANGES, hook_of_all_modules])
def test_a_change_by_user_code_within_a_call_counts(change, kind, arguments):
    both = run_both(lambda: generated(change, kind, **arguments))
    for stock, fast in zip(both.stock, both.fast, strict=True):
        assert torch.equal(stock, fast)
    assert kind != "processor" or "name" in arguments or not torch.equal(both.stock[1], both.stock[2])


def test_steps_are_captured_until_user_code_changes_the_model():
    model = tiny("llama")
    for _ in range(2):
        generate(model, nothing)
    assert replays(fastgen.explain()) > STEPS - 10
    generate(model, forward_hook)
    report = fastgen.explain()
    assert "MODEL_CHANGED" in report.codes() and 0 < replays(report) < AT
