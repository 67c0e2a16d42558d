"""The model and its architectures, registered with fairseq: `ngram_transformer_prophet_base` and `_large`.

Tests: tests/models/prophetnet/test_prophetnet.py
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from fairseq import utils
from fairseq.models import FairseqEncoderDecoderModel, register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig, TransformerEncoderBase
from torch import Tensor, nn

from fastgen.models.prophetnet.decoder import NgramTransformerDecoder

NAME = "ngram_transformer_prophet"
SIZES = {
    "layers": (6, 12),
    "embed_dim": (768, 1024),
    "ffn_embed_dim": (3072, 4096),
    "attention_heads": (12, 16),
}  # base, large
DEFAULTS: dict[str, Any] = {
    "ngram": 2,
    "num_buckets": 32,
    "relative_max_distance": 128,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "activation_fn": "gelu",
    "max_source_positions": 512,
    "max_target_positions": 512,
    "share_all_embeddings": True,
    "share_decoder_input_output_embed": True,
    "load_sep": False,
    "load_from_pretrained_model": None,
}


@register_model(NAME)
class NgramTransformerProphetModel(FairseqEncoderDecoderModel):
    """ProphetNet: maps `src_tokens [B, S]` and `prev_output_tokens [B, T]` to logits `[B, T, V]` of the next tokens.

    The encoder is fairseq's Transformer (learned positions, layer norm after each sublayer and the embeddings), the
    decoder `NgramTransformerDecoder`. State dicts of the authors' code can be loaded: `in_proj_weight` is split into
    the projections of queries, keys and values, and the encoder's `emb_layer_norm` becomes `layernorm_embedding`.
    """

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--ngram", type=int, metavar="N", help="predict streams")
        add("--num_buckets", type=int, metavar="N", help="buckets of relative positions")
        add("--relative_max_distance", type=int, metavar="N", help="distance from which on all share a bucket")
        add("--activation-fn", choices=utils.get_available_activation_fns(), help="activation function")
        for name in ("dropout", "attention-dropout", "activation-dropout"):
            add(f"--{name}", type=float, metavar="D", help="dropout probability")
        for end in ("encoder", "decoder"):
            for name in SIZES:
                add(f"--{end}-{name.replace('_', '-')}", type=int, metavar="N", help=f"{name} of the {end}")
        add("--share-all-embeddings", action="store_true", help="one table for encoder, decoder and output")
        add("--load-from-pretrained-model", metavar="FILE", help="checkpoint of the authors' code to begin with")
        add("--load-sep", action="store_true", help="with it: end sentences with the weights of BERT's [SEP]")

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> NgramTransformerProphetModel:
        base_architecture(args)
        source, target = task.source_dictionary, task.target_dictionary
        if args.share_all_embeddings and source != target:
            raise ValueError("--share-all-embeddings: the two dictionaries differ")
        if args.encoder_embed_dim != args.decoder_embed_dim:
            raise ValueError(
                f"--decoder-embed-dim {args.decoder_embed_dim}: as --encoder-embed-dim, {args.encoder_embed_dim}"
            )
        encoder_tokens = _embedding(source, args.encoder_embed_dim)
        decoder_tokens = encoder_tokens if args.share_all_embeddings else _embedding(target, args.decoder_embed_dim)
        encoder = TransformerEncoderBase(_encoder_config(args), source, encoder_tokens)
        model = cls(encoder, NgramTransformerDecoder(args, target, decoder_tokens))
        model.apply(_initialize)
        if args.load_from_pretrained_model is not None:
            model._load_pretrained(args.load_from_pretrained_model, args.load_sep)
            args.load_from_pretrained_model = None  # not repeated when a checkpoint of this model is loaded
        return model

    def max_positions(self) -> tuple[int, int]:
        return self.encoder.max_positions(), self.decoder.max_positions()

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        prefix = f"{name}." if name else ""
        for key in [key for key in state_dict if key.startswith(f"{prefix}encoder.emb_layer_norm.")]:
            state_dict[key.replace("emb_layer_norm", "layernorm_embedding")] = state_dict.pop(key)
        super().upgrade_state_dict_named(state_dict, name)

    def _load_pretrained(self, path: str, load_sep: bool) -> None:
        """Loads the weights of a checkpoint; rows of words and positions that it lacks stay random."""
        from fairseq.checkpoint_utils import load_checkpoint_to_cpu

        states = load_checkpoint_to_cpu(path)
        states = states.get("model", states)
        self.upgrade_state_dict(states)
        for name, own in self.state_dict().items():
            source = states.get(name)
            if source is not None and source.dim() == own.dim() == 2 and source.shape[1] == own.shape[1]:
                rows = min(len(source), len(own))
                states[name] = torch.cat([source[:rows].to(own.dtype), own[rows:]])
        if load_sep:
            for end in ("encoder", "decoder"):
                table = states[f"{end}.embed_tokens.weight"]
                table[SENTENCE_END] = table[BERT_SEP]
        self.load_state_dict(states)


# In the authors' vocabulary a separate token ends sentences, not BERT's [SEP].
SENTENCE_END, BERT_SEP = 2, 102


def _embedding(dictionary: Any, width: int) -> nn.Embedding:
    return nn.Embedding(len(dictionary), width, padding_idx=dictionary.pad())


def _encoder_config(args: Namespace) -> TransformerConfig:
    config = TransformerConfig.from_namespace(args)
    config.no_scale_embedding = config.layernorm_embedding = config.encoder.learned_pos = True
    config.encoder.normalize_before = False
    return config


def _initialize(module: nn.Module) -> None:
    """Initializes weights like BERT and the authors: normal with standard deviation 0.02, biases 0."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])
    elif isinstance(module, NgramTransformerDecoder) and module.embed_out is not None:
        nn.init.normal_(module.embed_out, std=0.02)


@register_model_architecture(NAME, NAME)
def base_architecture(args: Namespace) -> None:
    """Sets missing arguments to those of the base model."""
    _complete(args, 0)


@register_model_architecture(NAME, f"{NAME}_base")
def transformer_base(args: Namespace) -> None:
    """Sets missing arguments to those of the base model, under the authors' name."""
    _complete(args, 0)


@register_model_architecture(NAME, f"{NAME}_large")
def transformer_large(args: Namespace) -> None:
    """Sets missing arguments to those of the large model."""
    _complete(args, 1)


def _complete(args: Namespace, column: int) -> None:
    """Sets the arguments that the user has not set."""
    sizes = {f"{end}_{name}": sizes[column] for end in ("encoder", "decoder") for name, sizes in SIZES.items()}
    for name, value in (sizes | DEFAULTS).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
