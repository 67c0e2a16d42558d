"""What a generation of fairseq remembers between its steps."""

from __future__ import annotations

import sys

import pytest
import torch

from fastgen.testing import costs

pytest.importorskip("fairseq")

from fairseq_models import CASES

from fastgen.optimizer.decoding.call import generate_call
from fastgen.optimizer.decoding.model_facts import facts_of
from fastgen.optimizer.fairseq.checks import KNOWN, plan
from fastgen.optimizer.fairseq.decode_step import DecodingState
from fastgen.optimizer.fairseq.loop import StepHistory


def plan_of(model):
    return plan(model, facts_of(model, KNOWN))


def test_history_finds_values_of_ancestors():
    """Against moving all values at each step."""
    torch.manual_seed(1)
    rows, width, steps = 6, 3, 12
    history, moved, expected = None, torch.empty(rows, width, 0), None
    for step in range(steps):
        values = torch.randn(rows, width)
        history = history or StepHistory(steps, values, torch.float32)
        history.write(step, values)
        moved = torch.cat([moved, values.unsqueeze(2)], dim=2)
        expected = torch.tensor([rows - 1, 0])
        assert torch.equal(history.index_select(0, expected), moved[expected])
        rows = 4 if step >= 5 else rows
        order = torch.randint(0, len(values), (rows,))
        history.reorder(order)
        moved = moved[order]


def test_state_keeps_cross_attention_once_per_input_and_one_mask():
    model = CASES["transformer"]().models[0]
    state = DecodingState(plan_of(model), inputs=2, rows_per_input=3, limit=8)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    masks = {id(state.mask_sync(padding, inputs=2)) for _ in range(3)}
    assert len(masks) == 1
    mask = state.mask_sync(padding, inputs=2)
    assert torch.equal(mask[:, 0, 0], ~padding)
    attention = state.plan.cross_attention[0]
    keys = torch.randn(2, 2, 3, 8)
    state.set_prompt(attention, keys, keys + 1)
    state.reorder(torch.tensor([5, 3, 4]), torch.tensor([1]))
    kept_keys, kept_values = state.prompt(attention)
    assert torch.equal(kept_keys, keys[1:]) and torch.equal(kept_values, keys[1:] + 1)
    assert torch.equal(state.mask, mask[1:])


def test_mask_that_hides_nothing_is_left_out():
    state = DecodingState(plan_of(CASES["transformer"]().models[0]), inputs=2, rows_per_input=2, limit=8)
    assert state.mask_sync(torch.zeros(2, 3, dtype=torch.bool), inputs=2) is None


def test_mask_of_all_rows_is_read_once_per_input():
    state = DecodingState(plan_of(CASES["transformer"]().models[0]), inputs=2, rows_per_input=2, limit=8)
    padding = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 1]])
    assert state.mask_sync(padding, inputs=2)[:, 0, 0].tolist() == [[True, True, False], [True, False, False]]


def test_prompt_fills_the_state_and_is_kept_once_per_input_where_it_pays():
    case = CASES["transformer_lm"]()
    decoder = case.models[0].decoder
    tokens = torch.tensor([[2, 5, 6, 7], [2, 8, 9, 10]])
    for pays in (True, False):
        state = DecodingState(plan_of(case.models[0]), inputs=2, rows_per_input=3, limit=9)
        with (
            torch.no_grad(),
            costs(min_saved_elements=0 if pays else sys.maxsize),
            generate_call("test") as call,
        ):
            call.is_accelerated = True
            state.prefill(call, decoder, tokens)
        attention = decoder.layers[0].self_attn
        if pays:
            assert [part.shape for part in state.prompt(attention)] == [(2, 2, 4, 8)] * 2
        else:
            assert state.prompt(attention) is None
            assert state.append(attention, *torch.zeros(2, 6, 2, 1, 8))[0].shape == (6, 2, 5, 8)


def test_state_refuses_what_fairseq_would_keep_in_it_for_a_layer_of_fastgen():
    """So that patches which are taken back during a generation end it, instead of changing its results."""
    model = CASES["transformer"]().models[0]
    state = DecodingState(plan_of(model), inputs=2, rows_per_input=3, limit=8)
    with pytest.raises(RuntimeError, match="switched off"):
        model.decoder.layers[0].self_attn._set_input_buffer(state, {})


@pytest.mark.parametrize(
    ("name", "reason"),
    (("fconv", "FConvDecoder"), ("lstm", "LSTMDecoder"), ("lightconv", "LightConvDecoder")),
)
def test_other_decoders_are_left_alone_with_a_reason(name, reason):
    assert reason in "".join(map(str, plan_of(CASES[name]().models[0]).reasons))


def test_plan_leaves_modules_alone_that_it_does_not_know():
    model = CASES["transformer"]().models[0]
    first, second = model.decoder.layers
    first.self_attn.onnx_trace = True
    second.encoder_attn.add_zero_attn = True
    found = plan_of(model)
    assert found.self_attention == [second.self_attn] and found.cross_attention == [first.encoder_attn]
    assert set(found.others) == {first.self_attn, second.encoder_attn}
    assert not found.by_input, "an attention of fairseq needs all rows of the encoder's output"


def test_hooks_make_the_plan_give_all_that_fairseq_gives():
    model = CASES["transformer"]().models[0]
    assert plan_of(model).by_input and not plan_of(model).watched
    model.decoder.layers[0].register_forward_hook(lambda *args: None)
    assert plan_of(model).watched and not plan_of(model).by_input
