"""Random models of many architectures, tiny or as wide as real ones, for comparisons with the unpatched library."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BertGenerationConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

VOCABULARY = 99
SPECIAL = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2}


@dataclass(frozen=True)
class Scale:
    """How wide a model is and how long its inputs are; two layers and the vocabulary stay tiny.

    length: tokens of a prompt. frames: of a sound, before convolutions halve them.
    """

    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 8
    length: int = 9
    positions: int = 128
    frames: int = 40
    image_size: int = 16
    patch_size: int = 8

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


TINY = Scale()
REAL = Scale(
    heads=8, key_value_heads=4, head_dim=64, length=512, positions=1024, frames=3000, image_size=224, patch_size=16
)


def sizes(scale: Scale) -> dict[str, Any]:
    """Returns every name under which configurations keep a size, with its value."""
    widths = ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size", "n_embed", "dim")
    heads = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
    heads += ("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads")
    layers = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")
    inner = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "dff")
    return {
        "vocab_size": VOCABULARY,
        **dict.fromkeys(widths, scale.width),
        **dict.fromkeys((*layers, "num_decoder_layers", "num_encoder_layers"), 2),
        **dict.fromkeys(heads, scale.heads),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), scale.key_value_heads),
        **dict.fromkeys(inner, 64),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), scale.positions),
        "head_dim": scale.head_dim,
        "d_kv": scale.head_dim,
        "moe_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 64,
        **dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), VOCABULARY),
        **dict.fromkeys(("attention_window", "block_size"), 64),
        # Linear attention and state spaces: without CUDA their code takes seconds a call at real sizes.
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 8),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_n_heads": 4,
        "mamba_d_ssm": 32,
        **dict.fromkeys(("mamba_chunk_size", "mamba_d_state"), 16),
    }


DROP = object()  # a size that the configuration does not take

# Sizes of latent attention: keys of 12, values of 6 numbers; in the cache a latent of 16 and a key of 4.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": DROP,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
INDEXED = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 4}


@dataclass(frozen=True)
class Architecture:
    """kind: a key of `_BUILDERS`; overrides: values, or functions of a scale, for `sizes`."""

    model_type: str
    kind: str
    overrides: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def id(self) -> str:
        return self.name or self.model_type

    def model(self, scale: Scale = TINY) -> torch.nn.Module:
        torch.manual_seed(0)
        model = _BUILDERS[self.kind](self, scale)
        for key in ("forced_eos_token_id", "forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            if getattr(model.generation_config, key, None) is not None:
                setattr(model.generation_config, key, None)
        for key, value in SPECIAL.items():
            setattr(model.generation_config, key, value)
        return model.eval()

    def config(self, scale: Scale) -> Any:
        overrides = {key: value(scale) if callable(value) else value for key, value in self.overrides.items()}
        return _config(self.model_type, scale, **overrides)

    def inputs(self, scale: Scale = TINY, rows: int = 2, seed: int = 1) -> dict[str, torch.Tensor]:
        """Inputs of unequal length: the first is padded, on the left for decoder-only models."""
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "speech":
            shape = (rows, 8, scale.frames) if self.model_type == "whisper" else (rows, scale.frames, 8)
            return {"input_features": torch.randn(shape, generator=generator)}
        if self.kind == "vision":
            return {"pixel_values": torch.randn(rows, 3, scale.image_size, scale.image_size, generator=generator)}
        input_ids = torch.randint(5, VOCABULARY, (rows, scale.length), generator=generator)
        attention_mask = torch.ones_like(input_ids)
        padding = slice(None, 3) if self.kind == "causal" else slice(-3, None)
        input_ids[0, padding], attention_mask[0, padding] = SPECIAL["pad_token_id"], 0
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def _config(model_type: str, scale: Scale, **overrides: Any) -> Any:
    config = AutoConfig.for_model(model_type)
    accepted = {key: value for key, value in sizes(scale).items() if getattr(config, key, None) is not None}
    arguments = {key: value for key, value in accepted.items() if key not in config.attribute_map}
    arguments |= {key: value for key, value in SPECIAL.items() if key != "decoder_start_token_id"}
    if config.is_encoder_decoder:
        arguments["decoder_start_token_id"] = SPECIAL["decoder_start_token_id"]
    arguments |= overrides
    return type(config)(**{key: value for key, value in arguments.items() if value is not DROP})


def _build_causal(architecture: Architecture, scale: Scale) -> torch.nn.Module:
    config = architecture.config(scale)
    config.is_decoder = True
    return AutoModelForCausalLM.from_config(config)


def _build_seq2seq(architecture: Architecture, scale: Scale) -> torch.nn.Module:
    if architecture.model_type == "encoder-decoder":
        encoder = BertGenerationConfig(
            vocab_size=VOCABULARY, max_position_embeddings=scale.positions, **_encoder_sizes(scale)
        )
        return _with_special_tokens(
            EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(encoder, _gpt2_config(scale)))
        )
    return AutoModelForSeq2SeqLM.from_config(architecture.config(scale))


def _build_speech(architecture: Architecture, scale: Scale) -> torch.nn.Module:
    return AutoModelForSpeechSeq2Seq.from_config(architecture.config(scale))


def _build_vision(architecture: Architecture, scale: Scale) -> torch.nn.Module:
    encoder = ViTConfig(image_size=scale.image_size, patch_size=scale.patch_size, **_encoder_sizes(scale))
    decoder = _config("trocr", scale) if architecture.name == "vit-trocr" else _gpt2_config(scale)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return _with_special_tokens(VisionEncoderDecoderModel(config))


def _encoder_sizes(scale: Scale) -> dict[str, int]:
    heads = {"hidden_size": scale.width, "num_attention_heads": scale.heads}
    return {"num_hidden_layers": 2, "intermediate_size": 64, **heads}


def _gpt2_config(scale: Scale) -> GPT2Config:
    sizes = {"n_embd": scale.width, "n_layer": 2, "n_head": scale.heads, "n_positions": scale.positions}
    return GPT2Config(vocab_size=VOCABULARY, **sizes, **SPECIAL)


def _with_special_tokens(model: torch.nn.Module) -> torch.nn.Module:
    for key, value in SPECIAL.items():
        setattr(model.config, key, value)
    return model


def _build_encoder(architecture: Architecture, scale: Scale) -> torch.nn.Module:
    """Builds for causal language modelling, but with `is_decoder=False`, as in checkpoints of BERT-like models."""
    return AutoModelForCausalLM.from_config(architecture.config(scale))


_BUILDERS = {
    "causal": _build_causal,
    "seq2seq": _build_seq2seq,
    "speech": _build_speech,
    "vision": _build_vision,
    "encoder": _build_encoder,
}

CAUSAL_AS_THEY_ARE = """
    gpt2 gpt_neox gpt_bigcode opt bloom xglm biogpt ctrl openai-gpt llama mistral mixtral qwen2 qwen3 qwen2_moe
    qwen3_moe phi phi3 gemma gemma2 gemma3_text stablelm starcoder2 olmo olmo2 olmoe cohere cohere2 granite granitemoe
    persimmon smollm3 glm glm4 helium gpt_oss mamba falcon_mamba lfm2 minimax bert-generation roformer bert ernie4_5
    exaone4 arcee apertus trocr seed_oss llama4_text modernbert-decoder
