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

from functools import partial
from typing import Any

import torch
from harness import compare, finish, missed_by, parse_flags, parser_of, summary
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


def measure(model: Any, name: str, repeats: int) -> dict[str, Any]:
    input_ids = torch.randint(5, model.config.vocab_size, (INPUTS, LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    generate = partial(model.generate, input_ids, do_sample=False, **lengths, **CASES[name])
    ways = {"fastgen": generate, "stock": fastgen.disabled()(partial(generate, use_cache=name != "beam"))}
    return compare(name, ways, repeats, torch.equal if name != "beam" else lambda *_: True)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of encoder and decoder (default {LAYERS})")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the model (default {WIDTH})")
    args = parse_flags(parser, argv, "prophetnet", CASES)
    print_head()
    model, results, missed = make(args.layers, args.width), [], []
    for name in args.cases:
        result = measure(model, name, args.repeats)
        results.append(result)
        print(summary(result), flush=True)
        missed += missed_by(result, args.floors)
    return finish(args, results, missed)


if __name__ == "__main__":
    raise SystemExit(main())
