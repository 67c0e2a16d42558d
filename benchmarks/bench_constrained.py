"""Wide beams over a closed set of outputs: transformers with a trie of dictionaries, fastgen with its `PrefixTrie`.

    python benchmarks/bench_constrained.py [CASE ...] [--repeats 3] [--cpu_time] [--floors FILE] [--json FILE]

Random weights of real size, one input, 100,000 outputs. `ids`: a Qwen-like model (8 layers, width 768, 12 and 3 heads,
vocabulary 151,936), a prompt of 300 tokens, semantic ids of 4 tokens with 256 codes each. `names`: a T5-base shape, an
input of 256 tokens, names of 3 to 12 tokens, the first tokens of which are often the same, and an end token.

Both run in turns, directly after each other, and return all beams; seconds and memory are medians, ratios medians of
those of a turn. Memory is what a call adds to the process at its peak. The first turn warms up, and compares: scores
have to agree to 1e-4; tokens are counted, because among hundreds of beams some differ by less than rounding. --floors
takes a file of the ratios to reach (`stock`: times as fast, `memory`: times less memory); the status is 1 where one is
missed, or where scores differ. --cpu_time counts the seconds of the process, for a busy machine and one thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from harness import below, finish, parse_flags, parser_of
from machine import print_head
from memory import PeakMemory
from show_results import constrained_table
from transformers import Qwen2Config, Qwen2ForCausalLM, T5Config, T5ForConditionalGeneration

import fastgen
from fastgen.optimizer.transformers.call import SEQUENCES_SCORES, only_outputs

SIZES: dict[str, int] = {}  # other than those of the models
OUTPUTS, CODES, PLACES = 100_000, 256, 4
PROMPT, TEXT = 300, 256  # tokens
SHORTEST, LONGEST, END = 3, 12, 1
Ways = dict[str, tuple[Callable[[], AbstractContextManager], Callable]]


class Ids:
    """A language model that generates semantic ids."""

    def __init__(self) -> None:
        sizes = {"vocab_size": 151_936, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}
        heads = {"num_attention_heads": 12, "num_key_value_heads": 3, "tie_word_embeddings": True}
        self.model = Qwen2ForCausalLM(Qwen2Config(**sizes | heads | SIZES)).eval()
        vocabulary = self.model.config.vocab_size
        self.input_ids = torch.randint(5, vocabulary - PLACES * CODES, (1, PROMPT))
        self.ignored, self.at_dead_ends = PROMPT, []
        self.arguments = {"max_new_tokens": PLACES, "eos_token_id": None, "pad_token_id": 0}
        first = vocabulary - PLACES * CODES
        numbers = random.Random(0)
        self.outputs = [
            [first + place * CODES + numbers.randrange(CODES) for place in range(PLACES)] for _ in range(OUTPUTS)
        ]


class Names:
    """An encoder-decoder that generates names."""

    def __init__(self) -> None:
        sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32_128}
        self.model = T5ForConditionalGeneration(T5Config(**sizes | SIZES, decoder_start_token_id=0)).eval()
        vocabulary = self.model.config.vocab_size
        self.input_ids = torch.randint(10, vocabulary, (1, TEXT))
        self.ignored, self.at_dead_ends = 1, [END]
        self.arguments = {"max_new_tokens": LONGEST + 1, "eos_token_id": END, "pad_token_id": 0}
        numbers = random.Random(0)
        self.outputs = [
            [10 + int((vocabulary - 10) * numbers.random() ** 3) for _ in range(numbers.randint(SHORTEST, LONGEST))]
            + [END]
            for _ in range(OUTPUTS)
        ]


CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "ids-beam20": (Ids, 20),
    "ids-beam50": (Ids, 50),
    "ids-beam200": (Ids, 200),
    "names-beam10": (Names, 10),
    "names-beam50": (Names, 50),
}


def by_dictionaries(task: Any) -> Callable[[int, torch.Tensor], list[int]]:
    """What programs give transformers."""
    root: dict = {}
    for output in task.outputs:
        node = root
        for token in output:
            node = node.setdefault(token, {})

    def allowed(batch_id: int, input_ids: torch.Tensor) -> list[int]:
        node = root
        for token in input_ids.tolist()[task.ignored :]:
            node = node.get(token, {})
        return list(node) or task.at_dead_ends

    return allowed


@dataclasses.dataclass
class Result:
    """Medians of one case. ratios: times as fast as stock, and times less memory; tokens: rows equal to stock's."""

    case: str
    seconds: dict[str, float]
    added_mb: dict[str, float]
    turns: dict[str, list[float]]
    ratios: dict[str, float]
    tokens: str
    equal: bool


def scored(task: Any, beams: int, ways: Ways) -> tuple[str, bool]:
    """How many rows of tokens are equal in both ways, and whether scores are, to 1e-4."""
    found = []
    for context, function in ways.values():
        with context(), only_outputs(SEQUENCES_SCORES):
            found.append(generate(task, beams, function, return_dict_in_generate=True, output_scores=True))
    stock, fast = found
    same = (stock.sequences == fast.sequences).all(dim=1).sum() if stock.sequences.shape == fast.sequences.shape else 0
    equal = torch.allclose(stock.sequences_scores, fast.sequences_scores, rtol=0, atol=1e-4)
    return f"{int(same)} of {beams}", equal


def generate(task: Any, beams: int, function: Callable, **more: Any) -> Any:
    arguments = {"num_beams": beams, "num_return_sequences": beams, "do_sample": False, **task.arguments, **more}
    return task.model.generate(task.input_ids, prefix_allowed_tokens_fn=function, **arguments)


def measure(name: str, repeats: int, clock: Callable[[], float]) -> Result:
    torch.manual_seed(0)
    make, beams = CASES[name]
    task = make()
    trie = fastgen.PrefixTrie(task.outputs, task.at_dead_ends).after(task.ignored)
    ways: Ways = {"stock": (fastgen.disabled, by_dictionaries(task)), "fastgen": (nullcontext, trie)}
    tokens, equal = scored(task, beams, ways)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    added: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats):
        for way, (context, function) in list(ways.items())[:: -1 if turn % 2 else 1]:
            gives_back_memory()
            with context(), PeakMemory("cpu") as memory:
                begun = clock()
                generate(task, beams, function)
                seconds[way].append(clock() - begun)
            added[way].append(max(memory.added / 1e6, 1.0))
    medians = [{way: statistics.median(values) for way, values in each.items()} for each in (seconds, added)]
    names = {"stock": seconds, "memory": added}
    ratios = {
        ratio: statistics.median(one / other for one, other in zip(of["stock"], of["fastgen"], strict=True))
        for ratio, of in names.items()
    }
    return Result(name, *medians, seconds, ratios, tokens, equal)


def gives_back_memory() -> None:
    """To the system, so that what the next call adds is seen."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--cpu_time", action="store_true", help="seconds of the CPU, not of the clock")
    args = parse_flags(parser, argv, "constrained", CASES)
    print_head()
    clock, results = time.process_time if args.cpu_time else time.perf_counter, []
    for name in args.cases:
        results.append(measure(name, args.repeats, clock))
        print(constrained_table([dataclasses.asdict(results[-1])]).splitlines()[-1], flush=True)
    missed = [sentence for result in results for sentence in below(result.case, result.ratios, args.floors)]
    missed += [f"{result.case}: scores differ" for result in results if not result.equal]
    told = [dataclasses.asdict(result) for result in results]
    return finish(args, told, missed, repeats=args.repeats, cpu_time=args.cpu_time)


if __name__ == "__main__":
    raise SystemExit(main())
