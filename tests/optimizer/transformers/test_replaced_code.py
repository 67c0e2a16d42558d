"""Functions and methods that the program has put in the place of the library's see the rows that they see there."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from parity import (
    BEAMS,
    SAMPLES,
    assert_same,
    capturing,
    is_shared,
    left_alone_because,
    replays,
    run_both,
    tiny,
    token_ids,
)
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.llama import modeling_llama

import fastgen
from fastgen import testing

ROWS = 8  # of `SAMPLES`, for two inputs


@pytest.fixture(autouse=True)
def everywhere(share_always):
    with capturing():
        yield


def steered(states: torch.Tensor) -> torch.Tensor:
    """Another vector for each row, if there are as many rows as in the library."""
    rows = states.shape[0]
    return states + torch.linspace(-1, 1, rows).view(rows, *[1] * (states.dim() - 1)) * (rows == ROWS)


def steering(original: Any, index: int = 0) -> Any:
    """A function that treats rows differently: of several outputs, the one of this index."""

    def function(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if isinstance(output, tuple):
            return (*output[:index], steered(output[index]), *output[index + 1 :])
        return steered(output)

    return function


def same_and_left_alone(model: Any, name: str) -> None:
    report = assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES)
    assert left_alone_because(report, "USER_CODE", name) and not report.shared
    output = {"return_dict_in_generate": False, "output_scores": False, "output_logits": False, "max_new_tokens": 40}
    report = assert_same(model, {"input_ids": token_ids(2, 9)}, **BEAMS | output)
    assert not replays(report)


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half", "eager_attention_forward", "repeat_kv"])
@pytest.mark.parametrize("before", [False, True], ids=("first use", "after calls"))
def test_function_that_the_program_has_put_into_a_file_of_models(monkeypatch, name, before):
    model = tiny("llama", attn_implementation="eager")
    if before:
        assert is_shared(assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES))
    monkeypatch.setattr(modeling_llama, name, steering(getattr(modeling_llama, name)))
    same_and_left_alone(model, name)
    monkeypatch.undo()
    with capturing():
        assert is_shared(assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES))


def test_function_of_torch_in_a_module_that_the_forward_makes(monkeypatch):
    """CodeGen's attention has no softmax of its own: it makes an `nn.Softmax` at each step."""
    model = tiny("codegen", rotary_dim=4)
    assert is_shared(assert_same(model, {"input_ids": token_ids(2, 9)}, **BEAMS))
    monkeypatch.setattr(functional, "softmax", steering(functional.softmax))
    report = assert_same(model, {"input_ids": token_ids(2, 9)}, **BEAMS)
    assert left_alone_because(report, "USER_CODE", "softmax") and not report.shared


def test_mask_function_of_the_program(monkeypatch):
    original = modeling_llama.create_causal_mask
    seen = []

    def create_causal_mask(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["inputs_embeds"].shape[0])
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_causal_mask)
    both = run_both(lambda: (tiny("llama").generate(token_ids(2, 9), **SAMPLES), seen.copy(), seen.clear())[:2])
    assert torch.equal(both.stock[0], both.fast[0]) and both.stock[1] == both.fast[1] == [ROWS] * 7


def test_code_that_captures_attention_weights_sees_all_rows_in_every_step(monkeypatch):
    original = modeling_llama.eager_attention_forward
    seen: list[tuple[int, ...]] = []

    def capturing(*args: Any, **kwargs: Any) -> Any:
        output, weights = original(*args, **kwargs)
        seen.append(tuple(weights.shape))
        return output, weights

    model = tiny("llama", attn_implementation="eager")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", capturing)
    arguments = {"num_beams": 4, "max_new_tokens": 60, "min_new_tokens": 60}
    for _ in range(2):
        both = run_both(lambda: (model.generate(token_ids(2, 9), **arguments), seen.copy(), seen.clear())[:2])
        assert torch.equal(both.stock[0], both.fast[0])
        assert (
            both.fast[1] == both.stock[1] and len(both.fast[1]) == 120 and {shape[0] for shape in both.fast[1]} == {8}
        )


