"""The generation of one step of reinforcement learning (GRPO): every prompt stands in G equal rows, in training mode.

    python benchmarks/bench_rollouts.py [g8] [g16] [--repeats 3] [--floors FILE] [--json FILE]

Four prompts of 512 tokens, 32 new ones, sampled, on the Llama-like model of bench_generate.py with random weights.
transformers and fastgen run in turns, directly after each other, from the same seed; seconds are medians, ratios
medians of those of a turn. Before each turn all weights are changed, as training does. Memory is what a call adds at
its peak. --floors takes a file of the ratios to reach (floors_rollouts.json); the status is 1 where one is missed, or
where tokens differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
from floors import below, case_parser, parse_cases
from generate_cases import llama_like
from machine import cpu, print_head
from memory import added_mb

import fastgen

CASES = {"g8": 8, "g16": 16}
PROMPTS, LENGTH, NEW_TOKENS = 4, 512, 32


class Rollout:
    """One step's generation; tokens: of the last call of each way."""

    def __init__(self, samples: int) -> None:
        torch.manual_seed(0)
        self.model = llama_like()[0].train()
        prompts = torch.randint(10, self.model.config.vocab_size, (PROMPTS, LENGTH))
        self.input_ids = prompts.repeat_interleave(samples, dim=0)
        self.tokens: dict[str, torch.Tensor] = {}

    def generate(self, way: str) -> None:
        torch.manual_seed(1)
        mask = torch.ones_like(self.input_ids)
        with fastgen.disabled() if way == "stock" else nullcontext():
            self.tokens[way] = self.model.generate(
                self.input_ids, attention_mask=mask, do_sample=True, max_new_tokens=NEW_TOKENS, eos_token_id=None
            )

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.999)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Median seconds of each way, the median ratio, added megabytes, and whether tokens are equal."""
    rollout = Rollout(CASES[name])
    added = {way: added_mb(lambda way=way: rollout.generate(way), "cpu") for way in ("fastgen", "stock")}
    seconds: dict[str, list[float]] = {"stock": [], "fastgen": []}
    equal = True
    for turn in range(repeats):
        rollout.train()
        for way in seconds if turn % 2 else reversed(seconds):
            begun = time.perf_counter()
            rollout.generate(way)
            seconds[way].append(time.perf_counter() - begun)
        equal = equal and torch.equal(rollout.tokens["stock"], rollout.tokens["fastgen"])
    ratio = statistics.median(stock / ours for stock, ours in zip(*seconds.values()))
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    return {"case": name, "seconds": medians, "ratio": ratio, "added_mb": added, "equal": equal}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = case_parser(__doc__, CASES, "floors_rollouts.json")
    parser.add_argument("--json", metavar="FILE", help="write the results here, too")
    return parse_cases(parser, argv, CASES)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print_head()
    results, status = [], 0
    for name in args.cases or CASES:
        result = measure(name, args.repeats)
        results.append(result)
        seconds, added = result["seconds"], result["added_mb"]
        print(
            f"{name}: transformers {seconds['stock']:.2f} s, fastgen {seconds['fastgen']:.2f} s, "
            f"{result['ratio']:.2f} times as fast, {added['stock']:.0f} and {added['fastgen']:.0f} MB",
            flush=True,
        )
        ratios = {"stock": result["ratio"], "memory": added["stock"] / max(added["fastgen"], 1)}
        missed = below(name, ratios, args.floors) + ([] if result["equal"] else [f"{name}: tokens differ"])
        print("\n".join(missed), end="\n" * bool(missed))
        status = status or bool(missed)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"cpu": cpu(), "results": results}, file, indent=1)
            file.write("\n")
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
