"""UniLM base, 448 source tokens, 5 beams: how many times as fast as the same model with its beams replicated.

    python benchmarks/bench_unilm.py [--layers 12] [--batch 4] [--repeats 3] [--floor 5] [--json FILE]

Random weights. "Stock" is the same model under transformers' own `generate` (`fastgen.disabled()`), which repeats each
source for each beam. Each turn runs both directly after each other, the order alternates; the ratio is the median of
those of the turns. The status is 1 where it is below --floor, or where the tokens differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext

import torch
from machine import cpu, print_head

import fastgen
from fastgen.models.unilm import UniLMConfig, UniLMForConditionalGeneration

STOCK, FASTGEN = "stock", "fastgen"


class Comparison:
    """One model and its inputs; `seconds_of` runs a way once."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = UniLMConfig(num_hidden_layers=args.layers)
        self.model = UniLMForConditionalGeneration(config).eval()
        self.input_ids = torch.randint(1000, config.vocab_size, (args.batch, args.source))
        self.arguments = {"num_beams": args.beams, "max_new_tokens": args.new_tokens, "eos_token_id": None}
        self.outputs: dict[str, torch.Tensor] = {}

    def seconds_of(self, way: str) -> float:
        context: AbstractContextManager = fastgen.disabled() if way == STOCK else nullcontext()
        start = time.perf_counter()
        with context:
            self.outputs[way] = self.model.generate(self.input_ids, **self.arguments)
        return time.perf_counter() - start

    def run(self, repeats: int) -> list[dict[str, float]]:
        """Seconds of both ways in each turn, after one that warms both up."""
        turns = []
        for turn in range(repeats + 1):
            ways = (STOCK, FASTGEN) if turn % 2 else (FASTGEN, STOCK)
            turns.append({way: self.seconds_of(way) for way in ways})
        return turns[1:]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of width 768 (default 12)")
    parser.add_argument("--batch", type=int, default=4, help="sources (default 4)")
    parser.add_argument("--source", type=int, default=448, help="tokens of each source (default 448)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to generate (default 32)")
    parser.add_argument("--beams", type=int, default=5, help="beams (default 5)")
    parser.add_argument("--repeats", type=int, default=3, help="turns (default 3)")
    parser.add_argument("--floor", type=float, default=0.0, metavar="RATIO", help="the ratio to reach")
    parser.add_argument("--json", metavar="FILE", help="also write the result here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print_head()
    comparison = Comparison(args)
    turns = comparison.run(args.repeats)
    equal = torch.equal(comparison.outputs[STOCK], comparison.outputs[FASTGEN])
    seconds = {way: statistics.median(turn[way] for turn in turns) for way in (STOCK, FASTGEN)}
    ratio = statistics.median(turn[STOCK] / turn[FASTGEN] for turn in turns)
    print(f"{args.layers} layers, {args.batch} sources of {args.source} tokens, {args.beams} beams")
    print(f"stock {seconds[STOCK]:.2f} s, fastgen {seconds[FASTGEN]:.2f} s: {ratio:.2f} times as fast")
    if args.json:
        result = {"arguments": vars(args), "seconds": seconds, "ratio": ratio, "equal": equal}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"cpu": cpu(), "results": [result]}, file, indent=1)
    if not equal:
        print("the tokens differ")
    if ratio < args.floor:
        print(f"{ratio:.2f} times as fast as stock, below the floor of {args.floor:.2f}")
    return 0 if equal and ratio >= args.floor else 1


if __name__ == "__main__":
    raise SystemExit(main())
