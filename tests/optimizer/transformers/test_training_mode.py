"""Training mode shares if nothing is dropped: the same tokens, and the same training step afterwards."""

import copy

import pytest
import torch
from parity import assert_same, run_both
from reports import PROMPT, is_shared, left_alone_because
from tiny_models import BOTH, SAMPLES, inputs_of, padded, tiny
from torch import nn
from transformers import GPT2Config

pytestmark = pytest.mark.usefixtures("share_always")

WITHOUT_DROPOUT = {
    "llama": {},
    "qwen2": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "t5": {"dropout_rate": 0.0},
    "bart": {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
}


def model_of(name: str, **overrides: object) -> nn.Module:
    return tiny(name, **WITHOUT_DROPOUT[name] | overrides).train()


@pytest.mark.parametrize("name", WITHOUT_DROPOUT)
@BOTH
def test_training_without_dropout_is_shared(name, arguments):
    model = model_of(name)
    assert is_shared(assert_same(model, inputs_of(name, 9, 5), **arguments), PROMPT)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "name, overrides, reason",
    (
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("gpt2", {"embd_pdrop": 0.2}, "transformer.drop is in training mode with p=0.2"),
        ("gpt2", {"attn_pdrop": 0.2}, "attn_dropout is in training mode with p=0.2"),
        ("t5", {"dropout_rate": 0.1}, "dropout=0.1"),
        ("bart", {"activation_dropout": 0.3}, "activation_dropout=0.3"),
        ("bart", {"decoder_layerdrop": 0.4}, "layerdrop=0.4"),
    ),
)
def test_a_dropout_is_named(name, overrides, reason):
    report = assert_same(model_of(name, **overrides), padded(9, 5), **SAMPLES)
    assert left_alone_because(report, "TRAINING", reason) and left_alone_because(report, "TRAINING", "training mode")


def test_dropouts_of_a_configuration_count_if_they_are_read():
    assert GPT2Config().summary_first_dropout  # of a head that this model does not have
    assert is_shared(assert_same(model_of("gpt2"), padded(9, 5), **SAMPLES), PROMPT)
    model = model_of("llama")

    class Reading(type(model.model.norm)):
        def forward(self, states):
            return nn.functional.dropout(super().forward(states), self.config.late_dropout, self.training)

    model.model.norm.__class__ = Reading
    Reading.__module__ = "transformers.reading"
    model.model.norm.config = model.config
    model.config.late_dropout = 0.5
    assert left_alone_because(assert_same(model, padded(9, 5), **SAMPLES), "TRAINING", "late_dropout=0.5")


@pytest.mark.parametrize(
    ("put_in", "reason"),
    [
        (lambda model: model.add_module("added", nn.BatchNorm1d(4)), "added is in training mode with"),
        (lambda model: model.add_module("added", nn.RReLU()), "added is in training mode with"),
        (lambda model: model.gradient_checkpointing_enable(), "gradient checkpointing"),
    ],
    ids=("batch norm", "random slope", "checkpointing"),
)
def test_modules_that_differ_in_training_are_named(put_in, reason):
    model = model_of("llama")
    put_in(model)
    assert left_alone_because(assert_same(model, padded(9, 5), **SAMPLES), "TRAINING", reason)
    assert is_shared(assert_same(model.eval(), padded(9, 5), **SAMPLES), PROMPT)


def test_dropout_left_on_inside_an_evaluated_model_is_left_alone():
    model = tiny("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    assert left_alone_because(assert_same(model, padded(9, 5), **SAMPLES), "TRAINING", "training mode")


@pytest.mark.parametrize("name", ("llama", "gpt2", "t5", "bart"))
@pytest.mark.parametrize("size", ({}, {"hidden_size": 256, "n_embd": 256, "d_model": 256}), ids=("tiny", "wide"))
def test_weights_trained_between_calls_are_used(name, size):
    """Steps of an optimizer change weights in place: nothing that a call kept of them is used afterwards."""
    untrained = model_of(name, **size)
    prompts = inputs_of(name, 9, 5)

    def train() -> list[torch.Tensor]:
        model = copy.deepcopy(untrained)
        optimizer, results = torch.optim.SGD(model.parameters(), lr=0.3), []
        for _ in range(4):
            tokens = model.generate(**prompts, do_sample=True, num_return_sequences=4, max_new_tokens=24)
            model(input_ids=tokens, labels=tokens).loss.backward()
            results += [tokens, *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return [*results, *model.parameters()]

    both = run_both(train)
    assert both.report.shared
    assert not torch.equal(both.stock[-1], list(untrained.parameters())[-1])
    for stock, fast in zip(both.stock, both.fast, strict=True):
        torch.testing.assert_close(fast, stock, atol=1e-5, rtol=1e-5)
