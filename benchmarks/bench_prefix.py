"""Prompts that begin alike: a system prompt, few-shot examples or an instruction before each input of a batch.

    python benchmarks/bench_prefix.py [CASE ...] [--repeats 3] [--floors FILE] [--json FILE]

| case | what it is |
|---|---|
| greedy16 | Llama-like, 16 inputs with a prefix of 1,024 tokens and 32 of their own, 16 new ones |
| beams8, samples8 | 8 such inputs, with 4 beams or samples each |
| classify16 | GPT-2 small, 16 inputs with a prefix of 768 and 32 tokens of their own, one new one |
| short2 | Llama-like, 2 inputs with a prefix of 16 |
| ragged16 | GPT-2 small, 4 prompts of 512 tokens, no prefix, 16 samples each, of 1 to 64 tokens: one in 41 ends |

transformers and fastgen run in turns, directly after each other, from one seed; seconds are medians, ratios medians
of those of a turn. Memory is what a call adds at its peak. --floors takes a file of the ratios to reach
(floors.json); the status is 1 where one is missed, or where tokens differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from generate_cases import Inputs, gpt2_small, llama_like
from harness import measure, run


class Prefixed(NamedTuple):
    """A model, and prompts of `inputs` inputs: `prefix` common tokens, `rest` of their own."""

    model: Callable[[], tuple[torch.nn.Module, Inputs]]
    inputs: int
    prefix: int
    rest: int
    new_tokens: int
    options: dict[str, Any]

    def call(self) -> Callable[[], torch.Tensor]:
        """A function that generates."""
        torch.manual_seed(0)
        model = self.model()[0].eval()
        vocabulary = model.config.vocab_size
        prefix = torch.randint(10, vocabulary, (1, self.prefix)).expand(self.inputs, -1)
        input_ids = torch.cat([prefix, torch.randint(10, vocabulary, (self.inputs, self.rest))], dim=1)
        arguments = {"max_new_tokens": self.new_tokens, "eos_token_id": None, **self.options}

        def generate() -> torch.Tensor:
            torch.manual_seed(1)
            return model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **arguments)

        return generate


GREEDY: dict[str, Any] = {"do_sample": False}
ENDS = list(range(10, 50257, 41))
CASES = {
    "greedy16": Prefixed(llama_like, 16, 1024, 32, 16, GREEDY),
    "beams8": Prefixed(llama_like, 8, 1024, 32, 16, {"num_beams": 4, "do_sample": False}),
    "samples8": Prefixed(llama_like, 8, 1024, 32, 16, {"num_return_sequences": 4, "do_sample": True}),
    "classify16": Prefixed(gpt2_small, 16, 768, 32, 1, GREEDY),
    "ragged16": Prefixed(
        gpt2_small, 4, 0, 512, 64, {"num_return_sequences": 16, "do_sample": True, "top_k": 0, "eos_token_id": ENDS}
    ),
    "short2": Prefixed(llama_like, 2, 16, 32, 16, GREEDY),
}


def measured(name: str, repeats: int) -> dict[str, Any]:
    return measure(name, CASES[name].call(), repeats)


def main(argv: list[str] | None = None) -> int:
    return run(__doc__, "prefix", CASES, measured, argv)


if __name__ == "__main__":
    raise SystemExit(main())
