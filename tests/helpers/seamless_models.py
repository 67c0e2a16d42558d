"""Tiny random Seamless M4T models of both versions, and inputs for them."""

from typing import Any

import torch
import transformers

LANGUAGES = ("eng", "fra")
# Sizes of the text's encoder and decoder, and of those that generate units.
LAYERS = {
    f"{prefix}{part}_{what}": number
    for prefix in ("", "t2u_")
    for part, layers in (("encoder", 1), ("decoder", 2))
    for what, number in (("layers", layers), ("ffn_dim", 24), ("attention_heads", 2))
}
SPEECH = {"speech_encoder_layers": 1, "speech_encoder_attention_heads": 2, "speech_encoder_intermediate_size": 24}
VOCODER = {
    "upsample_initial_channel": 16,
    "upsample_rates": (3, 2),
    "upsample_kernel_sizes": (7, 4),
    "resblock_kernel_sizes": (3, 5),
    "resblock_dilation_sizes": ((1, 3), (1, 3)),
    "unit_hifi_gan_vocab_size": 30,
    "unit_embed_dim": 8,
    **dict.fromkeys(("lang_embed_dim", "spkr_embed_dim"), 4),
    "vocoder_num_langs": 2,
    "vocoder_num_spkrs": 3,
    "vocoder_offset": 0,
}
SIZE = {
    **LAYERS,
    **SPEECH,
    **VOCODER,
    "vocab_size": 40,
    "hidden_size": 16,
    **dict.fromkeys(("max_position_embeddings", "t2u_max_position_embeddings"), 64),
    "max_new_tokens": 20,
    "feature_projection_input_dim": 10,
    "adaptor_kernel_size": 4,
    "adaptor_stride": 2,
    "conv_depthwise_kernel_size": 3,
    "t2u_vocab_size": 30,
}
SIZES: dict[str, dict[str, Any]] = {
    "SeamlessM4T": {**SIZE, "max_source_positions": 64, "num_conv_pos_embeddings": 4, "t2u_max_new_tokens": 24},
    "SeamlessM4Tv2": {
        **SIZE,
        "char_vocab_size": 20,
        "left_max_position_embeddings": 8,
        "right_max_position_embeddings": 4,
        "speech_encoder_chunk_size": 50,
        "t2u_variance_predictor_embed_dim": 16,
        "t2u_variance_predictor_hidden_dim": 8,
    },
}
KINDS = ("Model", "ForTextToText", "ForSpeechToText", "ForTextToSpeech", "ForSpeechToSpeech")


def seamless(version: str, kind: str, seed: int = 0) -> transformers.PreTrainedModel:
    """Returns one of the ten classes, such as SeamlessM4Tv2ForSpeechToSpeech, with random weights."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{version}Config")(**SIZES[version])
    model = getattr(transformers, version + kind)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.4 if "vocoder" not in name else 0.2)
    codes = {language: index for index, language in enumerate(LANGUAGES)}
    own = model.generation_config
    own.text_decoder_lang_to_code_id = {language: 4 + index for language, index in codes.items()}
    own.t2u_lang_code_to_id = {language: 5 + index for language, index in codes.items()}
    own.vocoder_lang_code_to_id = codes
    own.id_to_text = {str(index): "ab c"[: 1 + index % 3] for index in range(config.vocab_size)}
    own.char_to_id = {"a": 1, "b": 2, " ": 3, "c": 4}
    return model


def inputs_of(kind: str, batch_size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns input_ids [B, T], or input_features [B, F, 10], with the mask of rows that differ in length."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [9 - 2 * row for row in range(batch_size)]
    if kind.startswith("ForSpeech"):
        features = torch.randn(batch_size, 18, 10, generator=draw)
        mask = torch.tensor([[1] * (2 * length) + [0] * (18 - 2 * length) for length in lengths])
        return {"input_features": features, "attention_mask": mask}
    ids = torch.randint(8, 40, (batch_size, 9), generator=draw)
    mask = torch.tensor([[1] * length + [0] * (9 - length) for length in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}
