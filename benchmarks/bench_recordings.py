"""Long recordings with Whisper's own generate: fastgen against transformers, on the shape of Whisper-tiny.

    python benchmarks/bench_recordings.py [--seconds 90] [--repeats 3] [--floor RATIO]

Two recordings, 5 beams, up to 48 new tokens in each window of 30 s, random weights. Both run in turns, directly after
each other; seconds are medians, the ratio is the median of those of a turn. The status is 1 where the ratio is below
--floor, or where text, segments or times differ.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import transformers
from clock import in_turns, medians, times_as_fast
from generate_cases import NO_TIMESTAMPS, whisper_tiny
from machine import print_head

import fastgen

RECORDINGS, FRAMES_PER_SECOND = 2, 100
SETTINGS = {"num_beams": 5, "do_sample": False, "max_new_tokens": 48, "return_timestamps": True}


def transcriber() -> transformers.WhisperForConditionalGeneration:
    torch.manual_seed(0)
    model, _ = whisper_tiny()
    config = model.generation_config
    config.no_timestamps_token_id, config.is_multilingual, config.max_length = NO_TIMESTAMPS, False, None
    return model.eval()


def segments(model: Any, features: torch.Tensor) -> list[list[tuple]]:
    """Start, end and tokens of the segments of each recording."""
    mask = torch.ones(features.shape[0], features.shape[2], dtype=torch.long)
    outputs = model.generate(input_features=features, attention_mask=mask, return_segments=True, **SETTINGS)
    return [
        [(segment["start"].item(), segment["end"].item(), segment["tokens"].tolist()) for segment in recording]
        for recording in outputs["segments"]
    ]


def measure(model: Any, seconds: int, repeats: int) -> tuple[float, float, float, bool]:
    """Median seconds of transformers and of fastgen, the median ratio, and whether all that is returned is equal."""
    shape = RECORDINGS, model.config.num_mel_bins, seconds * FRAMES_PER_SECOND
    features = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    transcribe = partial(segments, model, features)
    ways = {"fastgen": transcribe, "stock": fastgen.disabled()(transcribe)}
    turns, equal = [], True
    transcribe()  # warms up
    for taken, found in in_turns(ways, repeats):
        turns.append(taken)
        equal &= found["stock"] == found["fastgen"]
    middle = medians(turns)
    return middle["stock"], middle["fastgen"], times_as_fast(turns), equal


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=90, help="of each recording, more than 30 (default 90)")
    parser.add_argument("--repeats", type=int, default=3, help="turns (default 3)")
    parser.add_argument("--floor", type=float, default=0.0, metavar="RATIO", help="the ratio to reach")
    args = parser.parse_args(argv)
    if args.seconds <= 30:
        parser.error(f"--seconds {args.seconds}: Whisper hears that at once (accepted: more than 30)")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print_head()
    stock, ours, ratio, equal = measure(transcriber(), args.seconds, args.repeats)
    print(f"transformers {stock:.2f} s, fastgen {ours:.2f} s, {ratio:.2f} times as fast")
    if ratio < args.floor:
        print(f"{ratio:.2f} times as fast as transformers, and --floor is {args.floor:.2f}")
    if not equal:
        print("text, segments or times differ")
    return int(ratio < args.floor or not equal)


if __name__ == "__main__":
    raise SystemExit(main())
