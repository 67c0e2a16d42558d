"""Folders of tiny models that speak, with tokenizers and feature extractors, for the command."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from seamless_models import LANGUAGES, seamless

WORDS = [f"word{number}" for number in range(24)]
LETTERS = "abcdefghijklmnop "


def save_seamless(folder: Path, version: str = "SeamlessM4Tv2", kind: str = "ForTextToSpeech") -> Path:
    """Of two languages, three speakers and 16 kHz; it hears features [F, 10]."""
    model = seamless(version, kind)
    model.generation_config._from_model_config = False  # else its languages would be left out when it is loaded
    model.save_pretrained(folder)
    languages = [f"__{language}__" for language in LANGUAGES]
    words = ["<pad>", "<unk>", "<s>", "</s>", *languages, *(f"▁{word}" for word in WORDS)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = transformers.SeamlessM4TTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=languages)
    extractor = transformers.SeamlessM4TFeatureExtractor(feature_size=5, num_mel_bins=5)
    transformers.SeamlessM4TProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


def save_vits(folder: Path, speakers: int = 3) -> Path:
    """Draws noise for what it speaks."""
    torch.manual_seed(0)
    config = transformers.VitsConfig(
        vocab_size=len(LETTERS) + 1,
        **dict.fromkeys(("hidden_size", "ffn_dim", "flow_size", "spectrogram_bins"), 16),
        **dict.fromkeys(("num_hidden_layers", "wavenet_dilation_rate", "duration_predictor_flow_bins"), 2),
        **dict.fromkeys(("prior_encoder_num_flows", "prior_encoder_num_wavenet_layers"), 2),
        num_attention_heads=2,
        num_speakers=speakers,
        speaker_embedding_size=8 if speakers > 1 else 0,
        upsample_initial_channel=16,
        upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
    )
    transformers.VitsModel(config).save_pretrained(folder)
    vocabulary = {"<pad>": len(LETTERS), **{letter: index for index, letter in enumerate(LETTERS)}}
    (folder / "letters.json").write_text(json.dumps(vocabulary))
    transformers.VitsTokenizer(str(folder / "letters.json"), unk_token="a", phonemize=False).save_pretrained(folder)
    return folder


def save_bark(folder: Path) -> Path:
    """Samples in each of its three models; a text has up to 256 tokens."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "block_size": 600}
    codes = {"input_vocab_size": 80, "output_vocab_size": 80}
    config = transformers.BarkConfig(
        semantic_config=transformers.BarkSemanticConfig(**size, **codes).to_dict(),
        coarse_acoustics_config=transformers.BarkCoarseConfig(**size, **codes).to_dict(),
        fine_acoustics_config=transformers.BarkFineConfig(
            **size | {"block_size": 1024}, **codes, n_codes_total=4, n_codes_given=1
        ).to_dict(),
        codec_config=transformers.EncodecConfig(
            **dict.fromkeys(("num_filters", "hidden_size", "codebook_dim"), 8), codebook_size=16, num_lstm_layers=1
        ).to_dict(),
    )
    model = transformers.BarkModel(config)
    own = model.generation_config
    own.semantic_config = {
        "eos_token_id": 20,
        "max_new_tokens": 6,
        "text_encoding_offset": 21,
        "text_pad_token": 70,
        "semantic_infer_token": 71,
        "semantic_vocab_size": 20,
        "semantic_rate_hz": 5,
        "do_sample": True,
        "semantic_pad_token": 72,
    }
    own.coarse_acoustics_config = {
        "coarse_semantic_pad_token": 73,
        "coarse_infer_token": 74,
        "n_coarse_codebooks": 2,
        "do_sample": True,
        "coarse_rate_hz": 10,
        "max_coarse_input_length": 32,
        "max_coarse_history": 40,
        "sliding_window_len": 20,
    }
    own.fine_acoustics_config = {"max_fine_history_length": 16, "max_fine_input_length": 32, "n_fine_codebooks": 4}
    own.codebook_size, own._from_model_config = 16, False
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(24))]
    transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder)
    return folder
