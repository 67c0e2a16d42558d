"""Small calls, where there is little to gain: is any of them slower with fastgen?

    python benchmarks/bench_small.py [--shapes 200] [--seed 0] [--only MODEL] [--dtype TYPE] [--verbose] [--floors FILE]

Random shapes of 1 to 8 inputs, 4 to 64 tokens and 1 to 16 new ones, on models from two layers of 64 to GPT-2 small, in
float32; where the CPU has instructions for bfloat16, every eighth shape in that.
Stock and fastgen alternate in one process, on one thread; what counts is CPU time, and of each shape the median of the
ratios of neighbours. A shape below the floor is measured again, longer. --floors takes a file of the ratio that the
slowest shape has to reach (floors.json; without it FLOOR); the status is 1 where one stays below that of the file.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import below, finish, parse_flags, parser_of
from machine import print_head
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import fastgen

VOCABULARY = 1000
SECONDS_PER_SHAPE = 1.0
MIN_PAIRS = 9
FLOOR = 0.97
CASE = "slowest"


def llama(layers: int, width: int, vocabulary: int = VOCABULARY) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * width,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def gpt2(layers: int, width: int, heads: int, vocabulary: int = VOCABULARY) -> torch.nn.Module:
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=256, **special)
    )


def t5(layers: int, width: int) -> torch.nn.Module:
    sizes = {"d_model": width, "d_ff": 2 * width, "d_kv": 16, "num_heads": 4, "num_layers": layers}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def bart(layers: int, width: int) -> torch.nn.Module:
    ends = ("encoder", "decoder")
    sizes = {f"{end}_{name}": size for end in ends for name, size in (("layers", layers), ("ffn_dim", 2 * width))}
    heads = {f"{end}_attention_heads": 4 for end in ends}
    config = BartConfig(vocab_size=VOCABULARY, d_model=width, forced_eos_token_id=None, **sizes, **heads)
    return BartForConditionalGeneration(config)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama-24x64": lambda: llama(24, 64),
    "llama-2x64": lambda: llama(2, 64),
    "llama-8x256": lambda: llama(8, 256, 8000),
    "gpt2-2x64": lambda: gpt2(2, 64, 4),
    "gpt2-6x256": lambda: gpt2(6, 256, 4, 8000),
    "gpt2-small": lambda: gpt2(12, 768, 12, 50257),
    "t5-2x64": lambda: t5(2, 64),
    "t5-6x256": lambda: t5(6, 256),
    "bart-2x64": lambda: bart(2, 64),
    "bart-6x256": lambda: bart(6, 256),
}

OPTIONS: dict[str, dict] = {
    "greedy": {},
    "greedy, n-grams": {"no_repeat_ngram_size": 3},
    "2 beams": {"num_beams": 2},
    "4 beams": {"num_beams": 4},
    "4 beams, n-grams": {"num_beams": 4, "no_repeat_ngram_size": 3},
    "4 samples": {"do_sample": True, "num_return_sequences": 4},
    "equal rows": {},
}


@dataclass(frozen=True)
class Shape:
    """One call: `inputs` prompts of `length` tokens, `new_tokens` of which are generated; all rows may be equal."""

    model: str
    option: str
    inputs: int
    length: int
    new_tokens: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.model}, {self.option}, {self.inputs} x {self.length} tokens, {self.new_tokens} new, {self.dtype}"

    def call(self) -> Callable[[], torch.Tensor]:
        model = _model(self.model, self.dtype)
        generator = torch.Generator().manual_seed(self.length)
        input_ids = torch.randint(5, VOCABULARY, (self.inputs, self.length), generator=generator)
        if self.option == "equal rows":
            input_ids = input_ids[:1].expand(self.inputs, -1).contiguous()
        # Random weights: every call generates as many tokens as it may.
        arguments = {"do_sample": False, "max_new_tokens": self.new_tokens, "eos_token_id": None}
        return functools.partial(model.generate, input_ids, **arguments | OPTIONS[self.option])


@functools.cache
def _model(name: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).eval()


def random_shape(choice: random.Random, models: list[str], dtype: torch.dtype) -> Shape:
    inputs = choice.randint(1, 8)
    option = choice.choice([name for name in OPTIONS if inputs > 1 or name != "equal rows"])
    return Shape(choice.choice(models), option, inputs, choice.randint(4, 64), choice.choice([1, 1, 4, 8, 16]), dtype)


def ratio(shape: Shape, seconds: float) -> float:
    """Median of stock's CPU time over fastgen's; 1.1 means that fastgen takes a tenth less than stock."""
    call = shape.call()

    def once() -> float:
        torch.manual_seed(0)
        start = time.process_time()
        call()
        return time.process_time() - start

    def stock() -> float:
        with fastgen.disabled():
            return once()

    once(), stock()  # warms both up
    ratios: list[float] = []
    end = time.process_time() + seconds
    while len(ratios) < MIN_PAIRS or time.process_time() < end:
        if len(ratios) % 2:
            of_fastgen, of_stock = once(), stock()
        else:
            of_stock, of_fastgen = stock(), once()
        ratios.append(of_stock / of_fastgen)
    return statistics.median(ratios)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, repeats=None)
    parser.add_argument("--shapes", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of shapes (default 0)")
    parser.add_argument("--only", metavar="MODEL", action="append", choices=MODELS, help="may be repeated")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of all shapes")
    parser.add_argument("--verbose", action="store_true", help="print every shape, and what fastgen did")
    args = parse_flags(parser, argv, "small", (), [CASE])
    print_head()
    torch.set_num_threads(1)
    floor = args.floors.get(CASE, {}).get("stock", FLOOR)
    choice = random.Random(args.seed)
    types = [torch.float32] * 7 + [torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32]
    if args.dtype:
        types = [getattr(torch, args.dtype)]
    results = []
    for number in range(args.shapes):
        shape = random_shape(choice, args.only or list(MODELS), types[number % len(types)])
        found = ratio(shape, SECONDS_PER_SHAPE)
        if found < floor:
            found = ratio(shape, 5 * SECONDS_PER_SHAPE)
        results.append({"case": str(shape), "ratio": found})
        if args.verbose or found < floor:
            print(f"{found:.3f}  {shape}" + (f"\n{fastgen.explain()}" if args.verbose else ""), flush=True)
    ratios = [result["ratio"] for result in results]
    print(
        f"{len(ratios)} shapes: lowest {min(ratios):.3f}, median {statistics.median(ratios):.3f}, "
        f"highest {max(ratios):.3f}; {sum(found < floor for found in ratios)} below {floor}"
    )
    return finish(args, results, below(CASE, {"stock": min(ratios)}, args.floors))


if __name__ == "__main__":
    raise SystemExit(main())
