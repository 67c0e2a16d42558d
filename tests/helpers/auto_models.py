"""A tiny random model of every class in transformers' auto mappings that generates, and its inputs.

A class's default configuration is shrunk by the names of its fields, with those inside it; `OVERRIDES` has what names
do not tell. `WITHOUT_MODEL` has the classes for which no tiny model is made, and why.
"""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from architectures import BY_NAME, DROP, INDEXED, LATENT, SPECIAL, TINY, VOCABULARY, sizes
from tiny_models import lively, with_prefix
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

MAPPINGS = """
    CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ IMAGE_TEXT_TO_TEXT MULTIMODAL_LM TEXT_TO_WAVEFORM
    TEXT_TO_SPECTROGRAM CAUSAL_IMAGE_MODELING RNNT TDT
""".split()

_LAYERS = """
    num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers
    depth num_blocks
""".split()
_WIDTHS = """
    embed_dim hidden_dim dim_model inner_dim adapter_dim projection_dim text_embed_dim encoder_hidden_size
    decoder_hidden_size vision_hidden_size audio_hidden_size qformer_hidden_size cross_attention_hidden_size emb_dim
    hidden_size_global text_hidden_size out_hidden_size condition_dim backbone_hidden_size cross_hidden_size
    adapter_in_dim adapter_out_dim adapter_input_size vision_output_dim projector_input_dim projector_output_dim
    base_channels
""".split()
_INNER = "mlp_dim ff_dim feed_forward_size ffn_size ffn_hidden_size d_inner".split()
_WINDOWS = "sliding_window local_attention_window window_size sliding_window_size".split()
_SIZES = {
    **sizes(TINY),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_WIDTHS, TINY.width),
    **dict.fromkeys(_INNER, 64),
    **dict.fromkeys(_WINDOWS, 64),
    **{name: size for name, size in (LATENT | INDEXED).items() if isinstance(size, int)},
    **dict.fromkeys(("image_size", "img_size"), TINY.image_size),
    "patch_size": TINY.patch_size,
    **dict.fromkeys(("cross_num_attention_heads", "cross_num_key_value_heads"), TINY.heads),
    "cross_head_dim": TINY.head_dim,
    **dict.fromkeys(("num_filters", "num_codebooks"), 4),
    **dict.fromkeys(("linear_head_dim", "mamba_head_dim"), 8),
    **dict.fromkeys(("ssm_state_size", "chunk_size"), 16),
    "mamba_num_heads": 4,
    "linear_num_heads": 2,
    "text_vocab_size": VOCABULARY,
    **dict.fromkeys(("num_mel_bins", "hidden_size_per_layer_input", "feature_size"), 8),
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "num_key_value_heads": TINY.key_value_heads,
}

