"""Attention of completions to a shared prompt: outputs and gradients are torch's for repeated keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fastgen.ops import prompt_attention
from fastgen.ops.shared_attention import shared_attention


def states_of(prompts=2, rows=3, heads=4, kv_heads=2, prompt=9, length=5, width=8, dtype=torch.float64):
    """Returns the query, keys and values of prompts, and keys and values of rows; all of them need gradients."""
    shapes = [(prompts * rows, heads, length, width), *[(prompts, kv_heads, prompt, width)] * 2]
    shapes += [(prompts * rows, kv_heads, length, width)] * 2
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=dtype, generator=random).requires_grad_() for shape in shapes]


def mask_of(query, keys, padding=0):
    """Returns a mask as transformers makes it; the first prompt begins with padding."""
    rows, _, length, _ = query.shape
    prompts, _, prompt, _ = keys.shape
    mask = torch.ones(rows, 1, length, prompt + length, dtype=torch.bool)
    mask[..., prompt:] = torch.ones(length, length, dtype=torch.bool).tril()
    mask[: rows // prompts, :, :, :padding] = False
    return mask


def shared(states, mask, scale=None):
    query, keys, values, row_keys, row_values = states
    return shared_attention(query, [keys, row_keys], [values, row_values], mask, scale)


def repeated(states, mask, scale=None):
    query, *pairs = states
    rows, groups = query.shape[0] // pairs[0].shape[0], query.shape[1] // pairs[0].shape[1]
    both = []
    for prompt, own in zip(pairs[:2], pairs[2:]):
        both.append(torch.cat([prompt.repeat_interleave(rows, 0), own], dim=2).repeat_interleave(groups, 1))
    return functional.scaled_dot_product_attention(query, *both, mask, scale=scale)


def assert_agrees(states, mask, tolerance=1e-10, scale=None):
    outputs = [attend(states, mask, scale) for attend in (shared, repeated)]
    torch.testing.assert_close(*outputs, rtol=0, atol=tolerance)
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1)).to(outputs[0].dtype)
    gradients = [torch.autograd.grad(output, states, weights) for output in outputs]
    for gradient, expected in zip(*gradients):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=tolerance * 10)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.integers(1, 3),
    rows=st.integers(1, 4),
    heads=st.sampled_from(((1, 1), (4, 1), (4, 2), (3, 3))),
    prompt=st.integers(3, 40),
    length=st.integers(1, 20),
    padding=st.integers(0, 2),
)
def test_outputs_and_gradients_are_those_of_torch(prompts, rows, heads, prompt, length, padding):
    states = states_of(prompts, rows, *heads, prompt, length)
    mask = mask_of(states[0], states[1], padding)
    assert prompt_attention.structure_sync(mask, states[0], [states[1], states[3]]) is not None
    assert_agrees(states, mask, scale=0.3)


@pytest.mark.parametrize("dtype, tolerance", ((torch.float32, 1e-5), (torch.bfloat16, 0.05)))
def test_lower_precisions_agree_within_their_rounding(dtype, tolerance):
    states = states_of(dtype=dtype)
    assert_agrees(states, mask_of(states[0], states[1], padding=2), tolerance)


def window(mask):
    mask[:, :, 3:, :7] = False


def see_later(mask):
    mask[:, :, 0, -1] = True


def differ_in_rows(mask):
    mask[1, :, :, 0] = False


@pytest.mark.parametrize("change", (window, see_later, differ_in_rows))
def test_masks_of_other_forms_are_not_ignored(change):
    states = states_of()
    mask = mask_of(states[0], states[1])
    change(mask)
    assert prompt_attention.structure_sync(mask, states[0], [states[1], states[3]]) is None
    assert_agrees(states, mask)


def test_additive_masks_have_gradients_of_their_own():
    states = states_of()
    mask = torch.zeros(mask_of(states[0], states[1]).shape, dtype=torch.float64)
    bias = mask.masked_fill(~mask_of(states[0], states[1]), float("-inf")) + torch.arange(14.0, dtype=torch.float64)
    assert_agrees(states, bias)


def test_nothing_as_large_as_repeated_keys_is_saved():
    states = states_of(prompts=1, rows=8, prompt=64, length=4)
    mask, saved = mask_of(states[0], states[1]), []
    pack = lambda tensor: saved.append(tensor.numel()) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        shared(states, mask)
    assert max(saved) == max(states[0].numel(), states[1].numel()) < 8 * states[1].numel()


def test_calls_without_gradients_take_other_kernels():
    query, *others = (states.detach() for states in states_of())
    keys, values = others[::2], others[1::2]
    mask = mask_of(query, keys[0])
    assert not prompt_attention.can_attend(query, keys, values, mask)
    assert prompt_attention.can_attend(query.requires_grad_(), keys, values, mask)
