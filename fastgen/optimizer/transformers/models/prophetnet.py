"""ProphetNet's decode steps: corrected, with the first predict stream only, and with keys that stay in segments.

A step computes the main stream, whose keys the next steps need, and the first predict stream, which predicts the next
token (Qi et al., 2020, §2.1 and §2.2). The other predict streams attend only to the main stream and to themselves, and
serve the training loss; so their output, `logits_ngram`, is not computed.

Results are those of the library's own step with its cache, except for two errors of the library: it raises ValueError
if `pad_token_id` is not 0, because it confuses positions, which begin after it, with numbers of keys; and it ignores
the attention mask of the decoder's tokens, so that the padding of a prompt is visible. Prompts, everything outside
`generate`, all training, and calls that ask for more than logits are left to the library.

Tests: tests/optimizer/transformers/test_prophetnet.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.models.prophetnet.modeling_prophetnet import (
    ProphetNetDecoderLMOutput,
    ProphetNetSeq2SeqLMOutput,
)

from fastgen.models.cache_names import CACHE
from fastgen.models.predict_streams import Streams, attend, make_streams
from fastgen.optimizer.decoding.call import count
from fastgen.optimizer.transformers import checks, kv_layers
from fastgen.optimizer.transformers.checks import current_call

KERNEL = "ProphetNet's step, first predict stream"

# Modules that a step does not call: none of them may have hooks, even of known libraries, or be compiled.
_SKIPPED = re.compile(r"prophetnet(\.decoder(\.layers\.\d+(\.(self|cross)_attn)?)?)?")


def conditional_generation(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `ProphetNetForConditionalGeneration.forward`; in a step `logits` is `[rows, 1, vocabulary_size]`."""
    encoded = kwargs.get("encoder_outputs")
    if encoded is None or not _is_step(self, args, kwargs, "decoder_"):
        return original(self, *args, **kwargs)
    logits = self.lm_head(_hidden_states(self, kwargs, "decoder_", encoded[0], kwargs.get("attention_mask")))
    return ProphetNetSeq2SeqLMOutput(logits=logits, encoder_last_hidden_state=encoded[0], **{CACHE: kwargs[CACHE]})


