"""Code of the program inside a library model, around a generate and in its processors: still the right answer."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from parity import BEAMS, SAMPLES, assert_same, is_shared, left_alone_because, run_both, tiny, token_ids
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fastgen.ops import cpu_linear as op
from fastgen.optimizer.decoding import kv_cache
from fastgen.optimizer.decoding.linear_mode import FastLinear


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(kv_cache, "MIN_SAVED_ELEMENTS", 0)
    monkeypatch.setattr(op, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(op, "machine_reasons", list)


class Steering(nn.Module):
    """Adds another vector to each row."""

    def __init__(self, inner: nn.Module, rows: int) -> None:
        super().__init__()
        self.inner, self.vectors = inner, torch.randn(rows, 1, 32)

    def forward(self, states):
        return self.inner(states) + self.vectors


@pytest.mark.parametrize(("arguments", "rows"), [(BEAMS, 6), (SAMPLES, 8)], ids=("beams", "samples"))
@pytest.mark.parametrize("way", ["module", "forward"])
def test_code_of_the_program_that_knows_its_rows_is_left_alone(arguments, rows, way):
    model = tiny("llama")
    layer = model.model.layers[0]
    steering = Steering(layer.mlp, rows).eval()
    if way == "module":
        layer.mlp = steering
    else:
        inner = layer.mlp.forward
        layer.mlp.forward = lambda states: inner(states) + steering.vectors
    report = assert_same(model, {"input_ids": token_ids(2, 9)}, **arguments)
    assert left_alone_because(report, "is not the library's")


def test_rows_moved_from_input_to_input():
    model = tiny("llama")

    def resample(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        outputs = model._prefill(input_ids, generation_config, kwargs)
        for _ in range(4):
            kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
            order = torch.arange(len(input_ids)).flip(0)
            input_ids = torch.cat([input_ids, outputs.logits[:, -1].argmax(-1, keepdim=True)], dim=1)[order]
            kwargs["past_key_values"].reorder_cache(order)
            inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **kwargs)
            outputs = model(**inputs, return_dict=True)
        return outputs.logits

    both = run_both(lambda: model.generate(token_ids(2, 9), custom_generate=resample, **SAMPLES))
    torch.testing.assert_close(both.fast, both.stock, atol=1e-4, rtol=1e-4)
    assert is_shared(both.report)


def test_torchscript_inside_a_model():
    model = tiny("llama")
    model.model.layers[0].mlp = torch.jit.script(nn.Linear(32, 32).eval())
    assert left_alone_because(assert_same(model, {"input_ids": token_ids(2, 9)}, **BEAMS), "TorchScript")


ROWS, WEIGHT, BIAS = torch.randn(8, 64), torch.randn(48, 64), torch.randn(96)


@pytest.mark.parametrize(
    "product",
    [
        lambda: functional.linear(ROWS, WEIGHT, BIAS[::2]),
        lambda: functional.linear(ROWS, WEIGHT, BIAS[:1].expand(48)),
        lambda: torch.addmm(BIAS[:1].expand(48), ROWS, WEIGHT.t()),
        lambda: functional.linear(ROWS, WEIGHT.flatten().as_strided((48, 64), (3, 1))),
        lambda: functional.linear(ROWS, WEIGHT.to_sparse_csr()),
        lambda: torch.addmm(BIAS[:48], ROWS.to_sparse_csr(), WEIGHT.t().contiguous()),
        lambda: torch.func.jvp(lambda rows: functional.linear(rows, WEIGHT), (ROWS,), (ROWS,))[1],
        lambda: torch.func.vmap(lambda rows: functional.linear(rows, WEIGHT))(ROWS.view(2, 4, 64)),
        lambda: torch.jit.trace(lambda rows: functional.linear(rows, WEIGHT), ROWS, check_trace=False)(ROWS),
    ],
)
def test_odd_products_are_those_of_torch(product):
    with torch.no_grad():
        expected = product()
        with FastLinear(Counter()):
            found = product()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_products_under_a_mode_of_the_program_are_seen_by_it():
    model = tiny("llama")

    def count() -> int:
        with FlopCounterMode(display=False) as counter:
            model.generate(token_ids(2, 9), max_new_tokens=3)
        return counter.get_total_flops()

    both = run_both(count)
    assert both.stock == both.fast
