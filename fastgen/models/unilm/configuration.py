"""The configuration of UniLM: BERT's sizes, and the segments of source and target.

Tests: tests/models/test_registration.py
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class UniLMConfig(PreTrainedConfig):
    """Sizes and ids of `UniLMForConditionalGeneration`.

    The names are those of BERT's configuration. The defaults are a base model of 12 layers and width 768, with the ids
    of BERT's uncased vocabulary.

    type_vocab_size: number of segments with an embedding; 0 in version 2.
    source_type_id, target_type_id: segments of source and target. The large models of version 1 have 6 segments; 4 and
        5 are for sequence to sequence.
    layer_norm_eps: 1e-5, as in the published decoder.
    mask_token_id: `[MASK]`, at whose position the next token is predicted.
    eos_token_id: `[SEP]`, which ends source and target.
    rel_pos_bins: number of bins of version 2's relative positions, 32 in published models; 0 for none.
    max_rel_pos: the distance from which on all distances share a bin.

    Raises ValueError for a `rel_pos_bins` that is neither 0 nor a multiple of 4, for a `max_rel_pos` that is not more
    than a quarter of them, for a `num_attention_heads` that does not divide `hidden_size`, for a `mask_token_id`
    outside of the vocabulary, and for type ids outside of `type_vocab_size`.
    """

    model_type = "unilm"
    keys_to_ignore_at_inference = ("cache", "past_key_values")

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        hidden_act: str = "gelu",
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.1,
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        source_type_id: int = 0,
        target_type_id: int = 1,
        layer_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        rel_pos_bins: int = 0,
        max_rel_pos: int = 128,
        use_cache: bool = True,
        pad_token_id: int = 0,
        bos_token_id: int = 101,
        eos_token_id: int = 102,
        mask_token_id: int = 103,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        import fastgen.models.unilm.modeling  # noqa: F401  # registers the model with AutoModel

        if rel_pos_bins < 0 or rel_pos_bins % 4:
            raise ValueError(f"rel_pos_bins={rel_pos_bins}: 0 or a multiple of 4")
        if max_rel_pos <= rel_pos_bins // 4:
            raise ValueError(f"max_rel_pos={max_rel_pos}: more than {rel_pos_bins // 4}, a quarter of rel_pos_bins")
        if hidden_size % num_attention_heads:
            raise ValueError(f"num_attention_heads={num_attention_heads} does not divide hidden_size={hidden_size}")
        if not 0 <= mask_token_id < vocab_size:
            raise ValueError(f"mask_token_id={mask_token_id}: 0 to {vocab_size - 1}, as vocab_size={vocab_size}")
        for name, type_id in (("source_type_id", source_type_id), ("target_type_id", target_type_id)):
            if type_vocab_size and not 0 <= type_id < type_vocab_size:
                raise ValueError(f"{name}={type_id}: 0 to {type_vocab_size - 1}, as type_vocab_size={type_vocab_size}")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        self.source_type_id = source_type_id
        self.target_type_id = target_type_id
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        self.rel_pos_bins = rel_pos_bins
        self.max_rel_pos = max_rel_pos
        self.use_cache = use_cache
        self.mask_token_id = mask_token_id
        self.chunk_size_feed_forward = 0
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )


AutoConfig.register(UniLMConfig.model_type, UniLMConfig, exist_ok=True)
