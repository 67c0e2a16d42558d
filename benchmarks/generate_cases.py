"""What bench_generate.py measures: models of real size with random weights, and the trained one inside the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from fastgen.models.demo import demo_path, sample_path

Inputs = dict[str, torch.Tensor]
NO_TIMESTAMPS = 50363  # of Whisper; CTranslate2 has rules for timestamps otherwise


@dataclass
class Case:
    """A model with its inputs, and arguments of `generate`.

    32 new tokens are the default, and all of them are generated where the arguments name no eos_token_id. leave: inputs
    finish at different steps, so that fastgen is also compared with itself where they stay in the batch.
    """

    make: Callable[[], tuple[torch.nn.Module, Inputs]]
    arguments: dict = field(default_factory=dict)
    leave: bool = False


def bart_base() -> tuple[torch.nn.Module, Inputs]:
    config = BartConfig(
        vocab_size=50265,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        forced_eos_token_id=None,
        decoder_start_token_id=1,  # padding: random weights repeat any other, also the end token
    )
    return BartForConditionalGeneration(config), {"input_ids": torch.randint(10, 50000, (4, 512))}


def bart_base_short() -> tuple[torch.nn.Module, Inputs]:
    model, _ = bart_base()
    return model, {"input_ids": torch.randint(10, 50000, (1, 16))}


def bart_base_one_row() -> tuple[torch.nn.Module, Inputs]:
    model, _ = bart_base()
    return model, {"input_ids": torch.randint(10, 50000, (1, 64))}


def t5_base() -> tuple[torch.nn.Module, Inputs]:
    config = T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32128, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), {"input_ids": torch.randint(10, 32000, (8, 128))}


def whisper_tiny() -> tuple[torch.nn.Module, Inputs]:
    config = WhisperConfig(
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        vocab_size=51865,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    prompt = torch.tensor([[config.decoder_start_token_id, NO_TIMESTAMPS]]).repeat(8, 1)
    inputs = {"input_features": torch.randn(8, 80, 3000), "decoder_input_ids": prompt}
    return WhisperForConditionalGeneration(config), inputs


def gpt2_small() -> tuple[torch.nn.Module, Inputs]:
    return GPT2LMHeadModel(GPT2Config(pad_token_id=50256)), {"input_ids": torch.randint(10, 50000, (4, 512))}


def gpt2_small_short() -> tuple[torch.nn.Module, Inputs]:
    model, _ = gpt2_small()
    return model, {"input_ids": torch.randint(10, 50000, (1, 16))}


def llama_like(layers: int = 8) -> tuple[torch.nn.Module, Inputs]:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=3,
        intermediate_size=2048,
        pad_token_id=0,
    )
    input_ids = torch.randint(10, 32000, (4, 512))
    attention_mask = torch.ones_like(input_ids)
    input_ids[1, :100], attention_mask[1, :100] = 0, 0
    return LlamaForCausalLM(config), {"input_ids": input_ids, "attention_mask": attention_mask}


def demo() -> tuple[torch.nn.Module, Inputs]:
    """The trained model inside the package on 32 lines: outputs of 9 to 75 tokens, 33 on average."""
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    lines = sample_path().read_text(encoding="utf-8").splitlines()[:32]
    batch = tokenizer(lines, padding=True, return_tensors="pt")
    model = AutoModelForSeq2SeqLM.from_pretrained(demo_path())
    return model, {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


BEAMS = {"num_beams": 4, "do_sample": False}
SAMPLES = {"num_return_sequences": 16, "do_sample": True}
GREEDY = {"do_sample": False}
CASES = {
    "bart-beam4": Case(bart_base, {**BEAMS, "no_repeat_ngram_size": 3}),
    "t5-beam4": Case(t5_base, BEAMS),
    "whisper-beam5": Case(whisper_tiny, {"num_beams": 5, "do_sample": False, "max_new_tokens": 48}),
    "gpt2-beam4": Case(gpt2_small, BEAMS),
    "gpt2-sample16": Case(gpt2_small, SAMPLES),
    "llama-sample16": Case(llama_like, SAMPLES),
    "llama-beam4": Case(llama_like, BEAMS),
    "gpt2-greedy-one-row": Case(gpt2_small_short, {**GREEDY, "max_new_tokens": 48}),
    "bart-beam4-one-row": Case(bart_base_one_row, BEAMS),
    "bart-greedy-short": Case(bart_base_short, GREEDY),
    "gpt2-greedy-short": Case(gpt2_small_short, GREEDY),
    "lengths-differ": Case(demo, {**BEAMS, "max_new_tokens": 160, "eos_token_id": 2}, leave=True),
}
