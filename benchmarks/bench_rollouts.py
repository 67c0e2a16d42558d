"""The generation of one step of reinforcement learning (GRPO): every prompt stands in G equal rows, in training mode.

    python benchmarks/bench_rollouts.py [g8] [g16] [--repeats 3] [--floors FILE] [--json FILE]

Four prompts of 512 tokens, 32 new ones, sampled, on the Llama-like model of bench_generate.py with random weights.
transformers and fastgen run in turns, directly after each other, from the same seed; seconds are medians, ratios
medians of those of a turn. After each turn all weights are changed, as training does. Memory is what a call adds at
its peak. --floors takes a file of the ratios to reach (floors.json); the status is 1 where one is missed, or
where tokens differ.
"""

from __future__ import annotations

from typing import Any

import torch
from generate_cases import llama_like
from harness import measure, run

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


def measured(name: str, repeats: int) -> dict[str, Any]:
    rollout = Rollout(CASES[name])
    return measure(name, rollout.generate, repeats, after=rollout.train)


def main(argv: list[str] | None = None) -> int:
    return run(__doc__, "rollouts", CASES, measured, argv)


if __name__ == "__main__":
    raise SystemExit(main())
