"""Attention of completions to the prompt that they share and to themselves, with gradients, on a CPU.

    queries [B*M, H, L, D] ──fold──> keys of the prompt [B, H_kv, P, D], all of them visible
                           ───────>  keys of the rows [B*M, H_kv, L, D], causal

Each part is torch's flash attention, and the outputs meet by their log-sum-exps. The backward of flash attention takes
the output and the log-sum-exp of the whole softmax, so that the gradients of each part are exact without the other
part. The gradient of a prompt's keys is the sum over the rows that share them, because their queries are folded; no
repeated copy of these keys exists at any time.

Tests: tests/ops/test_prompt_attention.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.ops.folding import fold, unfold
from fastgen.ops.probes import probe
from fastgen.ops.tracing import is_transformed

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def can_attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor | None) -> bool:
    """Whether autograd records, and these are a prompt's keys and the rows' own, with a mask that may be causal."""
    records = torch.is_grad_enabled() and any(states.requires_grad for states in (query, *keys, *values))
    if not records or len(keys) != 2 or keys[0].shape[3] != values[0].shape[3]:
        return False
    rows, _, length, _ = query.shape
    if keys[1].shape[0] != rows or keys[1].shape[2] != length or is_transformed():
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.shape[:2] not in ((1, 1), (rows, 1)) or mask.dim() != 4):
        return False
    return (mask is not None or length == 1) and (query.shape[1] == keys[1].shape[1] or _takes_grouped_heads())


@probe("torch's function does not take fewer heads of keys than of queries")
def _takes_grouped_heads() -> bool:
    """Whether torch's function takes fewer heads of keys than of queries, which it does not document."""
    query, keys = torch.arange(64.0).sin().view(1, 2, 4, 8), torch.arange(32.0).cos().view(1, 1, 4, 8)
    gradients = []
    for states in (keys, keys.expand(-1, 2, -1, -1)):
        output, sums = _flash(query, states, states, is_causal=True)
        gradients.append(_flash_backward(query, query, states, states, output, sums, 0.0, True)[1].sum(dim=1))
    return bool(torch.allclose(*gradients, atol=1e-4))


def structure_sync(mask: Tensor | None, query: Tensor, keys: Sequence[Tensor]) -> tuple[Tensor | None] | None:
    """Returns what a mask `[rows or 1, 1, L, P+L]` hides of each prompt, if it is causal; None if it has another form.

    The result is a tuple of an additive mask `[prompts, 1, 1, P]`, or of None if it hides nothing.
    """
    if mask is None:
        return (None,)
    prompts, _, length, _ = keys[0].shape
    of_prompt = mask[..., :length]
    of_rows = mask[..., length:]
    if not bool((of_rows == torch.ones_like(of_rows[:1]).tril()).all()):
        return None
    if bool(of_prompt.all()):
        return (None,)
    by_prompt = of_prompt.expand(query.shape[0], -1, -1, -1).unflatten(0, (prompts, -1))  # [B, M, 1, L, P]
    visible = by_prompt[:, :1, :, :1]
    if not bool((by_prompt == visible).all()) or not bool(visible.any(dim=-1).all()):
        return None
    hidden = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, float("-inf"))
    return (hidden.flatten(0, 1),)


def attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    structure: tuple[Tensor | None],
    scale: float,
) -> Tensor:
    """Computes `shared_attention` for a mask of this `structure_sync`, see `can_attend`."""
    states = [query, keys[0], values[0], keys[1], values[1]]
    if torch.is_autocast_enabled("cpu"):  # as autocast does for torch's own attention
        states = [state.to(torch.get_autocast_dtype("cpu")) for state in states]
    mask = None if structure[0] is None else structure[0].to(states[0].dtype)
    return _PromptAttention.apply(*states, mask, scale)


class _PromptAttention(torch.autograd.Function):
    """query `[B*M, H, L, D]`; keys and values of the prompts `[B, H_kv, P, D]` and of the rows `[B*M, H_kv, L, D]`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *rest: Any) -> Tensor:
        keys, values, row_keys, row_values, mask, scale = rest
        rows_per_prompt = query.shape[0] // keys.shape[0]
        heads = query.shape[1]
        folded = fold(query, rows_per_prompt, keys.shape[1])
        of_prompt, prompt_sums = _flash(folded, keys, values, attn_mask=mask, scale=scale)
        of_rows, row_sums = _flash(query, row_keys, row_values, is_causal=True, scale=scale)
        prompt_sums = unfold(prompt_sums.unsqueeze(-1), rows_per_prompt, heads)  # [B*M, H, L, 1]
        row_sums = row_sums.unsqueeze(-1)
        sums = torch.logaddexp(prompt_sums, row_sums)
        output = unfold(of_prompt, rows_per_prompt, heads) * (prompt_sums - sums).exp_()
        output = output.add_(of_rows * (row_sums - sums).exp_()).to(query.dtype)
        ctx.scale = scale
        ctx.save_for_backward(query, keys, values, row_keys, row_values, mask, output, sums)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, keys, values, row_keys, row_values, mask, output, sums = ctx.saved_tensors
        rows_per_prompt = query.shape[0] // keys.shape[0]
        heads = query.shape[1]
        kv_heads = keys.shape[1]
        folded = (fold(states, rows_per_prompt, kv_heads) for states in (gradient, query, output, sums))
        of_prompt, prompt_query, prompt_output, prompt_sums = folded
        query_gradient, *prompt_gradients = _flash_backward(
            of_prompt, prompt_query, keys, values, prompt_output, _laid_out(prompt_sums), 0.0, False,
            attn_mask=mask, scale=ctx.scale,
        )  # fmt: skip
        row_query_gradient, *row_gradients = _flash_backward(
            gradient, query, row_keys, row_values, output, _laid_out(sums), 0.0, True, scale=ctx.scale
        )
        query_gradient = unfold(query_gradient, rows_per_prompt, heads) + row_query_gradient
        return query_gradient, *prompt_gradients, *row_gradients, None, None


def _laid_out(sums: Tensor) -> Tensor:
    """Returns log-sum-exps `[rows, heads, length, 1]` as `[rows, heads, length]` with adjacent heads, as torch does."""
    return sums.squeeze(-1).transpose(1, 2).contiguous().transpose(1, 2)
