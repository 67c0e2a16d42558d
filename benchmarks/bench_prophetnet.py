"""ProphetNet (12 + 12 layers of width 1024, random weights): fastgen with its cache against transformers.

    python benchmarks/bench_prophetnet.py [beam] [greedy] [--repeats 3] [--layers 12] [--floors FILE]

Two inputs of 256 tokens each, 32 new tokens. `beam` has 5 beams; transformers runs without its cache, with which it
raises for most padding tokens, and computes all positions again at every step. In `greedy` it runs with its cache,
which works there because the padding token is the first of the vocabulary.

Both run in turns, directly after each other; seconds are medians, ratios medians of those of a turn. --floors takes a
file of the ratios to reach; the status is 1 where one is missed, or where tokens differ in `greedy`. In `beam` tokens
are not compared: without its cache transformers mixes up positions in the predict streams (docs/models.md).
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from clock import in_turns, medians, times_as_fast
from floors import below, case_parser, parse_cases
from machine import print_head
from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

import fastgen

CASES: dict[str, dict[str, Any]] = {"beam": {"num_beams": 5}, "greedy": {"num_beams": 1}}
INPUTS, LENGTH, NEW_TOKENS, WIDTH, LAYERS = 2, 256, 32, 1024, 12


def make(layers: int, width: int) -> ProphetNetForConditionalGeneration:
    """The sizes of `prophetnet-large-uncased` where layers and width are the defaults."""
    config = ProphetNetConfig(
        hidden_size=width,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
    )
    torch.manual_seed(0)
    return ProphetNetForConditionalGeneration(config).eval()


def measure(model: Any, name: str, repeats: int) -> tuple[float, float, float, bool]:
    """Median seconds of transformers and of fastgen, the median ratio, and whether tokens are as they should be."""
    input_ids = torch.randint(5, model.config.vocab_size, (INPUTS, LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    generate = partial(model.generate, input_ids, do_sample=False, **lengths, **CASES[name])
    ways = {"fastgen": generate, "stock": fastgen.disabled()(partial(generate, use_cache=name != "beam"))}
    turns, equal = [], True
    for seconds, tokens in in_turns(ways, repeats + 1):
        turns.append(seconds)
        equal &= name == "beam" or torch.equal(tokens["stock"], tokens["fastgen"])
    turns = turns[1:]  # the first warms up
    found = medians(turns)
    return found["stock"], found["fastgen"], times_as_fast(turns), equal


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = case_parser(__doc__, CASES, "floors_prophetnet.json")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of encoder and decoder (default {LAYERS})")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the model (default {WIDTH})")
    return parse_cases(parser, argv, CASES)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print_head()
    model, status = make(args.layers, args.width), 0
    for name in args.cases or CASES:
        stock, ours, ratio, equal = measure(model, name, args.repeats)
        print(f"{name}: transformers {stock:.2f} s, fastgen {ours:.2f} s, {ratio:.2f} times as fast", flush=True)
        missed = below(name, {"stock": ratio}, args.floors) + ([] if equal else [f"{name}: tokens differ"])
        print("\n".join(missed), end="\n" * bool(missed))
        status = status or bool(missed)
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
