"""UniLM base, 448 source tokens, 5 beams: how many times as fast as the same model with its beams replicated.

    python benchmarks/bench_unilm.py [--layers 12] [--batch 4] [--repeats 3] [--floors FILE] [--json FILE]

Random weights. "Stock" is the same model under transformers' own `generate` (`fastgen.disabled()`), which repeats each
source for each beam. Each turn runs both directly after each other, the order alternates; the ratio is the median of
those of the turns. The status is 1 where it is below its floor, or where the tokens differ.
"""

from __future__ import annotations

from functools import partial

import torch
from harness import compare, finish, missed_by, parse_flags, parser_of, summary, with_and_without
from machine import print_head

from fastgen.models.unilm import UniLMConfig, UniLMForConditionalGeneration

CASE = "unilm"


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=12, help="of width 768 (default 12)")
    parser.add_argument("--batch", type=int, default=4, help="sources (default 4)")
    parser.add_argument("--source", type=int, default=448, help="tokens of each source (default 448)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to generate (default 32)")
    parser.add_argument("--beams", type=int, default=5, help="beams (default 5)")
    args = parse_flags(parser, argv, "unilm", [CASE])
    print_head()
    torch.manual_seed(0)
    config = UniLMConfig(num_hidden_layers=args.layers)
    model = UniLMForConditionalGeneration(config).eval()
    sources = torch.randint(1000, config.vocab_size, (args.batch, args.source))
    generate = partial(model.generate, sources, num_beams=args.beams, max_new_tokens=args.new_tokens, eos_token_id=None)
    result = compare(CASE, with_and_without(generate), args.repeats)
    print(f"{args.layers} layers, {args.batch} sources of {args.source} tokens, {args.beams} beams")
    print(summary(result))
    return finish(args, [result], missed_by(result, args.floors), arguments=vars(args))


if __name__ == "__main__":
    raise SystemExit(main())
