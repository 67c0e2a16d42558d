"""The generation of one step of reinforcement learning (GRPO): every prompt stands in G equal rows, in training mode.

    python benchmarks/bench_rollouts.py [g8] [g16] [--repeats 3] [--floors FILE] [--json FILE]

Four prompts of 512 tokens, 32 new ones, sampled, on the Llama-like model of bench_generate.py with random weights.
transformers and fastgen run in turns, directly after each other, from the same seed; seconds are medians, ratios
medians of those of a turn. After each turn all weights are changed, as training does. Memory is what a call adds at
its peak. --floors takes a file of the ratios to reach (floors_rollouts.json); the status is 1 where one is missed, or
where tokens differ.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from clock import in_turns, medians, times_as_fast
from floors import below, case_parser, parse_cases
from generate_cases import llama_like
from machine import cpu, print_head
from memory import added_mb

import fastgen

CASES = {"g8": 8, "g16": 16}
PROMPTS, LENGTH, NEW_TOKENS = 4, 512, 32


class Rollout:
    """One step's generation."""

    def __init__(self, samples: int) -> None:
        torch.manual_seed(0)
        self.model = llama_like()[0].train()
        prompts = torch.randint(10, self.model.config.vocab_size, (PROMPTS, LENGTH))
        self.input_ids = prompts.repeat_interleave(samples, dim=0)

    def generate(self) -> torch.Tensor:
        torch.manual_seed(1)
        mask = torch.ones_like(self.input_ids)
        return self.model.generate(
            self.input_ids, attention_mask=mask, do_sample=True, max_new_tokens=NEW_TOKENS, eos_token_id=None
        )

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.999)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Median seconds of each way, the median ratio, added megabytes, and whether tokens are equal."""
    rollout = Rollout(CASES[name])
    ways = {"fastgen": rollout.generate, "stock": fastgen.disabled()(rollout.generate)}
    added = {way: added_mb(call, "cpu") for way, call in ways.items()}
    turns, equal = [], True
    for seconds, tokens in in_turns(ways, repeats):
        turns.append(seconds)
        equal = equal and torch.equal(tokens["stock"], tokens["fastgen"])
        rollout.train()
    ratio = times_as_fast(turns)
    return {"case": name, "seconds": medians(turns), "ratio": ratio, "added_mb": added, "equal": equal}


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
