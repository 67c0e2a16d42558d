"""Tiny multilingual models, a Whisper and models that speak, with random weights, as folders of from_pretrained."""

import json
from pathlib import Path

import sentencepiece
import torch
import transformers
from cli_models import SPECIAL_TOKENS, WORDS, small
from seamless_models import LANGUAGES, seamless

PIECES = ["▁", *sorted(set("".join(WORDS)))]


def save_nllb(folder: Path) -> Path:
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + PIECES)}
    languages = ["eng_Latn", "fra_Latn", "deu_Latn"]
    tokenizer = transformers.NllbTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=languages)
    return _save_translator(folder, transformers.M2M100Config, tokenizer)


def save_mbart(folder: Path) -> Path:
    return _save_translator(folder, transformers.MBartConfig, transformers.MBartTokenizer(vocab=_unigrams()))


def save_mbart50(folder: Path) -> Path:
    return _save_translator(folder, transformers.MBartConfig, transformers.MBart50Tokenizer(vocab=_unigrams()))


def save_m2m100(folder: Path) -> Path:
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text("\n".join(WORDS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "trained"), vocab_size=24, hard_vocab_limit=False, minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "trained.model"))
    learned = [pieces.id_to_piece(index) for index in range(pieces.vocab_size())]
    words = SPECIAL_TOKENS + [piece for piece in learned if piece not in SPECIAL_TOKENS]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    tokenizer = transformers.M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "trained.model"))
    return _save_translator(folder, transformers.M2M100Config, tokenizer)


def save_whisper(folder: Path, **config: object) -> Path:
    """Saves a Whisper with languages and timestamps, and a feature extractor that hears two seconds."""
    torch.manual_seed(4)  # with this seed its text differs from sound to sound
    words = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>"]
    special, no_timestamps = [*words[1:], "<|notimestamps|>"], len(words) + len(WORDS)
    words += [*(f"Ġ{word}" for word in WORDS), "<|notimestamps|>", *(f"<|{number / 50:.2f}|>" for number in range(101))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = transformers.WhisperTokenizer(
        vocab=vocabulary, merges=[], pad_token="<|endoftext|>", extra_special_tokens=special
    )
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    settings = {
        "vocab_size": len(tokenizer),
        **small(16),
        "num_mel_bins": 8,
        "max_source_positions": 100,
        "max_target_positions": 32,
        "decoder_start_token_id": 1,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    }
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**settings | config)).eval()
    model.generation_config.update(
        max_length=12, suppress_tokens=[], begin_suppress_tokens=None, forced_bos_token_id=None
    )
    for name, value in {
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": 2, "<|de|>": 3},
        "task_to_id": {"transcribe": 4, "translate": 5},
        "no_timestamps_token_id": no_timestamps,
        "return_timestamps": False,
        "_from_model_config": False,  # else they would be left out when it is loaded
    }.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


def save_seamless(folder: Path, version: str = "SeamlessM4Tv2", kind: str = "ForTextToSpeech") -> Path:
    """Saves a Seamless of two languages, three speakers and 16 kHz, which hears features [F, 10]."""
    model = seamless(version, kind)
    model.generation_config._from_model_config = False  # else its languages would be left out when it is loaded
    model.save_pretrained(folder)
    languages = [f"__{language}__" for language in LANGUAGES]
    words = ["<pad>", "<unk>", "<s>", "</s>", *languages, *(f"▁{word}" for word in WORDS[:24])]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = transformers.SeamlessM4TTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=languages)
    extractor = transformers.SeamlessM4TFeatureExtractor(feature_size=5, num_mel_bins=5)
    transformers.SeamlessM4TProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder


def _unigrams() -> list[tuple[str, float]]:
    return [*((token, 0.0) for token in SPECIAL_TOKENS), *((piece, -3.0) for piece in PIECES)]


def _save_translator(
    folder: Path, config: type[transformers.PretrainedConfig], tokenizer: transformers.PreTrainedTokenizerBase
) -> Path:
    torch.manual_seed(0)
    tokens = {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None}
    size = len(tokenizer) + 120  # M2M100 has languages and unused words after those
    settings = {**small(16), **tokens, "vocab_size": size, "max_position_embeddings": 64}
    model = transformers.AutoModelForSeq2SeqLM.from_config(config(**settings))
    model.generation_config.update(max_length=9)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
