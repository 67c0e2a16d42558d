"""Tiny models with random weights and their tokenizers, as folders that from_pretrained can load."""

import random
import shutil
from pathlib import Path

import torch
from tiny_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

WORDS = [f"word{number}" for number in range(60)]
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
POSITIONS = 64


def sentences(number: int, longest: int = 12, seed: int = 0) -> list[str]:
    """Returns random lines of known words, of different lengths."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, longest))) for _ in range(number)]


def small(ffn_dim: int) -> dict[str, object]:
    """Returns sizes of an encoder and a decoder of one layer, and weights so large that outputs differ."""
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": ffn_dim}
    parts = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}
    return {"d_model": 16, "init_std": 0.5, **parts}


def save_bart(folder: Path, **config: object) -> Path:
    torch.manual_seed(0)
    tokenizer = _tokenizer(pad_token="<pad>", ends_inputs=True)
    settings = {"max_position_embeddings": POSITIONS, "forced_eos_token_id": None, "vocab_size": len(tokenizer)}
    model = BartForConditionalGeneration(BartConfig(**small(32) | settings | config))
    return _save(folder, model, tokenizer, max_length=9)


def save_t5(folder: Path, **config: object) -> Path:
    torch.manual_seed(0)
    tokenizer = _tokenizer(pad_token="<pad>", ends_inputs=True)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "initializer_factor": 8.0}
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return _save(folder, T5ForConditionalGeneration(T5Config(**sizes | tokens | config)), tokenizer, max_length=9)


def save_gpt2(folder: Path) -> Path:
    """Saves a GPT-2, whose tokenizer has no pad token, like the real one."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(pad_token=None, ends_inputs=False)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": POSITIONS, "initializer_range": 0.5}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=2, **sizes)
    return _save(folder, GPT2LMHeadModel(config), tokenizer, max_new_tokens=6)


def save_llama(folder: Path) -> Path:
    """Saves a Llama whose outputs differ in length, and whose scores depend on how steps are computed."""
    tokenizer = _tokenizer(pad_token="<pad>", ends_inputs=False)
    model = tiny("llama", vocab_size=len(tokenizer))
    return _save(folder, model, tokenizer, bos_token_id=0, pad_token_id=1, eos_token_id=[2, 5])


def copy_with_template(model: Path, folder: Path, template: str) -> Path:
    """Copies a model and gives its tokenizer a chat template."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(pad_token: str | None, ends_inputs: bool) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends_inputs:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=pad_token
    )


def _save(
    folder: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, **generation: int | list[int]
) -> Path:
    model.generation_config.update(**generation)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
