"""Forwards of fairseq's modules while fastgen generates: caches written in place, nothing read on the host.

- `MultiheadAttention.forward`: beams folded, attention fused. The call passes the state of a generation as fairseq's
  incremental state. A call without one is left to fairseq, except an encoder's inside a generation: torch computes that
  in one function, in which products with large weights cannot be replaced by faster ones.
- `TransformerDecoderBase.extract_features_scriptable` checks in every step whether a token is padding, which waits for
  the device. Generated tokens are not, except in rows that cannot win any more: see `self_attention`.
- Positional embeddings take the position from the shape of the tokens; in a captured step it is a number on the device.
- `NGramRepeatBlock.forward` compares, on a CPU, with the end of the padded buffer instead of the last tokens, and bans
  nothing; the op does on every device what fairseq's CUDA kernel does.
- HiFi-GAN vocoders, for spectrograms and, as `CodeGenerator`, for units, run through `optimizer/vocoder.py`.

Tests: tests/optimizer/fairseq/test_fairseq_loop.py, tests/optimizer/fairseq/test_fairseq_captured_steps.py,
tests/optimizer/fairseq/test_fairseq_ngrams.py, tests/optimizer/vocoder/test_vocoders.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor
from torch.nn import functional

from fastgen.ops import no_repeat_ngram as op
from fastgen.ops.folding import fold, unfold
from fastgen.ops.no_repeat_ngram.kernels import kernel_for
from fastgen.ops.shared_attention import query_key_scores, shared_attention, weighted_values
from fastgen.optimizer.decoding.call import add_reasons, count, current_call, settings_of
from fastgen.optimizer.decoding.faster_forwards import has_faster_forward
from fastgen.optimizer.decoding.model_info import facts_of
from fastgen.optimizer.decoding.report import NGRAMS, Reason, that_hold
from fastgen.optimizer.fairseq.checks import KNOWN, computes_whole
from fastgen.optimizer.fairseq.decode_step import DecodingState
from fastgen.optimizer.vocoder import faster_waveform


def multihead_attention(
    original: Callable,
    self: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_padding_mask: Tensor | None = None,
    incremental_state: Any = None,
    need_weights: bool = True,
    static_kv: bool = False,
    attn_mask: Tensor | None = None,
    before_softmax: bool = False,
    need_head_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Replaces `MultiheadAttention.forward`; query, key, value and output `[length, rows, embed_dim]`."""
    state = incremental_state
    if isinstance(state, DecodingState):
        if state.has_self(self):
            return self_attention(self, query, state), None
        if state.has_cross(self):
            wanted = need_head_weights or (need_weights and state.plan.watched)
            attended, weights = cross_attention(self, query, key, key_padding_mask, state, wanted)
            return attended, weights if weights is None or need_head_weights else weights.mean(dim=0)
    elif state is None and not (need_weights or need_head_weights or static_kv or before_softmax):
        is_inside = (call := current_call()) is not None and call.is_accelerated
        if is_inside and query.shape[-1] == self.embed_dim and computes_whole(self):
            return whole_attention(self, query, key, value, key_padding_mask, attn_mask), None
    rest = static_kv, attn_mask, before_softmax, need_head_weights
    return original(self, query, key, value, key_padding_mask, incremental_state, need_weights, *rest)


