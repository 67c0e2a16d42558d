"""What the modules of fairseq's decoder leave out in a generation: weights, reads of the device, steps of prompts.

That they give what fairseq's give: test_fairseq_generate.py, test_fairseq_options.py.
"""

from __future__ import annotations

from types import FunctionType
from unittest import mock

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.modules import MultiheadAttention
from fairseq_generation import compare, generate
from fairseq_models import CASES, prompts
from torch.nn import functional

import fastgen
from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.fairseq.checks import ModelPlan
from fastgen.optimizer.fairseq.decode_step import DecodingState

INPUTS, BEAMS, WIDTH, HEADS, SOURCE = 2, 3, 8, 2, 5
ROWS = INPUTS * BEAMS


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def attention_of(kind: str) -> MultiheadAttention:
    torch.manual_seed(0)
    attention = MultiheadAttention(WIDTH, HEADS, **{kind: True}).eval()
    for parameter in attention.parameters():
        parameter.normal_()
    return attention


def test_weights_that_nobody_sees_are_not_computed():
    attention = attention_of("encoder_decoder_attention")
    state = DecodingState(ModelPlan(cross_attention=[attention]), INPUTS, BEAMS, 9)
    states, query = torch.randn(SOURCE, INPUTS, WIDTH), torch.randn(1, ROWS, WIDTH)
    with mock.patch.object(
        functional, "scaled_dot_product_attention", wraps=functional.scaled_dot_product_attention
    ) as calls:
        _, weights = attention(query, states, states, incremental_state=state, static_kv=True, need_weights=True)
    assert weights is None and calls.call_count == 1


@pytest.mark.parametrize("padded", (True, False))
@pytest.mark.parametrize("masked", (None, "additive", "boolean"))
def test_encoder_attention_inside_a_generation(padded, masked):
    attention = attention_of("self_attention")
    query = torch.randn(SOURCE, INPUTS, WIDTH)
    padding = torch.zeros(INPUTS, SOURCE, dtype=torch.bool)
    padding[1, 3:] = padded
    boolean = torch.ones(SOURCE, SOURCE, dtype=torch.bool).triu(1)
    additive = torch.zeros(SOURCE, SOURCE).masked_fill(boolean, -torch.inf)
    mask = {None: None, "additive": additive, "boolean": boolean}[masked]

    def call() -> tuple:
        return attention(query, query, query, padding, need_weights=False, attn_mask=mask)

    with fastgen.disabled():
        expected, _ = call()
    with mock.patch.object(
        functional, "multi_head_attention_forward", side_effect=AssertionError("torch's was called")
    ):
        with generate_call("test") as running:
            running.is_accelerated = True
            found, weights = call()
        with pytest.raises(AssertionError, match="torch's was called"):
            call()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert weights is None


def test_no_step_asks_whether_tokens_are_padding():
    """That read would wait for the device in every step."""
    reads = []
    original = torch.Tensor.any

    def counted(tensor: torch.Tensor, *args, **kwargs):
        reads.append(tensor.shape)
        return original(tensor, *args, **kwargs)

    case = CASES["transformer"]()
    with mock.patch.object(torch.Tensor, "any", counted):
        generate(case)
        ours = len([shape for shape in reads if shape])
        reads.clear()
        with fastgen.disabled():
            generate(case)
    assert ours <= 3 < len(reads)


def test_prompt_is_fed_by_steps_where_a_layer_is_left_to_fairseq():
    case = CASES["transformer_lm"]()
    case.models[0].decoder.layers[1].self_attn.skip_embed_dim_check = True
    both = compare(case)
    assert not any("prompt" in item for item in both.report.shared) and both.report.shared


def test_prompt_is_computed_in_one_pass():
    """The decoder gets the whole common prompt once, with one row per input, and then one step after the other."""
    case, shapes = CASES["transformer_lm"](), []
    sample = prompts(case.task.dictionary, (6, 6, 6))
    decoder = type(case.models[0].decoder)
    original = decoder.forward

    def watched(self, tokens, *args, **kwargs):
        shapes.append((tuple(tokens.shape), kwargs.get("incremental_state") is not None))
        return original(self, tokens, *args, **kwargs)

    # As if it were fairseq's: code of the program would see each step.
    names = {"__name__": "fairseq.watched", "shapes": shapes, "original": original}
    watched = FunctionType(watched.__code__, names, closure=watched.__closure__)
    with mock.patch("fastgen.optimizer.fairseq.checks.TransformerDecoderBase.forward", watched):
        generate(case, sample, beam=2, max_len_b=12)
    assert shapes[0] == ((3, 7), False)
    assert shapes[1] == ((6, 8), True)
    assert "the first 6 tokens of the prompt: once per input, in one pass" in fastgen.explain().shared