def test_method_that_the_program_has_replaced_on_the_class(monkeypatch):
    kind = modeling_gpt_neo.GPTNeoSelfAttention
    monkeypatch.setattr(kind, "_attn", steering(kind._attn))
    same_and_left_alone(tiny("gpt_neo", attention_types=[[["global"], 2]]), "_attn")


def test_method_that_the_program_has_replaced_on_one_module():
    model = tiny("gpt_neo", attention_types=[[["global"], 2]])
    attention = model.transformer.h[0].attn.attention
    attention._attn = steering(attention._attn)
    same_and_left_alone(model, "_attn of module transformer.h.0.attn.attention")


def test_activation_that_is_a_function_of_the_program():
    model = tiny("llama")
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = steering(ACT2FN["silu"])
    same_and_left_alone(model, "act_fn of module model.layers.1.mlp")


def test_function_of_torch_that_the_program_has_replaced(monkeypatch):
    monkeypatch.setattr(functional, "scaled_dot_product_attention", steering(functional.scaled_dot_product_attention))
    model = tiny("llama")
    report = assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES)
    assert not report.shared


def test_code_of_the_program_outside_of_the_forward_changes_nothing(monkeypatch):
    model = tiny("llama")
    generate = model.generate
    model.generate = lambda *args, **kwargs: generate(*args, **kwargs)
    save = type(model).save_pretrained
    monkeypatch.setattr(type(model), "save_pretrained", lambda *args, **kwargs: save(*args, **kwargs))
    assert is_shared(assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES))


def test_helpers_are_looked_up_once_as_long_as_nothing_is_replaced():
    model = tiny("llama")
    model.generate(token_ids(2, 9), **SAMPLES)
    with testing.watched("walk through a model") as walks:
        model.generate(token_ids(2, 9), **SAMPLES)
    assert not walks and is_shared(fastgen.explain())


class Steering:
    """An object that is called as a function is."""

    def __init__(self, original: Any) -> None:
        self.function = steering(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Descriptor:
    """A method that is no function."""

    def __init__(self, original: Any) -> None:
        self.function = steering(original)

    def __get__(self, module: Any, kind: type) -> Any:
        return functools.partial(self.function, module)


@pytest.mark.parametrize(
    "kind", [Steering, lambda original: mock.Mock(wraps=steering(original))], ids=("object", "mock")
)
def test_object_in_place_of_a_function_is_user_code(monkeypatch, kind):
    model = tiny("llama")
    assert is_shared(assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", kind(modeling_llama.apply_rotary_pos_emb))
    same_and_left_alone(model, "apply_rotary_pos_emb")


@pytest.mark.parametrize("kind", [Descriptor, lambda original: functools.partialmethod(steering(original))])
def test_descriptor_in_place_of_a_forward_is_user_code(monkeypatch, kind):
    model = tiny("llama")
    assert is_shared(assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES))
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", kind(modeling_llama.LlamaMLP.forward))
    same_and_left_alone(model, "forward")


def test_method_added_to_a_class_that_inherited_it_is_user_code(monkeypatch):
    model = tiny("llama")
    assert is_shared(assert_same(model, {"input_ids": token_ids(2, 9)}, **SAMPLES))
    assert "__call__" not in vars(modeling_llama.LlamaMLP)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "__call__", steering(nn.Module.__call__), raising=False)
    same_and_left_alone(model, "__call__")


@pytest.mark.parametrize("arguments", [{"do_sample": False}, {"do_sample": True}], ids=("greedy", "samples"))
def test_call_of_one_model_is_called_as_in_the_library(arguments):
    model = tiny("llama")

    def of_model(*args: Any, **kwargs: Any) -> Any:
        outputs = type(model).__call__(model, *args, **kwargs)
        outputs.logits = outputs.logits.roll(1, -1)
        return outputs

    vars(model)["__call__"] = of_model
    arguments |= {"max_new_tokens": 20, "eos_token_id": list(range(3, 90, 6))}
    stock, fast, report = run_both(lambda: model.generate(token_ids(3, 9), **arguments))
    assert torch.equal(stock, fast) and "METHOD_REPLACED" in report.codes()


def test_beams_under_half_precision_by_default():
    model, default = tiny("llama"), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        stock, fast, _ = run_both(lambda: model.generate(token_ids(2, 9), **BEAMS))
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(stock, fast)
