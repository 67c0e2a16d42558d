"""Models of real shape with random weights, and how long they take to generate on a GPU in four ways: `gpu_check.py`.

Of a large model a few layers are enough, because they are alike.

Tests: tests/optimizer/test_cuda_twin.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor

import fastgen
from fastgen.testing import configured

Generate = Callable[[int], Tensor]  # generates so many tokens for each row
FEW, MANY, DRY_MANY, TURNS = 4, 48, 26, 3
WAYS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "graphs off": {"cuda_graphs": "off", "cuda_kernels": True},
    "graphs, torch's attention": {"cuda_graphs": "auto", "cuda_kernels": False},
    "fastgen": {"cuda_graphs": "auto", "cuda_kernels": True},
}


@dataclass
class Model:
    """A model of transformers. shape: of its prompts, `[inputs, length]`; for Whisper frames of sound."""

    kind: str
    config: dict[str, Any]
    shape: tuple[int, int]
    arguments: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16


LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip
BART_LARGE = {"vocab_size": 50265, "forced_eos_token_id": None, "decoder_start_token_id": 1, "eos_token_id": None}
T5_BASE = {
    "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "eos_token_id": None,
    "decoder_start_token_id": 0,
}  # fmt: skip
WHISPER_SMALL = {
    "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
    "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "eos_token_id": None,
    "pad_token_id": 0, "decoder_start_token_id": 1, "begin_suppress_tokens": None,
}  # fmt: skip
BEAMS, SAMPLES = {"num_beams": 4, "do_sample": False}, {"do_sample": True, "num_return_sequences": 16}
MODELS = {
    "Llama-8B, 4 layers, 4 × 2048, 16 samples": Model(
        "Llama", {**LLAMA_8B, "num_hidden_layers": 4}, (4, 2048), SAMPLES
    ),
    "Llama-8B, 4 layers, 4 × 512, beam 4": Model("Llama", {**LLAMA_8B, "num_hidden_layers": 4}, (4, 512), BEAMS),
    "Llama-8B, 8 layers, 1 × 512, greedy": Model(
        "Llama", {**LLAMA_8B, "num_hidden_layers": 8}, (1, 512), {"do_sample": False}
    ),
    "BART-large, 128 × 1024, beam 4": Model("Bart", BART_LARGE, (128, 1024), BEAMS, torch.float16),
    "BART-large, 1 × 64, beam 4, fp32": Model("Bart", BART_LARGE, (1, 64), BEAMS, torch.float32),
    "T5-base, 8 × 256, beam 4": Model("T5", T5_BASE, (8, 256), BEAMS),
    "GPT-2, 4 × 512, beam 4, fp32": Model(
        "GPT2", {"pad_token_id": 50256, "eos_token_id": None}, (4, 512), BEAMS, torch.float32
    ),
    "Whisper-small, 8 × 30 s, beam 4": Model("Whisper", WHISPER_SMALL, (8, 3000), BEAMS, torch.float16),
}
CLASSES = {
    "Llama": "LlamaForCausalLM",
    "Bart": "BartForConditionalGeneration",
    "T5": "T5ForConditionalGeneration",
    "GPT2": "GPT2LMHeadModel",
    "Whisper": "WhisperForConditionalGeneration",
}
_TINY_ENDS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
TINY = {
    "Llama": {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    },
    "Bart": _TINY_ENDS,
    "T5": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "pad_token_id": 0},
    "Whisper": {**_TINY_ENDS, "num_mel_bins": 8, "max_source_positions": 6},
}  # fmt: skip
FAIRSEQ = "fairseq Transformer-big, 64 × 32, beam 4"
FAIRSEQ_SIZE = {
    "encoder_embed_dim": 1024, "decoder_embed_dim": 1024, "encoder_ffn_embed_dim": 4096,
    "decoder_ffn_embed_dim": 4096, "encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_layers": 6,
    "decoder_layers": 6,
}  # fmt: skip


def generate(dry: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Returns what `_times` measures for each model. dry: of tiny ones."""
    calls = {name: lambda model=model: _generate(model, dry) for name, model in MODELS.items()}
    if find_spec("fairseq"):
        calls[FAIRSEQ] = lambda: _generate_fairseq(dry)
    return {name: _times(call(), DRY_MANY if dry else MANY) for name, call in calls.items()}


