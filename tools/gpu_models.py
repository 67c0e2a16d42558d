"""Models of real shape with random weights: how long they take to generate on a GPU, and where: `gpu_check.py`.

Of a large model a few layers are enough, because they are alike; one has all.

Tests: tests/optimizer/test_cuda_twin.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor

import fastgen
from fastgen.testing import configured

Generate = Callable[..., Tensor]  # generates so many tokens for each row, with more arguments
FEW, MANY, DRY_MANY, TURNS = 4, 48, 26, 3
# The settings of fastgen, None for none, and more arguments.
STOCK, COMPILED, FASTGEN = "stock", "stock, static cache, compiled", "fastgen"
WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    STOCK: (None, {}),
    COMPILED: (None, {"cache_implementation": "static"}),
    "graphs off": ({"cuda_graphs": "off", "cuda_kernels": True}, {}),
    FASTGEN: ({"cuda_graphs": "auto", "cuda_kernels": True}, {}),
}


@dataclass
class Model:
    """A model of transformers.

    shape: of its prompts, `[inputs, length]`; for Whisper frames of sound. new_tokens: of each row; ends: how many
    tokens of the vocabulary end a row. outputs: the number of sequences that a trie allows; 0 for no trie. compiles:
    whether stock is compiled, too, which takes a minute.
    """

    kind: str
    config: dict[str, Any]
    shape: tuple[int, int]
    arguments: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    new_tokens: int = MANY
    ends: int = 0
    outputs: int = 0
    compiles: bool = False


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
QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "num_hidden_layers": 28, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip
BEAMS, SAMPLES = {"num_beams": 4, "do_sample": False}, {"do_sample": True, "num_return_sequences": 16}
FAIRSEQ = "fairseq Transformer-big, 64 sentences, beam 4, rows end"
# In the order of their worth: time on a GPU may end. None: a model of fairseq.
MODELS: dict[str, Model | None] = {
    "Llama-8B, 4 layers, 4 × 2048, 16 samples": Model(
        "Llama", {**LLAMA_8B, "num_hidden_layers": 4}, (4, 2048), SAMPLES
    ),
    "BART-large, 128 × 1024, beam 4, rows end": Model(
        "Bart", BART_LARGE, (128, 1024), BEAMS, torch.float16, new_tokens=96, ends=1600
    ),
    "Llama-8B, 8 layers, 1 × 512, greedy": Model(
        "Llama", {**LLAMA_8B, "num_hidden_layers": 8}, (1, 512), {"do_sample": False}, compiles=True
    ),
    FAIRSEQ: None,
    "Llama-8B, 32 layers, 4 × 512, 16 samples, 256 tokens": Model(
        "Llama", {**LLAMA_8B, "num_hidden_layers": 32}, (4, 512), SAMPLES, new_tokens=256
    ),
    "Qwen3-0.6B, 1 × 300, 128 beams, a trie": Model(
        "Qwen3", QWEN3_06B, (1, 300), {"num_beams": 128, "do_sample": False}, new_tokens=8, outputs=100_000
    ),
    "Llama-8B, 4 layers, 4 × 512, beam 4": Model("Llama", {**LLAMA_8B, "num_hidden_layers": 4}, (4, 512), BEAMS),
    "BART-large, 1 × 64, beam 4, fp32": Model("Bart", BART_LARGE, (1, 64), BEAMS, torch.float32),
    "T5-base, 8 × 256, beam 4": Model("T5", T5_BASE, (8, 256), BEAMS),
    "GPT-2, 4 × 512, beam 4, fp32": Model(
        "GPT2", {"pad_token_id": 50256, "eos_token_id": None}, (4, 512), BEAMS, torch.float32
    ),
    "Whisper-small, 8 × 30 s, beam 4": Model("Whisper", WHISPER_SMALL, (8, 3000), BEAMS, torch.float16),
}
CLASSES = {
    "Llama": "LlamaForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
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
    "Qwen3": {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_hidden_layers": 2,
    },
    "Bart": _TINY_ENDS,
    "T5": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "pad_token_id": 0},
    "Whisper": {**_TINY_ENDS, "num_mel_bins": 8, "max_source_positions": 6},
}  # fmt: skip
FAIRSEQ_SIZE = {
    "encoder_embed_dim": 1024, "decoder_embed_dim": 1024, "encoder_ffn_embed_dim": 4096,
    "decoder_ffn_embed_dim": 4096, "encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_layers": 6,
    "decoder_layers": 6,
}  # fmt: skip


PROFILED = ["Llama-8B, 4 layers, 4 × 2048, 16 samples", "BART-large, 128 × 1024, beam 4, rows end"]
MOST_KERNELS = 25  # of a profile


def generate(dry: bool) -> dict[str, Callable[[], Any]]:
    """Returns what measures each model, see `_times`. dry: tiny models."""
    has_fairseq = find_spec("fairseq") is not None
    return {name: partial(_times, name, dry) for name, case in MODELS.items() if case is not None or has_fairseq}


def profile(dry: bool) -> dict[str, Callable[[], Any]]:
    """Returns what lists the kernels of a captured step for two models, see `_profile`."""
    return {name: partial(_profile, name, dry) for name in PROFILED}


def _call_of(name: str, dry: bool) -> Generate:
    case = MODELS[name]
    return _generate_fairseq(dry) if case is None else _generate(case, dry)


def _generate(case: Model, dry: bool) -> Generate:
    torch.manual_seed(0)
    sizes = {"vocab_size": 600, **TINY[case.kind]} if dry else {}
    config = getattr(transformers, f"{case.kind}Config")(**case.config | sizes)
    inputs, length = (min(2, case.shape[0]), 12) if dry else case.shape
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if dry else case.dtype)  # 32 layers of Llama-8B in fp32 take a minute more
    try:
        with torch.device("cpu" if dry else "cuda"):
            model = getattr(transformers, CLASSES[case.kind])(config).eval().cuda()
    finally:
        torch.set_default_dtype(default)
    if case.kind == "Whisper":
        prompts = {"input_features": torch.randn(inputs, config.num_mel_bins, length).to(model.dtype).cuda()}
    else:
        prompts = {"input_ids": torch.randint(10, config.vocab_size, (inputs, length)).cuda()}
        prompts["attention_mask"] = torch.ones_like(prompts["input_ids"])
    arguments = dict(case.arguments)
    if case.ends:
        arguments["eos_token_id"] = [*range(10, 10 + (12 if dry else case.ends))]
    if case.outputs:
        outputs = torch.randint(10, config.vocab_size, (200 if dry else case.outputs, case.new_tokens))
        arguments["prefix_allowed_tokens_fn"] = fastgen.PrefixTrie(outputs).after(length)

    def call(new_tokens: int, **more: Any) -> Tensor:
        least = {} if case.ends else {"min_new_tokens": new_tokens}
        generated = model.generate(**prompts, max_new_tokens=new_tokens, **least, **arguments, **more)
        return generated[:, 1 if config.is_encoder_decoder else length :]

    return call


def _generate_fairseq(dry: bool) -> Generate:
    """Returns a call of a Transformer; the modules are those of the tests, in tests/helpers."""
    from fairseq.tasks.translation import TranslationConfig, TranslationTask
    from fairseq.utils import move_to_cuda
    from fairseq_generation import generate
    from fairseq_models import Case, build, dictionary, source_sample

    words, inputs = (40, 2) if dry else (32_000, 64)
    task = TranslationTask(TranslationConfig(), dictionary(words), dictionary(words))
    model = build("transformer", task, 53, 5.0, **{} if dry else FAIRSEQ_SIZE)
    model = model.cuda() if dry else model.half().cuda()
    lengths = [8 + index * 7 % 32 for index in range(inputs)]
    case = Case([model], task, move_to_cuda(source_sample(task, lengths)))

    def call(new_tokens: int, **more: Any) -> Tensor:
        sentences = generate(case, beam=4, max_len_a=0, max_len_b=new_tokens, **more)
        tokens = [hypotheses[0]["tokens"] for hypotheses in sentences]
        return torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)

    return call


def _times(name: str, dry: bool) -> dict[str, dict[str, float]]:
    """Returns seconds of a first and a later call and milliseconds of a step in each way, and the tokens as in stock.

    equal_tokens: the part of the tokens that are those of stock. replayed: the steps that a call replays. peak_mb: what
    a call adds at most.
    """
    generate, case = _call_of(name, dry), MODELS[name]
    many = MANY if case is None else case.new_tokens
    many, few = min(many, DRY_MANY) if dry else many, min(FEW, many // 2)
    ways = [way for way in WAYS if way != COMPILED or (case is not None and case.compiles and not dry)]
    first = {way: _timed(generate, way, many)[0] for way in ways}
    turns = [{way: (_timed(generate, way, few), _timed(generate, way, many)) for way in ways} for _ in range(TURNS)]
    results = {}
    stock = turns[-1][STOCK][1][1]
    for way in ways:
        short, long = (statistics.median(turn[way][index][0] for turn in turns) for index in (0, 1))
        _, tokens, replayed, peak = turns[-1][way][1]
        equal = (tokens == stock).float().mean().item() if tokens.shape == stock.shape else 0.0
        step = (long - short) / (many - few) * 1e3
        results[way] = {"first_s": first[way], "s": long, "ms_per_step": step, "equal_tokens": equal}
        results[way] |= {"replayed": replayed, "peak_mb": peak}
    return results


def _timed(generate: Generate, way: str, new_tokens: int) -> tuple[float, Tensor, int, float]:
    """Returns the seconds of a call, its tokens, how many steps it replayed, and the megabytes that it added."""
    settings, arguments = WAYS[way]
    torch.manual_seed(3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, begun = torch.cuda.memory_allocated(), time.perf_counter()
    with _with(settings):
        tokens = generate(new_tokens, **arguments)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    return seconds, tokens, 0 if settings is None else fastgen.explain().replays, peak


@contextmanager
def _with(settings: dict[str, Any] | None) -> Iterator[None]:
    with fastgen.disabled() if settings is None else configured(**settings):
        yield


def _profile(name: str, dry: bool) -> dict[str, Any]:
    """Returns for each kernel of a captured step how often it runs, and its microseconds; the longest first.

    The difference of two later calls, one of ten more tokens: prefill and eager steps are in both.
    """
    generate = _call_of(name, dry)
    short, long = 16, 26

    def kernels(new_tokens: int) -> dict[str, tuple[float, float]]:
        activity = torch.profiler.ProfilerActivity
        activities = [activity.CPU] if dry else [activity.CUDA]
        with _with(WAYS[FASTGEN][0]), torch.profiler.profile(activities=activities) as profiled:
            generate(new_tokens)
            torch.cuda.synchronize()
        of = "self_cpu_time_total" if dry else "self_device_time_total"
        return {event.key: (event.count, getattr(event, of)) for event in profiled.key_averages()}

    for new_tokens in (long, long):  # captures, and loads kernels
        with _with(WAYS[FASTGEN][0]):
            generate(new_tokens)
    fewer, more = kernels(short), kernels(long)
    steps = long - short
    rows = {}
    for kernel, (count, us) in more.items():
        count_before, us_before = fewer.get(kernel, (0, 0.0))
        if us > us_before:
            rows[kernel[:80]] = {"of_a_step": (count - count_before) / steps, "us": (us - us_before) / steps}
    longest = sorted(rows.items(), key=lambda row: -row[1]["us"])[:MOST_KERNELS]
    return {"us_of_a_step": sum(row["us"] for row in rows.values()), **dict(longest)}
