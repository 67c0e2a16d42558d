"""Sizes of multi-query Transformers ("Fast Transformer Decoding: One Write-Head is All You Need", §4.1).

Tests: tests/models/mqa/test_models.py
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class MQATransformerConfig(PreTrainedConfig):
    """Sizes of `MQATransformerForConditionalGeneration` and `MQATransformerForCausalLM`.

    The defaults are the paper's multi-query model for translation, of 211 million parameters: 6 layers each, width
    1024, 8 query heads of 128, one key head, feed-forward layers of 5440 (4096 with 8 key heads).

    num_attention_heads: query heads h of every attention layer.
    num_key_value_heads: key heads: h for multi-head, 1 for multi-query, another divisor of h for grouped attention.
    head_dim: width of a head, `d_k = d_v`; the heads together need not be as wide as the model.
    local_window: number of positions that the decoder's self-attention sees, including the current one; None for all,
        32 in the paper's local models.
    max_position_embeddings: learned positions of encoder and decoder, each.

    Raises ValueError for a `num_key_value_heads` that does not divide `num_attention_heads`, and for a `local_window`
    below 1.
    """

    model_type = "mqa_transformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "decoder_layers",
        "sliding_window": "local_window",  # the name that masks and caches of transformers read
    }

    def __init__(
        self,
        vocab_size: int = 32000,
        d_model: int = 1024,
        d_ff: int = 5440,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        num_attention_heads: int = 8,
        num_key_value_heads: int = 1,
        head_dim: int = 128,
        local_window: int | None = None,
        max_position_embeddings: int = 256,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        pad_token_id: int = 0,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        decoder_start_token_id: int = 0,
        is_encoder_decoder: bool = True,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        import fastgen.models.mqa.modeling  # noqa: F401  # registers the model with AutoModel

        if num_key_value_heads < 1 or num_attention_heads % num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={num_key_value_heads} does not divide num_attention_heads={num_attention_heads}"
            )
        if local_window is not None and local_window < 1:
            raise ValueError(f"local_window={local_window}: 1 or more, the current position counts; None for all")
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.d_ff = d_ff
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.local_window = local_window
        self.max_position_embeddings = max_position_embeddings
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            decoder_start_token_id=decoder_start_token_id,
            is_encoder_decoder=is_encoder_decoder,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )


AutoConfig.register(MQATransformerConfig.model_type, MQATransformerConfig, exist_ok=True)
