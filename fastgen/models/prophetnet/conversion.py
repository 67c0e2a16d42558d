"""Conversion of weights between fairseq's ProphetNet and transformers' ProphetNetForConditionalGeneration.

Tests: tests/models/prophetnet/test_prophetnet.py
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Names of a layer's parts in fairseq and in transformers, for encoder and decoder layers.
ATTENTION = {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj", "out_proj": "out_proj"}
FEED_FORWARD = {"fc1": "feed_forward.intermediate", "fc2": "feed_forward.output"}
ENCODER_LAYER = {
    **{f"self_attn.{ours}": f"self_attn.{theirs}" for ours, theirs in ATTENTION.items()},
    **FEED_FORWARD,
    "self_attn_layer_norm": "self_attn_layer_norm",
    "final_layer_norm": "feed_forward_layer_norm",
}
DECODER_LAYER = {
    **{f"ngram_self_attn.{ours}": f"self_attn.{theirs}" for ours, theirs in ATTENTION.items()},
    **{f"encoder_attn.{ours}": f"cross_attn.{theirs}" for ours, theirs in ATTENTION.items()},
    **FEED_FORWARD,
    "ngram_self_attn.relative_linear": "self_attn.relative_pos_embeddings",
    "self_attn_layer_norm": "self_attn_layer_norm",
    "encoder_attn_layer_norm": "cross_attn_layer_norm",
    "final_layer_norm": "feed_forward_layer_norm",
}


def to_transformers(model: Any) -> Any:
    """Returns a `ProphetNetForConditionalGeneration` with the weights of `model`, a `NgramTransformerProphetModel`.

    It uses the encoder's embeddings: raises ValueError if the decoder has its own. Dtype and mode are preserved.
    """
    from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

    encoder, decoder = model.encoder, model.decoder
    if decoder.embed_tokens is not encoder.embed_tokens or decoder.embed_out is not None:
        raise ValueError(
            "the model's encoder, decoder and output have embeddings of their own (supported: one for all)"
        )
    first = decoder.layers[0]
    dictionary = decoder.dictionary
    config = ProphetNetConfig(
        vocab_size=len(dictionary),
        hidden_size=encoder.embed_tokens.embedding_dim,
        encoder_ffn_dim=encoder.layers[0].fc1.out_features,
        decoder_ffn_dim=first.fc1.out_features,
        num_encoder_layers=len(encoder.layers),
        num_decoder_layers=len(decoder.layers),
        num_encoder_attention_heads=encoder.layers[0].self_attn.num_heads,
        num_decoder_attention_heads=first.ngram_self_attn.num_heads,
        max_position_embeddings=len(decoder.embed_positions.weight),
        ngram=decoder.ngram,
        num_buckets=decoder.num_buckets,
        relative_max_distance=decoder.relative_max_distance,
        activation_function=decoder.activation_fn,
        dropout=decoder.dropout.p,
        attention_dropout=first.ngram_self_attn.dropout_module.p,
        activation_dropout=first.activation_dropout.p,
        pad_token_id=dictionary.pad(),
        bos_token_id=dictionary.bos(),
        eos_token_id=dictionary.eos(),
        decoder_start_token_id=dictionary.eos(),
    )
    converted = ProphetNetForConditionalGeneration(config).to(encoder.embed_tokens.weight.dtype)
    ours, theirs = model.state_dict(), converted.state_dict()
    for source, target in _names(len(encoder.layers), len(decoder.layers)):
        theirs[target] = _with_rows(ours[source], theirs[target])
    for name in ("encoder.", "decoder.", ""):
        theirs[f"prophetnet.{name}word_embeddings.weight"] = ours["encoder.embed_tokens.weight"]
    theirs["lm_head.weight"] = ours["encoder.embed_tokens.weight"]
    converted.load_state_dict(theirs)
    return converted.train(model.training)


def to_fairseq(model: Any, dictionary: Any) -> Any:
    """Returns a `NgramTransformerProphetModel` with the weights of `model`, a `ProphetNetForConditionalGeneration`.

    dictionary: a dictionary of fairseq with the same number of words. Raises ValueError if it has more or fewer, or its
    padding word has another number, from which positions count. The result has `max_position_embeddings` positions less
    two and less the padding's number: the predict streams need one more, and number 0 is not a position.
    """
    from fastgen.models.prophetnet.model import NgramTransformerProphetModel

    config = model.config
    if len(dictionary) != config.vocab_size or dictionary.pad() != config.pad_token_id:
        raise ValueError(
            f"dictionary of {len(dictionary)} words, padding {dictionary.pad()}: "
            f"the model has {config.vocab_size}, padding {config.pad_token_id}"
        )
    positions = config.max_position_embeddings - 2 - config.pad_token_id
    sizes = {
        f"{end}_{ours}": getattr(config, theirs.format(end))
        for end in ("encoder", "decoder")
        for ours, theirs in (
            ("layers", "num_{}_layers"),
            ("embed_dim", "hidden_size"),
            ("ffn_embed_dim", "{}_ffn_dim"),
            ("attention_heads", "num_{}_attention_heads"),
        )
    }
    copied = ("ngram", "num_buckets", "relative_max_distance", "dropout", "attention_dropout", "activation_dropout")
    args = Namespace(
        **sizes,
        **{name: getattr(config, name) for name in copied},
        activation_fn=config.activation_function,
        max_source_positions=positions,
        max_target_positions=positions,
    )
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    converted = NgramTransformerProphetModel.build_model(args, task).to(model.dtype)
    ours, theirs = converted.state_dict(), model.state_dict()
    for target, source in _names(config.num_encoder_layers, config.num_decoder_layers):
        ours[target] = _with_rows(theirs[source], ours[target])
    for end in ("encoder", "decoder"):
        ours[f"{end}.embed_tokens.weight"] = theirs["prophetnet.word_embeddings.weight"]
    converted.load_state_dict(ours)
    return converted.train(model.training)


def _names(encoder_layers: int, decoder_layers: int) -> Iterator[tuple[str, str]]:
    """Yields the names of the same weights in fairseq and in transformers, except those of word embeddings."""
    for end, norm in (("encoder", "layernorm_embedding"), ("decoder", "emb_layer_norm")):
        yield f"{end}.embed_positions.weight", f"prophetnet.{end}.position_embeddings.weight"
        for kind in ("weight", "bias"):
            yield f"{end}.{norm}.{kind}", f"prophetnet.{end}.embeddings_layer_norm.{kind}"
    yield "decoder.ngram_input_embed.weight", "prophetnet.decoder.ngram_embeddings.weight"
    for end, layers, parts in (("encoder", encoder_layers, ENCODER_LAYER), ("decoder", decoder_layers, DECODER_LAYER)):
        for layer in range(layers):
            for ours, theirs in parts.items():
                for kind in ("weight", "bias"):
                    yield f"{end}.layers.{layer}.{ours}.{kind}", f"prophetnet.{end}.layers.{layer}.{theirs}.{kind}"


def _with_rows(table: Tensor, like: Tensor) -> Tensor:
    """Returns `table` with the number of rows of `like`: further positions are dropped, and missing ones are zeros."""
    if table.shape == like.shape:
        return table
    rows = min(len(table), len(like))
    return torch.cat([table[:rows], torch.zeros_like(like[rows:])])