def _generate(case: Model, dry: bool) -> Generate:
    torch.manual_seed(0)
    sizes = {"vocab_size": 600, **TINY[case.kind]} if dry else {}
    config = getattr(transformers, f"{case.kind}Config")(**case.config | sizes)
    inputs, length = (min(2, case.shape[0]), 12) if dry else case.shape
    with torch.device("cpu" if dry else "cuda"):
        model = getattr(transformers, CLASSES[case.kind])(config)
    model = model.to(torch.float32 if dry else case.dtype).eval().cuda()
    if case.kind == "Whisper":
        prompts = {"input_features": torch.randn(inputs, config.num_mel_bins, length).to(model.dtype).cuda()}
    else:
        prompts = {"input_ids": torch.randint(10, config.vocab_size, (inputs, length)).cuda()}
        prompts["attention_mask"] = torch.ones_like(prompts["input_ids"])

    def generate(new_tokens: int) -> Tensor:
        arguments = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, **case.arguments}
        return model.generate(**prompts, **arguments)[:, -new_tokens:]

    return generate


def _generate_fairseq(dry: bool) -> Generate:
    """Returns a call of a Transformer; the modules are those of the tests, in tests/helpers."""
    from fairseq.tasks.translation import TranslationConfig, TranslationTask
    from fairseq.utils import move_to_cuda
    from fairseq_generation import generate
    from fairseq_models import Case, build, dictionary, source_sample

    words, inputs, length = (40, 2, 12) if dry else (32_000, 64, 32)
    task = TranslationTask(TranslationConfig(), dictionary(words), dictionary(words))
    model = build("transformer", task, 0, 1.0, **{} if dry else FAIRSEQ_SIZE)
    model = model.cuda() if dry else model.half().cuda()
    case = Case([model], task, move_to_cuda(source_sample(task, [length] * inputs)))

    def call(new_tokens: int) -> Tensor:
        sentences = generate(case, beam=4, min_len=new_tokens - 1, max_len_a=0, max_len_b=new_tokens)
        tokens = [hypotheses[0]["tokens"] for hypotheses in sentences]
        return torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)

    return call


def _times(generate: Generate, many: int) -> dict[str, dict[str, float]]:
    """Returns seconds of a first and a later call and milliseconds of a step in each way, and the tokens as in stock.

    equal_tokens: the part of the tokens that are those of stock. replayed: the steps that a call replays.
    """
    first = {way: _timed(generate, way, many)[0] for way in WAYS}
    turns = [{way: (_timed(generate, way, FEW), _timed(generate, way, many)) for way in WAYS} for _ in range(TURNS)]
    results = {}
    stock = turns[-1]["stock"][1][1]
    for way in WAYS:
        short, long = (statistics.median(turn[way][index][0] for turn in turns) for index in (0, 1))
        _, tokens, replayed = turns[-1][way][1]
        equal = (tokens == stock).float().mean().item() if tokens.shape == stock.shape else 0.0
        step = (long - short) / (many - FEW) * 1e3
        results[way] = {"first_s": first[way], "s": long, "ms_per_step": step, "equal_tokens": equal}
        results[way]["replayed"] = replayed
    return results


def _timed(generate: Generate, way: str, new_tokens: int) -> tuple[float, Tensor, int]:
    """Returns the seconds of a call, its tokens, and how many steps it replayed."""
    torch.manual_seed(3)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    with _way(way):
        tokens = generate(new_tokens)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    return seconds, tokens, 0 if WAYS[way] is None else fastgen.explain().replays


@contextmanager
def _way(way: str) -> Iterator[None]:
    with fastgen.disabled() if (settings := WAYS[way]) is None else configured(**settings):
        yield
