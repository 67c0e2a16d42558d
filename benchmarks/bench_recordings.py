"""Long recordings with Whisper's own generate: fastgen against transformers, on the shape of Whisper-tiny.

    python benchmarks/bench_recordings.py [--seconds 90] [--repeats 3] [--floors FILE] [--json FILE]

Two recordings, 5 beams, up to 48 new tokens in each window of 30 s, random weights. Both run in turns, directly after
each other; seconds are medians, the ratio is the median of those of a turn. The status is 1 where the ratio is below
its floor, or where text, segments or times differ.
"""

from __future__ import annotations

from functools import partial
from operator import eq
from typing import Any

import torch
import transformers
from generate_cases import NO_TIMESTAMPS, whisper_tiny
from harness import compare, finish, missed_by, parse_flags, parser_of, summary, with_and_without
from machine import print_head

CASE = "recordings"
RECORDINGS, FRAMES_PER_SECOND = 2, 100
SETTINGS = {"num_beams": 5, "do_sample": False, "max_new_tokens": 48, "return_timestamps": True}


def transcriber() -> transformers.WhisperForConditionalGeneration:
    torch.manual_seed(0)
    model, _ = whisper_tiny()
    config = model.generation_config
    config.no_timestamps_token_id, config.is_multilingual, config.max_length = NO_TIMESTAMPS, False, None
    return model.eval()


def recordings(model: Any, seconds: int) -> torch.Tensor:
    """Features at random."""
    shape = RECORDINGS, model.config.num_mel_bins, seconds * FRAMES_PER_SECOND
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def segments(model: Any, features: torch.Tensor) -> list[list[tuple]]:
    """Start, end and tokens of the segments of each recording."""
    mask = torch.ones(features.shape[0], features.shape[2], dtype=torch.long)
    outputs = model.generate(input_features=features, attention_mask=mask, return_segments=True, **SETTINGS)
    return [
        [(segment["start"].item(), segment["end"].item(), segment["tokens"].tolist()) for segment in recording]
        for recording in outputs["segments"]
    ]


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=int, default=90, help="of each recording, more than 30 (default 90)")
    args = parse_flags(parser, argv, "recordings", [CASE])
    if args.seconds <= 30:
        parser.error(f"--seconds {args.seconds}: Whisper hears that at once (accepted: more than 30)")
    print_head()
    model = transcriber()
    features = recordings(model, args.seconds)
    result = compare(CASE, with_and_without(partial(segments, model, features)), args.repeats, eq)
    print(summary(result))
    return finish(args, [result], missed_by(result, args.floors, "text, segments or times"), seconds=args.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
