"""Encoder and decoder of the multi-query Transformer.

Details that the paper omits follow the library that its authors used (Mesh TensorFlow): layer norm before each sublayer
and at the end, no biases in projections, ReLU, embeddings multiplied by the root of their width.

Tests: tests/models/mqa/test_models.py
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import can_return_tuple

from fastgen.models.cache_names import CACHE, named_cache
from fastgen.models.mqa.attention import MQAAttention
from fastgen.models.mqa.configuration import MQATransformerConfig

NEEDS_CACHE_POSITION = "cache_position" in inspect.signature(create_causal_mask).parameters  # older transformers


class MQALayer(GradientCheckpointingLayer):
    """Self-attention, attention to the encoder if there is one, and the feed-forward layer."""

    def __init__(self, config: Any, layer_idx: int | None, is_decoder: bool, has_encoder: bool) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.self_attn_norm = nn.LayerNorm(config.d_model)
        self.self_attn = MQAAttention(config, layer_idx, is_causal=is_decoder)
        if has_encoder:
            self.encoder_attn_norm = nn.LayerNorm(config.d_model)
            self.encoder_attn = MQAAttention(config, layer_idx)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns hidden states `[B, n, d]`, and the weights of both attentions or None, if their function has none."""
        output, weights = self.self_attn(self.self_attn_norm(hidden_states), attention_mask, cache)
        hidden_states = hidden_states + self._dropped(output)
        encoder_weights = None
        if encoder_hidden_states is not None:
            normed = self.encoder_attn_norm(hidden_states)
            output, encoder_weights = self.encoder_attn(normed, encoder_attention_mask, cache, encoder_hidden_states)
            hidden_states = hidden_states + self._dropped(output)
        inner = self._dropped(functional.relu(self.up_proj(self.feed_forward_norm(hidden_states))))
        return hidden_states + self._dropped(self.down_proj(inner)), weights, encoder_weights

    def _dropped(self, states: Tensor) -> Tensor:
        return functional.dropout(states, p=self.dropout, training=self.training)


class MQAPreTrainedModel(PreTrainedModel):
    """The base of all models here: configuration, initial values, supported attention functions."""

    config_class = MQATransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MQALayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        """Prepares the library's cache, in which only the decoder's self-attention is local, not cross-attention."""
        is_given = model_kwargs.get(CACHE) is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = model_kwargs.get(CACHE)
        if self.config.local_window is None or is_given or not isinstance(cache, EncoderDecoderCache):
            return
        cross: Cache = DynamicCache()
        if isinstance(cache.cross_attention_cache, StaticCache):
            if NEEDS_CACHE_POSITION:
                raise ValueError("a static cache with local_window: this version of transformers hides other positions")
            everywhere = copy.deepcopy(self.config)
            everywhere.local_window = None
            cross = StaticCache(config=everywhere, max_cache_len=model_kwargs["encoder_outputs"][0].shape[1])
        model_kwargs[CACHE] = EncoderDecoderCache(cache.self_attention_cache, cross)


