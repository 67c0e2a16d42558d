"""Code of the program that runs in each step may change the model: what follows is what it is in the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import lively, replays, run_both, token_ids
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from versions import needs_peft

import fastgen

STEPS = 36
AT = 18  # steps after which the model is changed


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.3,
        pad_token_id=0,
    )
    return lively(LlamaForCausalLM(config)).eval()


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) * 2


def add_a_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)


def add_a_hook_to_all_modules(model: Any) -> None:
    def flip(module, args, output):
        return output.flip(-1) if isinstance(module, nn.Linear) and module.out_features == 99 else output

    model.handle = nn.modules.module.register_module_forward_hook(flip)


def switch_the_adapter(model: Any) -> None:
    model.set_adapter("second")


def disable_adapters(model: Any) -> None:
    model.disable_adapters()


def give_a_weight_other_data(model: Any) -> None:
    weight = model.model.layers[2].mlp.down_proj.weight
    weight.data = -weight.data


def replace_a_weight(model: Any) -> None:
    projection = model.model.layers[2].self_attn.o_proj
    projection.weight = nn.Parameter(-projection.weight.detach())


def write_into_a_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.neg_()


def replace_a_module(model: Any) -> None:
    model.model.layers[1].mlp = Doubled(model.model.layers[1].mlp)


def replace_a_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states) * 2


def replace_the_activation(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = functional.relu


def train(model: Any) -> None:
    model.train()


def change_the_configuration(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.01


CHANGES = (
    add_a_hook,
    add_a_hook_to_all_modules,
    pytest.param(switch_the_adapter, marks=needs_peft),
    pytest.param(disable_adapters, marks=needs_peft),
    give_a_weight_other_data,
    replace_a_weight,
    write_into_a_weight,
    replace_a_module,
    replace_a_forward,
    replace_the_activation,
    train,
    change_the_configuration,
)


class ChangingProcessor(LogitsProcessor):
    def __init__(self, change: Any, model: Any) -> None:
        self.change, self.model, self.calls = change, model, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == AT:
            self.change(self.model)
        return scores


class ChangingCriterion(StoppingCriteria):
    def __init__(self, change: Any, model: Any) -> None:
        self.processor = ChangingProcessor(change, model)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.processor(input_ids, scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class ChangingStreamer(BaseStreamer):
    def __init__(self, change: Any, model: Any) -> None:
        self.processor = ChangingProcessor(change, model)

    def put(self, value: torch.Tensor) -> None:
        self.processor(value, value)

    def end(self) -> None:
        pass


def prefix_function(change: Any, model: Any) -> Any:
    processor = ChangingProcessor(change, model)

    def allowed(batch_id: int, tokens: torch.Tensor) -> list[int]:
        if len(tokens) == 9 + AT and processor.calls < AT:
            processor.calls = AT
            change(model)
        return list(range(1, 99))

    return allowed


GIVEN = {
    "processor": lambda change, model: {"logits_processor": [ChangingProcessor(change, model)]},
    "criterion": lambda change, model: {"stopping_criteria": [ChangingCriterion(change, model)]},
    "prefix function": lambda change, model: {"prefix_allowed_tokens_fn": prefix_function(change, model)},
    "streamer": lambda change, model: {"streamer": ChangingStreamer(change, model)},
}
ARGUMENTS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}


def with_adapters(model: Any) -> None:
    from peft import LoraConfig

    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False), name)
    model.set_adapter("first")
    model.eval()


def generated(change: Any, given: Any, repeat: int = 2, **arguments: Any) -> list[torch.Tensor]:
    """Of several calls on one model, of which the last one has code that changes it."""
    model, outputs = llama(), []
    if change in (switch_the_adapter, disable_adapters):
        with_adapters(model)
    arguments = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, **arguments}
    try:
        for _ in range(repeat):
            outputs.append(model.generate(token_ids(2, 9), **given(lambda model: None, model), **arguments))
        outputs.append(model.generate(token_ids(2, 9), **given(change, model), **arguments))
        outputs.append(model.eval().generate(token_ids(2, 9), **arguments))
    finally:
        if hasattr(model, "handle"):
            model.handle.remove()
    return outputs


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_processor_that_changes_the_model_within_a_call(change, arguments):
    both = run_both(lambda: generated(change, GIVEN["processor"], **arguments))
    for stock, fast in zip(both.stock, both.fast, strict=True):
        assert torch.equal(stock, fast)
    assert not torch.equal(both.stock[1], both.stock[2])


@pytest.mark.parametrize("given", ["criterion", "streamer", "prefix function"])
@pytest.mark.parametrize("change", CHANGES)
def test_other_code_of_the_program_that_changes_the_model_within_a_call(change, given):
    arguments = {"num_beams": 2} if given == "prefix function" else {}
    both = run_both(lambda: generated(change, GIVEN[given], repeat=1, **arguments))
    for stock, fast in zip(both.stock, both.fast, strict=True):
        assert torch.equal(stock, fast)


def test_steps_with_a_processor_of_the_program_that_changes_nothing_are_captured():
    model = llama()
    for _ in range(2):
        model.generate(token_ids(2, 9), **GIVEN["processor"](lambda model: None, model), max_new_tokens=STEPS)
    assert replays(fastgen.explain()) > STEPS - 10


def test_a_call_whose_model_was_changed_says_so():
    model = llama()
    for change in (lambda model: None, add_a_hook):
        model.generate(token_ids(2, 9), **GIVEN["processor"](change, model), max_new_tokens=STEPS)
    report = fastgen.explain()
    assert "MODEL_CHANGED" in report.codes()
    assert 0 < replays(report) < AT
