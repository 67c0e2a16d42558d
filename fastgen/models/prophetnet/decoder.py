"""ProphetNet's decoder for fairseq: all streams in training, the main and the first predict stream in generation.

Tests: tests/models/prophetnet/test_prophetnet.py, tests/models/prophetnet/test_prophetnet_shares.py
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from fairseq import utils
from fairseq.models import FairseqIncrementalDecoder
from fairseq.modules import FairseqDropout, LayerNorm, LearnedPositionalEmbedding, MultiheadAttention
from torch import Tensor, nn
from torch.nn import functional

from fastgen.models.predict_streams import Streams, make_streams
from fastgen.models.prophetnet.attention import NgramMultiheadAttention


class NgramTransformerDecoderLayer(nn.Module):
    """N-gram self-attention, attention to the encoder and a feed-forward layer, each followed by a layer norm."""

    supports_external_kv_cache = True  # see fastgen.optimizer.fairseq.checks

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        width, heads = args.decoder_embed_dim, args.decoder_attention_heads
        self.ngram_self_attn = NgramMultiheadAttention(width, heads, args.attention_dropout, args.num_buckets)
        self.self_attn_layer_norm = LayerNorm(width)
        self.encoder_attn = MultiheadAttention(
            width,
            heads,
            kdim=args.encoder_embed_dim,
            vdim=args.encoder_embed_dim,
            dropout=args.attention_dropout,
            encoder_decoder_attention=True,
        )
        self.encoder_attn_layer_norm = LayerNorm(width)
        self.fc1 = nn.Linear(width, args.decoder_ffn_embed_dim)
        self.fc2 = nn.Linear(args.decoder_ffn_embed_dim, width)
        self.final_layer_norm = LayerNorm(width)
        self.activation = utils.get_activation_fn(args.activation_fn)
        self.dropout = FairseqDropout(args.dropout)
        self.activation_dropout = FairseqDropout(args.activation_dropout)

    @property
    def self_attn(self) -> NgramMultiheadAttention:
        return self.ngram_self_attn

    def forward(
        self,
        x: Tensor,
        streams: Streams,
        encoder_out: Tensor | None,
        encoder_padding_mask: Tensor | None,
        incremental_state: dict | None,
    ) -> Tensor:
        """Returns `[L, B, C]` for x `[L, B, C]`, encoder_out `[S, B, C]` and encoder_padding_mask `[B, S]`."""
        x = self.self_attn_layer_norm(x + self.dropout(self.ngram_self_attn(x, streams, incremental_state)))
        if encoder_out is not None:
            attended, _ = self.encoder_attn(
                query=x,
                key=encoder_out,
                value=encoder_out,
                key_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                static_kv=True,
                need_weights=False,
            )
            x = self.encoder_attn_layer_norm(x + self.dropout(attended))
        inner = self.activation_dropout(self.activation(self.fc1(x)))
        return self.final_layer_norm(x + self.dropout(self.fc2(inner)))


class NgramTransformerDecoder(FairseqIncrementalDecoder):
    """The decoder of Qi et al., 2020, §2.2, with the parameter names of its authors' code.

    Its logits `[B, T, V]` are the first predict stream's, for the next token. Without `incremental_state` the second
    result also has `ngram_logits`, a list of the other streams' logits, for `NgramLanguageLoss`; the authors' decoder
    returns a list of all instead, which fairseq's other criteria do not accept.
    """

    supports_external_kv_cache = True  # see fastgen.optimizer.fairseq.checks

    def __init__(self, args: Namespace, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(dictionary)
        self.register_buffer("version", torch.Tensor([3]))
        self.ngram, self.num_buckets = args.ngram, args.num_buckets
        self.relative_max_distance, self.activation_fn = args.relative_max_distance, args.activation_fn
        self.padding_idx, self.max_target_positions = embed_tokens.padding_idx, args.max_target_positions
        width = args.decoder_embed_dim
        self.embed_tokens = embed_tokens
        rows = args.max_target_positions + 2 + self.padding_idx  # predict streams are one position ahead
        self.embed_positions = LearnedPositionalEmbedding(rows, width, self.padding_idx)
        self.ngram_input_embed = nn.Embedding(self.ngram, width)
        self.emb_layer_norm = LayerNorm(width)
        self.dropout = FairseqDropout(args.dropout)
        self.layers = nn.ModuleList(NgramTransformerDecoderLayer(args) for _ in range(args.decoder_layers))
        self.embed_out = None
        if not args.share_decoder_input_output_embed:
            self.embed_out = nn.Parameter(torch.empty(len(dictionary), width))

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict | None = None,
        features_only: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns logits `[B, T, V]` for `prev_output_tokens [B, T]`; with `incremental_state` for the last only."""
        streams = self.extract_features(prev_output_tokens, encoder_out, incremental_state)
        if features_only:
            return streams[0], {"attn": [None]}
        extra: dict[str, Any] = {"attn": [None]}
        if incremental_state is None:
            extra["ngram_logits"] = [self.output_layer(stream) for stream in streams[1:]]
        return self.output_layer(streams[0]), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: Any = None,
    ) -> list[Tensor]:
        """Returns the last states `[B, T, C]` of each predict stream; with `incremental_state` of the first only."""
        keys = prev_output_tokens.shape[1]
        predict = self.ngram
        if incremental_state is None:
            position = torch.arange(1, keys + 1, device=prev_output_tokens.device)[:, None]
            positions = utils.make_positions(prev_output_tokens, self.padding_idx)
        else:
            prev_output_tokens = prev_output_tokens[:, -1:]
            predict = 1
            position = getattr(incremental_state, "position", None)  # on the device, in captured steps
            if position is None:
                position = torch.full((1, 1), keys, device=prev_output_tokens.device)
            else:
                keys = incremental_state.limit
            positions = (self.padding_idx + position).expand_as(prev_output_tokens)
        main = self.embed_tokens(prev_output_tokens) + self._positions(positions)
        ahead = self._positions(positions + 1)
        # The published weights are in reverse order.
        x = torch.cat([main, *(self.ngram_input_embed.weight[stream - 1] + ahead for stream in range(predict))], dim=1)
        x = self.dropout(self.emb_layer_norm(x)).transpose(0, 1)  # [L, B, C]
        length = main.shape[1]
        streams = make_streams(position - 1, keys, predict, self.num_buckets, self.relative_max_distance, x)
        states, mask = _encoded(encoder_out)
        for layer in self.layers:
            x = layer(x, streams, states, mask, incremental_state)
        return list(x[length:].transpose(0, 1).split(length, dim=1))

    def _positions(self, positions: Tensor) -> Tensor:
        return functional.embedding(positions, self.embed_positions.weight, self.padding_idx)

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """Returns logits `[B, T, V]` for features `[B, T, C]`."""
        return functional.linear(features, self.embed_tokens.weight if self.embed_out is None else self.embed_out)

    def max_positions(self) -> int:
        return self.max_target_positions


def _encoded(encoder_out: dict[str, list[Tensor]] | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns the encoder's output `[S, B, C]` and its padding mask `[B, S]`."""
    if encoder_out is None or not encoder_out["encoder_out"]:
        return None, None
    mask = encoder_out["encoder_padding_mask"]
    return encoder_out["encoder_out"][0], mask[0] if mask else None