""".split()
SEQ2SEQ_AS_THEY_ARE = """
    bart mbart pegasus marian t5 mt5 umt5 longt5 m2m_100 nllb-moe blenderbot blenderbot-small led mvp plbart fsmt
    switch_transformers pegasus_x encoder-decoder
""".split()

ARCHITECTURES = [
    *(Architecture(name, "causal") for name in CAUSAL_AS_THEY_ARE),
    Architecture("mpt", "causal", {"use_cache": True}),
    Architecture("gpt_neo", "causal", {"attention_types": [[["global"], 2]]}),
    Architecture("gptj", "causal", {"rotary_dim": 4}),
    Architecture("codegen", "causal", {"rotary_dim": 4}),
    Architecture("falcon", "causal", {"head_dim": DROP, "multi_query": True}),
    Architecture("falcon", "causal", {"head_dim": DROP, "alibi": True}, name="falcon-alibi"),
    Architecture("nemotron", "causal", {"head_dim": lambda scale: scale.head_dim, "num_key_value_heads": 2}),
    Architecture("llama", "causal", {"attn_implementation": "eager"}, name="llama-eager"),
    Architecture("mistral", "causal", {"sliding_window": None}, name="mistral-full"),
    Architecture("deepseek_v3", "causal", LATENT | {"num_key_value_heads": lambda scale: scale.heads}),
    Architecture("jamba", "causal", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}),
    Architecture("qwen3_next", "causal", {"layer_types": ["linear_attention", "full_attention"]}),
    Architecture("recurrent_gemma", "causal", {"block_types": ["recurrent", "attention"]}),
    *(Architecture(name, "seq2seq") for name in SEQ2SEQ_AS_THEY_ARE),
    # Otherwise its first forward of a short input creates other attention modules, with random numbers.
    Architecture("bigbird_pegasus", "seq2seq", {"attention_type": "original_full"}),
    Architecture("bart", "seq2seq", {"attn_implementation": "eager"}, name="bart-eager"),
    Architecture("mqa_transformer", "seq2seq", {"num_key_value_heads": 1}),
    Architecture("mqa_transformer", "causal", {"num_key_value_heads": 1}, name="mqa_transformer-causal"),
    *(Architecture(name, "seq2seq", {"num_key_value_heads": 1}) for name in ("grouped_bart", "grouped_t5")),
    Architecture("unilm", "causal", {"mask_token_id": 4}),
    # With another padding token the library raises; it does not let the number of layers be set.
    Architecture("prophetnet", "seq2seq", {"pad_token_id": 0, "num_hidden_layers": DROP}),
    Architecture("whisper", "speech", {"max_source_positions": lambda scale: scale.frames // 2, "num_mel_bins": 8}),
    Architecture(
        "speech_to_text",
        "speech",
        {
            "max_source_positions": lambda scale: scale.frames,
            "input_feat_per_channel": 8,
            "input_channels": 1,
            "conv_channels": 16,
        },
    ),
    Architecture("vision-encoder-decoder", "vision", name="vit-gpt2"),
    Architecture("vision-encoder-decoder", "vision", name="vit-trocr"),
]

# Decoder-only models whose prefixes are never computed alone, and why.
WITHOUT_PREFIX = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "qwen3_next", "recurrent_gemma"), "CACHE_LAYERS"),
    "minimax": "CACHE_TYPE",
    "openai-gpt": "NO_CACHE",
    "unilm": "NOT_CAUSAL",
}
COLUMNS_COUNT = {"roformer", "trocr", "mpt", "gpt_neo"}  # under padding on the left

BY_NAME = {architecture.id: architecture for architecture in ARCHITECTURES}
ENCODER = "-encoder"


def architecture_of(name: str, **overrides: Any) -> Architecture:
    """Returns one of the table, with other sizes; others are "causal", or "encoder" by the end of their names."""
    if name.endswith(ENCODER) and name not in BY_NAME:
        return Architecture(name.removesuffix(ENCODER), "encoder", overrides, name)
    architecture = BY_NAME.get(name, Architecture(name, "causal"))
    return replace(architecture, overrides=architecture.overrides | overrides)