_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_CODEC = {
    "num_filters": 4,
    "upsample_groups": 32,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "codebook_size": 64,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = "Cosmos3Edge Glm46V Glm4v GlmOcr HunYuanVL PaddleOCRVL Qwen2VL Qwen2_5_VL".split()
_COMPASS = {
    "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE),
    "layer_types": ["sliding_attention", "full_attention"],
}
_DOTS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8}
_DOTS |= {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_v_head_dim": 6}
_INDEXER = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {"mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "BigBirdForCausalLM": {"attention_type": "original_full"},
    "BailingHybridForCausalLM": {"head_dim": 8, "qk_rope_head_dim": 4},
    "XmodForCausalLM": {"languages": ["en_XX"], "default_language": "en_XX"},
    **{
        f"{name}ForConditionalGeneration": {"text_config.rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}
        for name in _MROPE
    },
    "Dots3NoteForCausalLM": _DOTS,
    "Dots3NoteForConditionalGeneration": {f"text_config.{name}": value for name, value in _DOTS.items()},
    "MuseSparkForConditionalGeneration": {"audio_config.hidden_sizes": (16,) * 4, "audio_config.depths": (1,) * 4},
    "PPFormulaNetForConditionalGeneration": {"vision_config.window_size": 2},
    "Glm4vMoeForConditionalGeneration": {"text_config.rope_parameters": _ROPE | {"mrope_section": [1, 1, 0]}},
    "NemotronHForCausalLM": {"n_groups": 1},
    "Qwen2_5OmniThinkerForConditionalGeneration": {
        "vision_start_token_id": 4,
        "text_config.rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]},
    },
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"vision_start_token_id": 4},
    "Nemotron3_5TranscribeForConditionalGeneration": {"text_config.n_groups": 1},
    "CpmAntForCausalLM": {"dim_head": 8, "dim_ff": 64, "prompt_length": 4},
    "CohereCompassForCausalLM": _COMPASS,
    "CohereCompassForConditionalGeneration": {f"text_config.{name}": value for name, value in _COMPASS.items()},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": _EXPERTS | {"n_shared_experts": 1},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "LongcatFlashForCausalLM": {"expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2, "head_dim": 4},
    "Gemma3nForCausalLM": {"intermediate_size": 64},
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 4},
    "RoCBertForCausalLM": dict.fromkeys(("shape_vocab_size", "pronunciation_vocab_size"), VOCABULARY),
    "DbrxForCausalLM": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "ZambaForCausalLM": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_shape": (8, 16),
        "axial_pos_embds_dim": (8, 24),
        "attn_layers": ["local", "lsh"],
        "hash_seed": 0,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
    },
    "Qwen4ExpForCausalLM": _INDEXER,
    "Qwen4ExpForConditionalGeneration": {f"text_config.{name}": value for name, value in _INDEXER.items()},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 4}},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 3}},
    "Ernie4_5_VLMoeForConditionalGeneration": {"text_config.rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}},
    "Step3p7ForConditionalGeneration": {"text_config.sliding_window": 64},
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
    },
    "Granite4VisionForConditionalGeneration": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "FunAsrNanoForConditionalGeneration": {"adaptor_config.intermediate_size": 8},
    "Glm5NextForConditionalGeneration": {"text_config.index_topk": 16, "text_config.qk_rope_head_dim": 0},
    "NemotronH_Omni_Reasoning_V3": {
        "vision_config.video_temporal_patch_size": 2,
        "text_config.n_groups": 1,
    },
    "Molmo2ForConditionalGeneration": {"adapter_config.vision_feature_layer": [1, 0]},
    "DiffusionGemmaForBlockDiffusion": {
        "canvas_length": 16,
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 32,
    },
    "Florence2ForConditionalGeneration": {
        "vision_config.embed_dim": (16, 16, 16, 32),
        "vision_config.depths": (1, 1, 1, 1),
        "vision_config.num_heads": (2, 2, 2, 2),
        "vision_config.num_groups": (2, 2, 2, 2),
    },
    "Qwen3OmniMoeForConditionalGeneration": {
        "talker_config.text_config.shared_expert_intermediate_size": 64,
        "talker_config.spatial_merge_size": 2,
    },
    "CsmForConditionalGeneration": {f"codec_config.{name}": value for name, value in _CODEC.items()},
    "KyutaiSpeechToTextForConditionalGeneration": {f"codec_config.{name}": value for name, value in _CODEC.items()},
}

# The library attends to the padding of prompts, fastgen does not (models/prophetnet.py): their lengths are equal.
PADDING_IS_SEEN = {"ProphetNetForCausalLM"}

WITHOUT_MODEL = {
    **dict.fromkeys(
        (f"{name}ForConditionalGeneration" for name in ("Gemma3n", "FastVlm", "PerceptionLM")),
        "TimmWrapperModel requires the PIL library",
    ),
    "BltForCausalLM": "'BltConfig' object has no attribute 'num_hidden_layers'",
    "Gemma4AssistantForCausalLM": "hidden_size_per_layer_input must be 0, got 256",
    "Gemma4UnifiedAssistantForCausalLM": "The set of layer types producing a cache is different",
    "MusicgenForCausalLM": "shape '[-1, 4, 12]' is invalid for input of size 24",
    "MusicgenMelodyForCausalLM": "shape '[-1, 4, 12]' is invalid for input of size 24",
    "xLSTMForCausalLM": "matC_old has wrong shape",
    "VoxtralRealtimeForConditionalGeneration": "You must specify exactly one of input_features",
    "KyutaiSpeechToTextForConditionalGeneration": "'NoneType' object has no attribute 'shape'",
    "Pop2PianoForConditionalGeneration": "missing 1 required positional argument: 'input_features'",
    "SeamlessM4TForSpeechToText": "Given normalized_shape=[160]",
    "SeamlessM4Tv2ForSpeechToText": "Given normalized_shape=[160]",
    "VibeVoiceForConditionalGeneration": "requires `diffusers`",
    "Blip2ForConditionalGeneration": "'NoneType' object cannot be interpreted as an integer",
    "Granite4VisionForConditionalGeneration": "integer modulo by zero",
    "IdeficsForVisionText2Text": "Exactly 1 of pixel_values, image_encoder_embeddings or perceiver_embeddings",
    "InstructBlipForConditionalGeneration": "argument 'input' (position 1) must be Tensor, not NoneType",
    "InstructBlipVideoForConditionalGeneration": "not enough values to unpack (expected 5, got 4)",
    "Kosmos2ForConditionalGeneration": "'NoneType' object has no attribute 'to'",
    "Pix2StructForConditionalGeneration": "too many indices for tensor of dimension 2",
    "UdopForConditionalGeneration": "Bbox is required",
    "Qwen2_5OmniForConditionalGeneration": "Chelsie is not available",
    "BarkModel": "'GenerationConfig' object has no attribute 'semantic_config'",
    "GradiumPhononTTSForConditionalGeneration": "Every prompt must end with the first audio position",
    "Qwen3OmniMoeForConditionalGeneration": "'NoneType' object has no attribute 'get'",
    "HiggsAudioV2ForConditionalGeneration": "HiggsAudioV2 generates audio codebook logits, not text logits",
    "MusicgenMelodyForConditionalGeneration": "indexing tensors could not be broadcast together",
    "SpeechT5ForTextToSpeech": "`speaker_embeddings` must be specified",
    "SeamlessM4TForTextToSpeech": "You must specify a `tgt_lang`",
    "MusicgenForConditionalGeneration": "indexing tensors could not be broadcast together",
    "PocketTTSForConditionalGeneration": "Every prompt must end with the first audio position",
    "SeamlessM4Tv2ForTextToSpeech": "You must specify a `tgt_lang`",
}