def causal_lm(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `ProphetNetForCausalLM.forward`; in a step `logits` is `[rows, 1, vocabulary_size]`."""
    if not _is_step(self, args, kwargs, ""):
        return original(self, *args, **kwargs)
    encoded, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
    logits = self.lm_head(_hidden_states(self, kwargs, "", encoded, mask))
    return ProphetNetDecoderLMOutput(logits=logits, **{CACHE: kwargs[CACHE]})


def _is_step(model: Any, args: tuple, kwargs: dict[str, Any], prefix: str) -> bool:
    """Whether this forward is a decode step from which only logits and cache are read.

    prefix: the prefix of the decoder's argument names.
    """
    call = current_call()
    config = model.config
    input_ids, mask = kwargs.get(f"{prefix}input_ids"), kwargs.get(f"{prefix}attention_mask")
    if call is None or call.host.user_code or args or model.training or torch.is_grad_enabled():
        return False
    unread = ("labels", f"{prefix}inputs_embeds", "output_attentions", "output_hidden_states")
    asks = [*map(kwargs.get, unread), config.output_attentions, config.output_hidden_states]
    if any(value is not None and value is not False for value in asks):
        return False
    if not kwargs.get("return_dict", config.return_dict) or input_ids is None or input_ids.shape[1] != 1:
        return False
    if not _is_filled(kwargs.get(CACHE), model, kwargs):
        return False
    if mask is not None and tuple(mask.shape) != (input_ids.shape[0], kwargs[CACHE].get_seq_length() + 1):
        return False
    if call.host.has_callbacks:
        call.change_of(model, between_steps=True)  # then its facts are read again
    facts = call.facts_of(model, checks.KNOWN)
    if facts.hooks or facts.user_code:  # they would see two streams, and embeddings one call instead of two
        return False
    return not any(name is None or _SKIPPED.fullmatch(name) for name in facts.altered)


def _is_filled(cache: Any, model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this is a cache of growing layers that holds a prompt and the encoder's keys, if there is an encoder."""
    if not isinstance(cache, Cache) or kv_layers.unsupported_types(cache) or not cache.get_seq_length():
        return False
    if kwargs.get("encoder_outputs") is None and kwargs.get("encoder_hidden_states") is None:
        return True
    layers = range(model.config.num_decoder_layers)  # the library's cache has the encoder's number of layers
    return isinstance(cache, EncoderDecoderCache) and all(map(cache.is_updated.get, layers))


def _hidden_states(
    model: Any, kwargs: dict[str, Any], prefix: str, encoded: Tensor | None, encoder_mask: Tensor | None
) -> Tensor:
    """Returns the last hidden states of the first predict stream in this step, `[rows, 1, hidden_size]`.

    encoded, encoder_mask: `[rows, encoder_length, hidden_size]`, and ones and zeros `[rows, encoder_length]`.
    """
    count(KERNEL)
    decoder = model.prophetnet.decoder
    cache = kwargs[CACHE]
    length = cache.get_seq_length() + 1
    streams = _streams(decoder, length, kwargs.get(f"{prefix}attention_mask"))
    encoder_bias = None if encoder_mask is None else _additive(encoder_mask, decoder.dtype)
    hidden_states = decoder.embeddings_layer_norm(_embedded(decoder, kwargs[f"{prefix}input_ids"], length))
    for layer in decoder.layers:  # hidden_states: [rows, 2, hidden_size]
        attended = _self_attention(layer.self_attn, hidden_states, streams, cache)
        hidden_states = layer.self_attn_layer_norm(hidden_states + attended)
        if encoded is not None:
            attended = _cross_attention(layer.cross_attn, hidden_states, encoder_bias, cache)
            hidden_states = layer.cross_attn_layer_norm(attended + hidden_states)
        hidden_states = layer.feed_forward_layer_norm(layer.feed_forward(hidden_states) + hidden_states)
    return hidden_states[:, 1:]


def _embedded(decoder: Any, input_ids: Tensor, length: int) -> Tensor:
    """Returns main and predict stream before their normalization, `[rows, 2, hidden_size]`."""
    positions = decoder.position_embeddings
    first = positions.padding_idx + length
    main, predict = positions._forward(torch.arange(first, first + 2, device=input_ids.device))  # [width] each
    main = decoder.word_embeddings(input_ids) + main
    predict = (decoder.ngram_embeddings.weight[-1] + predict).expand_as(main)  # the library reverses them
    return torch.cat([main, predict], dim=1)


def _streams(decoder: Any, length: int, mask: Tensor | None) -> Streams:
    """Returns the streams for `length` keys of the main stream, including this step's.

    mask: ones and zeros `[rows, length]`, zero for padding; the bias is `[rows, 1, 2, length + 1]` if it is given.
    """
    like = decoder.word_embeddings.weight
    position = torch.full((1, 1), length - 1, device=like.device)
    streams = make_streams(position, length, 1, decoder.num_buckets, decoder.relative_max_distance, like)
    if mask is None:
        return streams
    return replace(streams, bias=streams.bias + nn.functional.pad(_additive(mask, decoder.dtype), (0, 1)))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns a mask `[rows, length]` into a bias `[rows, 1, 1, length]`: 0 for ones, the lowest number for zeros."""
    return (1.0 - mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min


def _self_attention(attention: Any, hidden_states: Tensor, streams: Streams, cache: Cache) -> Tensor:
    """Computes a `ProphetNetNgramSelfAttention`, `[rows, 2, hidden_size]`."""
    query, key, value = (
        _heads(project(hidden_states), attention.num_attn_heads)
        for project in (attention.query_proj, attention.key_proj, attention.value_proj)
    )  # [rows, heads, 2, head_dim] each
    keys, values = kv_layers.parts(cache)[0].update(key[:, :, :1], value[:, :, :1], attention.layer_idx)
    by_bucket = attention.relative_pos_embeddings(hidden_states)  # [rows, 2, buckets * heads]
    by_bucket = by_bucket.unflatten(2, (attention.num_buckets, attention.num_attn_heads)).permute(0, 3, 1, 2)
    relative = by_bucket.gather(3, streams.buckets.expand(*by_bucket.shape[:3], -1))
    query = query / attention.head_dim**0.5
    return attention.out_proj(_joined(attend(query, key, value, keys, values, relative + streams.bias)))


def _cross_attention(attention: Any, hidden_states: Tensor, bias: Tensor | None, cache: Any) -> Tensor:
    """Computes a `ProphetNetAttention`, with the keys of the cache, which may be stored once per input.

    bias: `[rows, 1, 1, encoder_length]`, added to scores; None if nothing is hidden.
    """
    layer = cache.cross_attention_cache.layers[attention.layer_idx]
    query = _heads(attention.query_proj(hidden_states) / attention.head_dim**0.5, attention.num_attn_heads)
    scores = torch.matmul(query, layer.keys.transpose(2, 3))
    scores = scores if bias is None else scores + bias
    result = torch.matmul(nn.functional.softmax(scores, dim=-1), layer.values)
    return attention.out_proj(_joined(result))


def _heads(states: Tensor, heads: int) -> Tensor:
    """Splits heads: `[rows, length, heads * head_dim]` to `[rows, heads, length, head_dim]`."""
    return states.unflatten(2, (heads, -1)).transpose(1, 2)


def _joined(states: Tensor) -> Tensor:
    """Joins heads: `[rows, heads, length, head_dim]` to `[rows, length, heads * head_dim]`."""
    return states.transpose(1, 2).flatten(2)
