"""Folders of tiny models that speak, with tokenizers and feature extractors, for the command."""

from __future__ import annotations

from pathlib import Path

import transformers
from seamless_models import LANGUAGES, seamless

WORDS = [f"word{number}" for number in range(24)]


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