class MQAStack(MQAPreTrainedModel):
    """Embeddings and layers: the base of encoder and decoder."""

    def __init__(self, config: MQATransformerConfig, layers: int, is_decoder: bool, has_encoder: bool) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        numbers = range(layers) if is_decoder else [None] * layers
        self.layers = nn.ModuleList(MQALayer(config, number, is_decoder, has_encoder) for number in numbers)
        self.norm = nn.LayerNorm(config.d_model)
        self.gradient_checkpointing = False
        self.post_init()

    def embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Returns the tokens' vectors `[B, n, d]`; inputs_embeds: vectors as `embed_tokens` returns them."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("either input_ids or inputs_embeds, and not both")
        vectors = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return vectors * self.config.d_model**0.5

    def positioned(self, vectors: Tensor, past_length: int | Tensor, position_ids: Tensor | None) -> Tensor:
        length = vectors.shape[1]
        limit = self.config.max_position_embeddings
        if isinstance(past_length, int) and past_length + length > limit and position_ids is None:
            raise ValueError(f"{past_length + length} positions (max_position_embeddings={limit})")
        if position_ids is None:
            position_ids = (torch.arange(length, device=vectors.device) + past_length)[None]
        positioned = vectors + self.embed_positions(position_ids)
        return functional.dropout(positioned, p=self.config.dropout, training=self.training)

    def run(
        self, hidden_states: Tensor, *masks_and_states: Tensor | None, cache: Cache | None, **wanted: bool
    ) -> dict[str, Any]:
        """Returns the last hidden states, and all layers' hidden states and attention weights if `wanted`."""
        states = [hidden_states]
        weights = []
        encoder_weights = []
        for layer in self.layers:
            hidden_states, own, encoders = layer(hidden_states, *masks_and_states, cache=cache)
            states.append(hidden_states)
            weights.append(own)
            encoder_weights.append(encoders)
        states[-1] = hidden_states = self.norm(hidden_states)
        outputs: dict[str, Any] = {"last_hidden_state": hidden_states}
        if wanted["output_hidden_states"]:
            outputs["hidden_states"] = tuple(states)
        if wanted["output_attentions"]:
            outputs["attentions"] = tuple(weights)
            if encoder_weights[0] is not None:
                outputs["cross_attentions"] = tuple(encoder_weights)
        return outputs

    def wanted(self, **flags: bool | None) -> dict[str, bool]:
        """Returns each flag of the call, or its value in the configuration if it is None."""
        return {name: getattr(self.config, name) if flag is None else flag for name, flag in flags.items()}


class MQATransformerEncoder(MQAStack):
    """The encoder: layers whose positions see each other."""

    def __init__(self, config: MQATransformerConfig) -> None:
        super().__init__(config, config.encoder_layers, is_decoder=False, has_encoder=False)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Returns hidden states `[B, m, d]` of `input_ids [B, m]`; attention_mask `[B, m]` is 0 for padding."""
        vectors = self.embedded(input_ids, inputs_embeds)
        mask = create_bidirectional_mask(self.config, vectors, attention_mask)
        wanted = self.wanted(output_attentions=output_attentions, output_hidden_states=output_hidden_states)
        return BaseModelOutput(**self.run(self.positioned(vectors, 0, None), mask, cache=None, **wanted))


class MQATransformerDecoder(MQAStack):
    """The decoder: causal layers, which with `config.is_encoder_decoder` also attend to an encoder's output."""

    def __init__(self, config: MQATransformerConfig) -> None:
        super().__init__(config, config.decoder_layers, is_decoder=True, has_encoder=config.is_encoder_decoder)

    @named_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Returns hidden states `[B, n, d]` of `input_ids [B, n]`, which follow the positions in `cache`.

        attention_mask `[B, past + n]` and encoder_attention_mask `[B, m]` are 0 for padding; position_ids `[B, n]`
        count from the cache's length by default.
        """
        vectors = self.embedded(input_ids, inputs_embeds)
        if self.wanted(use_cache=use_cache)["use_cache"] and cache is None and not self.training:
            own = DynamicCache(config=self.config)
            cache = EncoderDecoderCache(own, DynamicCache()) if encoder_hidden_states is not None else own
        past_length = cache.get_seq_length() if cache is not None else 0
        hidden_states = self.positioned(vectors, past_length, position_ids)
        mask = self._causal_mask(vectors, attention_mask, cache, past_length)
        encoder_mask = None
        if encoder_hidden_states is not None:
            encoder_mask = create_bidirectional_mask(
                self.config, vectors, encoder_attention_mask, encoder_hidden_states
            )
        wanted = self.wanted(output_attentions=output_attentions, output_hidden_states=output_hidden_states)
        outputs = self.run(hidden_states, mask, encoder_hidden_states, encoder_mask, cache=cache, **wanted)
        return BaseModelOutputWithPastAndCrossAttentions(**{CACHE: cache}, **outputs)

    def _causal_mask(
        self, vectors: Tensor, attention_mask: Tensor | None, cache: Cache | None, past_length: int | Tensor
    ) -> Tensor | None:
        create = create_causal_mask if self.config.local_window is None else create_sliding_window_causal_mask
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        arguments = {"attention_mask": attention_mask, CACHE: own}
        if NEEDS_CACHE_POSITION:
            arguments["cache_position"] = torch.arange(vectors.shape[1], device=vectors.device) + past_length
        return create(self.config, vectors, **arguments)