def self_attention(attention: Any, query: Tensor, state: DecodingState) -> Tensor:
    """Computes self-attention of each row to its generated tokens; query and result `[length, rows, embed_dim]`.

    Padding needs no mask: only rows that cannot win any more (with a score of minus infinity) contain any.
    """
    layer = state.layers[attention]
    scale = attention.scaling
    mask = state.self_mask
    queries, keys, values = (
        _split_heads(attention, project(query)) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    state.kv.append(layer, keys, values)
    segments = state.kv.segments(layer)
    count("scaled_dot_product_attention" if len(segments) == 1 else "shared_attention")
    keys, values = zip(*segments)
    attended = shared_attention(queries, keys, values, mask, scale, state.kv.bounds[layer])
    return attention.out_proj(_join_heads(attended))


def cross_attention(
    attention: Any, query: Tensor, key: Tensor, padding: Tensor | None, state: DecodingState, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes attention of the rows to their input, whose rows are folded into the query length of one product.

    key: the encoder's output `[source_length, inputs, …]`, or with the rows of the query; only the first step reads it.
    query and result `[length, rows, embed_dim]`; weights, if needed, `[heads, rows, length, source_length]`.
    """
    stored = state.prompt(attention)
    if stored is None:
        inputs = query.shape[1] // state.rows_per_input
        by_input = key[:, :: key.shape[1] // inputs]
        if padding is not None:
            state.mask_sync(padding, inputs)
        projections = attention.k_proj, attention.v_proj
        stored = state.set_prompt(attention, *(_split_heads(attention, project(by_input)) for project in projections))
    keys, values = stored
    rows_per_input = state.rows_per_input
    heads = attention.num_heads
    weights = None
    folded = fold(_split_heads(attention, attention.q_proj(query)), rows_per_input, heads)  # [B, H, M*L, D]
    count("matmul" if need_weights else "shared_attention")
    if need_weights:
        scores = query_key_scores(folded * attention.scaling, [keys])  # [B, H, M*L, S]
        if state.mask is not None:
            scores = scores.masked_fill(~state.mask, -torch.inf)
        weights = scores.softmax(dim=-1, dtype=torch.float32)
        attended = weighted_values(weights.to(scores.dtype), [values])
        weights = unfold(weights, rows_per_input, heads).transpose(0, 1)
    else:
        attended = shared_attention(folded, [keys], [values], state.mask, attention.scaling)
    return attention.out_proj(_join_heads(unfold(attended, rows_per_input, heads))), weights


def whole_attention(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Tensor:
    """Returns what `functional.multi_head_attention_forward` returns without weights, `[length, rows, embed_dim]`.

    Inside `DecodingState.prefill` the state stores keys and values of its self-attention.
    """
    is_self = key is query and value is query
    query = query.contiguous()  # the first layer gets a transposed view, which three products would copy
    key, value = (query, query) if is_self else (key, value)
    queries, keys, values = (
        _split_heads(attention, _project(projection, rows))
        for projection, rows in ((attention.q_proj, query), (attention.k_proj, key), (attention.v_proj, value))
    )
    state = next(settings_of(DecodingState), None)
    if state is not None and state.has_self(attention):
        state.set_prompt(attention, keys, values)
    mask = _whole_mask(key_padding_mask, attn_mask, queries.dtype)
    count("scaled_dot_product_attention")
    attended = shared_attention(queries, [keys], [values], mask)
    return _project(attention.out_proj, _join_heads(attended))


def _whole_mask(padding: Tensor | None, attn_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Merges fairseq's two masks into one that broadcasts to `[rows, heads, length, source_length]`."""
    hidden = None if padding is None else padding.bool()[:, None, None, :]
    if attn_mask is None:
        return None if hidden is None else ~hidden
    if attn_mask.dtype == torch.bool:
        return ~attn_mask if hidden is None else ~(attn_mask | hidden)
    added = attn_mask.to(dtype)
    return added if hidden is None else added.masked_fill(hidden, -torch.inf)


def _project(projection: Any, rows: Tensor) -> Tensor:
    """Computes the product alone, like torch's function, which does not call hooks of projections either."""
    if has_faster_forward(projection):
        return projection.forward(rows)
    return functional.linear(rows, projection.weight, projection.bias)


def _split_heads(attention: Any, rows: Tensor) -> Tensor:
    """Returns `[length, rows, embed_dim]` as a view `[rows, heads, length, head_dim]`."""
    return rows.view(*rows.shape[:2], attention.num_heads, -1).permute(1, 2, 0, 3)


def _join_heads(attended: Tensor) -> Tensor:
    """Joins heads: `[rows, heads, length, head_dim]` to `[length, rows, embed_dim]`."""
    return attended.permute(2, 0, 1, 3).flatten(2)


class Written(Tensor):
    """Tokens without padding: comparing them with it needs no read of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(index).as_subclass(Written)

    def contiguous(self) -> Tensor:
        return super().contiguous().as_subclass(Written)

    def eq(self, other: Any) -> Any:
        return SimpleNamespace(any=lambda: False)


def extract_features(
    original: Callable,
    self: Any,
    prev_output_tokens: Tensor,
    encoder_out: Any,
    incremental_state: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `extract_features_scriptable`: in a generation, tokens are known to be no padding."""
    if isinstance(incremental_state, DecodingState) and not self.cross_self_attention:
        prev_output_tokens = prev_output_tokens.as_subclass(Written)
    return original(self, prev_output_tokens, encoder_out, incremental_state, *args, **kwargs)


def positions(
    original: Callable, self: Any, input: Tensor, incremental_state: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Returns embeddings of positions; in a captured step the fed token's for all rows, `[1, 1, embed_dim]`."""
    if not isinstance(incremental_state, DecodingState) or incremental_state.position is None:
        return original(self, input, incremental_state, *args, **kwargs)
    table = self.weights if isinstance(self, SinusoidalPositionalEmbedding) else self.weight
    return functional.embedding(incremental_state.position + (self.padding_idx or 0), table)


def no_repeat_ngram(
    original: Callable, self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int
) -> Tensor:
    """Writes -inf into `lprobs`, `[bsz * beam_size, vocabulary_size]`, and returns them.

    tokens: `[bsz * beam_size, max_len + 2]`; the first `step + 1` columns are generated, the rest is padding.
    """
    if reasons := _ngram_reasons(self, tokens, lprobs, bsz * beam_size, step):
        add_reasons(NGRAMS, reasons)
        return original(self, tokens, lprobs, bsz, beam_size, step)
    count(*kernel_for(lprobs.device.type).counted_as)
    return op.no_repeat_ngram_(tokens, lprobs, self.no_repeat_ngram_size, step + 1)


def _ngram_reasons(blocker: Any, tokens: Tensor, lprobs: Tensor, rows: int, step: int) -> list[Reason]:
    """Returns why n-grams are left to fairseq; empty if they are not."""
    if blocker.no_repeat_ngram_size < 1:
        return [Reason("NGRAM_SIZE", f"no_repeat_ngram_size is {blocker.no_repeat_ngram_size} (supported: 1 or more)")]
    if not (tokens.shape[0] == rows == lprobs.shape[0] and 0 <= step < tokens.shape[1]):
        shapes = f"tokens {tuple(tokens.shape)} and lprobs {tuple(lprobs.shape)}"
        return [Reason("SHAPES", f"{shapes} at step {step} (supported: {rows} rows, of more tokens than steps)")]
    return that_hold(("SHAPES", "{}", op.unsupported_reasons(tokens, lprobs)))


def vocode(original: Callable, self: Any, x: Tensor) -> Tensor:
    """Runs a HiFi-GAN generator: states `[batch, channels, frames]` to a waveform `[batch, 1, samples]`."""
    return faster_waveform(partial(original, self, x), self, x)


def vocode_without_gradients(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Runs a vocoder without recording gradients, since its waveform has none; a modified vocoder runs unchanged."""
    if facts_of(self.model, KNOWN).altered:
        return original(self, *args, **kwargs)
    with torch.no_grad():
        return original(self, *args, **kwargs)