def auto_classes() -> Iterator[str]:
    """Yields the names of all classes in the mappings that have `generate`, each once."""
    names = {}
    for mapping in MAPPINGS:
        for classes in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            names |= dict.fromkeys([classes] if isinstance(classes, str) else classes)
    return (name for name in names if getattr(transformers, name).can_generate())


def _shrunk(config: PreTrainedConfig, overrides: dict[str, Any]) -> PreTrainedConfig:
    """Returns a configuration of the same class with tiny sizes; overrides: values by dotted names."""
    fields, arguments = dict(vars(config)), {}
    layers = _layers_of_each_kind(config)
    common_names = {name: common for common, name in config.attribute_map.items()}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            inner = {key.partition(".")[2]: item for key, item in overrides.items() if key.startswith(f"{name}.")}
            arguments[name] = _shrunk(value, inner)
        elif name in overrides:
            continue
        elif name in layers.get("lists", ()):
            arguments[name] = [value[index] for index in layers["chosen"]]
        elif name in _LAYERS and layers:
            arguments[name] = len(layers["chosen"])
        elif type(value) in (int, float) and (common := name if name in _SIZES else common_names.get(name)) in _SIZES:
            arguments[name] = _SIZES[common]
        elif name in ("head_dim", "num_key_value_heads") and name in fields and "kv_lora_rank" not in fields:
            arguments[name] = _SIZES[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and name not in SPECIAL:
            arguments[name] = 4  # no prompt contains it
    if "kv_lora_rank" in fields:
        arguments["num_key_value_heads"] = TINY.heads
        arguments.pop("head_dim", None)
    arguments |= {key: value for key, value in SPECIAL.items() if hasattr(config, key)}
    arguments |= {key: value for key, value in overrides.items() if "." not in key and value is not DROP}
    return type(config)(**arguments)


def _layers_of_each_kind(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the names of the lists with an item for each layer, and indices of layers, one of each kind."""
    count = next((value for name in _LAYERS if isinstance(value := getattr(config, name, None), int)), 0)
    lists = [name for name, value in vars(config).items() if isinstance(value, (list, tuple)) and len(value) == count]
    if count <= 2 or not lists:
        return {}
    kinds = list(zip(*(map(repr, getattr(config, name)) for name in lists), strict=True))
    chosen = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    return {"lists": lists, "chosen": chosen[:4] if len(chosen) > 1 else [0, count - 1]}


def _overrides(kind: type) -> dict[str, Any]:
    """Returns the values that configurations of this class need, as well those of `architectures.py`."""
    architecture = BY_NAME.get(kind.config_class.model_type)
    overrides = {} if architecture is None else architecture.overrides
    overrides = {key: value(TINY) if callable(value) else value for key, value in overrides.items()}
    return overrides | OVERRIDES.get(kind.__name__, {})


def auto_model(name: str) -> torch.nn.Module:
    """Returns a tiny lively model of the class with this name."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = _shrunk(kind.config_class(), _overrides(kind))
    config.is_decoder = not config.is_encoder_decoder  # otherwise BERT-like models have no cache
    model = lively(kind(config)).eval()
    for key, value in SPECIAL.items():
        setattr(model.generation_config, key, value)
    return model


def auto_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Returns two prompts of unequal length that begin alike, or two sounds or pictures."""
    name, config = model.main_input_name, model.config
    generator = torch.Generator().manual_seed(1)
    if name == "input_ids":
        lengths = (12, 12) if type(model).__name__ in PADDING_IS_SEEN else (12, 10)
        return with_prefix(*lengths, side="right" if config.is_encoder_decoder else "left")
    if name == "pixel_values":
        return {name: torch.randn(2, 3, TINY.image_size, TINY.image_size, generator=generator)}
    if name == "input_features":
        shape = (2, 8, TINY.frames) if config.model_type == "whisper" else (2, TINY.frames, 8)
        return {name: torch.randn(shape, generator=generator)}
    return {name: torch.randn(2, 2000, generator=generator)}


def modeling_modules(model: torch.nn.Module) -> set[str]:
    """Returns the names of the library's modeling modules whose classes the model and its parts have."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    return {name for name in names if name.startswith("transformers.models.")}
