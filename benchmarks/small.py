"""Small calls, where there is little to gain: is any of them slower with fastgen?

Random shapes of 1 to 8 inputs, 4 to 64 tokens and 1 to 16 new ones, on models from two layers of 64 to GPT-2 small, in
float32; if the CPU has instructions for bfloat16, every eighth shape in that. Stock and fastgen alternate on one
thread; what counts is CPU time, and of each shape the median of the ratios of neighbors. A shape below the floor is
measured again, longer.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from calls import Call, Model, Work, both_ends
from measure import Options

VOCABULARY = 1000
SECONDS_PER_SHAPE, MIN_PAIRS, FLOOR = 1.0, 9, 0.97


def llama(layers: int, width: int, vocabulary: int = VOCABULARY) -> Model:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 2 * width, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocabulary}
    return Model("transformers:LlamaForCausalLM", sizes | heads)


def gpt2(layers: int, width: int, heads: int, vocabulary: int = VOCABULARY) -> Model:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary, "n_positions": 256}
    return Model("transformers:GPT2LMHeadModel", {**sizes, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})


def t5(layers: int, width: int) -> Model:
    sizes = {"d_model": width, "d_ff": 2 * width, "d_kv": 16, "num_heads": 4, "num_layers": layers}
    special = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0}
    return Model("transformers:T5ForConditionalGeneration", sizes | special)


def bart(layers: int, width: int) -> Model:
    sizes = both_ends(layers=layers, ffn_dim=2 * width, attention_heads=4)
    special = {"vocab_size": VOCABULARY, "d_model": width, "forced_eos_token_id": None}
    return Model("transformers:BartForConditionalGeneration", sizes | special)


MODELS = {
    "llama-24x64": llama(24, 64),
    "llama-2x64": llama(2, 64),
    "llama-8x256": llama(8, 256, 8000),
    "gpt2-2x64": gpt2(2, 64, 4),
    "gpt2-6x256": gpt2(6, 256, 4, 8000),
    "gpt2-small": gpt2(12, 768, 12, 50257),
    "t5-2x64": t5(2, 64),
    "t5-6x256": t5(6, 256),
    "bart-2x64": bart(2, 64),
    "bart-6x256": bart(6, 256),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, n-grams": {"no_repeat_ngram_size": 3},
    "2 beams": {"num_beams": 2},
    "4 beams": {"num_beams": 4},
    "4 beams, n-grams": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "4 samples": {"do_sample": True, "num_return_sequences": 4},
    "equal rows": {},
}


@functools.cache
def make_model(name: str, dtype: torch.dtype) -> Any:
    return MODELS[name].make().to(dtype)


def random_call(choice: random.Random) -> Call:
    """Returns a call with as many new tokens as it may have, and equal rows if that option is chosen."""
    inputs = choice.randint(1, 8)
    option = choice.choice([name for name in OPTIONS if inputs > 1 or name != "equal rows"])
    model, length, new_tokens = choice.choice(list(MODELS)), choice.randint(4, 64), choice.choice([1, 1, 4, 8, 16])
    rows, copies = (1, inputs) if option == "equal rows" else (inputs, 1)
    arguments = {"do_sample": False, "max_new_tokens": new_tokens, **OPTIONS[option]}
    return Call(model, rows, length, arguments, copies=copies)


def ratio(work: Work, seconds: float) -> tuple[float, bool]:
    """Returns the median of stock's CPU time by fastgen's, and whether outputs are equal."""
    ways, ratios, equal = work.ways(), [], True
    for way in ways.values():
        way()  # warms it up
    end = time.process_time() + seconds
    while len(ratios) < MIN_PAIRS or time.process_time() < end:
        times, outputs = {}, {}
        for way in [*ways][:: -1 if len(ratios) % 2 else 1]:
            torch.manual_seed(0)
            begun = time.process_time()
            outputs[way] = ways[way]()
            times[way] = time.process_time() - begun
        ratios.append(times["stock"] / times["fastgen"])
        equal = equal and torch.equal(outputs["stock"], outputs["fastgen"])
    return statistics.median(ratios), equal


@dataclass(frozen=True)
class Case:
    """The number of random shapes, and the seed that they are drawn from."""

    shapes: int = 200
    seed: int = 0
    workload: str = "the slowest of small calls of random shapes"


CASES = {"small": {"slowest": Case()}}


def measure(kind: str, name: str, case: Case, options: Options) -> dict[str, Any]:
    """Returns the ratio of each shape and the lowest, and prints those below the floor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    choice, shapes = random.Random(case.seed), []
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for number in range(case.shapes):
        dtype = "bfloat16" if has_bfloat16 and number % 8 == 7 else "float32"
        call, options = random_call(choice), replace(options, dtype=dtype)
        work = Work(call, options, make_model(call.model, options.torch_dtype))
        measured, equal = ratio(work, SECONDS_PER_SHAPE)
        if measured < FLOOR:
            measured, equal = ratio(work, 5 * SECONDS_PER_SHAPE)
        equal = equal or dtype == "bfloat16"  # where rounding decides
        shapes.append({"shape": f"{call}, {dtype}", "ratio": measured, "equal": equal})
        if measured < FLOOR or not equal:
            print(f"{measured:.3f}  {call}, {dtype}{', outputs differ' * (not equal)}", flush=True)
    torch.set_num_threads(threads)
    ratios = [shape["ratio"] for shape in shapes]
    below = sum(measured < FLOOR for measured in ratios)
    print(f"{len(ratios)} shapes: median {statistics.median(ratios):.3f}, {below} below {FLOOR}")
    equal = all(shape["equal"] for shape in shapes)
    return {"case": name, "ratios": {"stock": min(ratios)}, "equal": equal, "shapes": shapes}
