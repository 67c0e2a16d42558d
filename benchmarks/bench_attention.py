"""Where keeping the prompt once per input pays: one decode step of attention, in two segments and in one. On a CPU also
attention of prompts and encoders, by torch and in fastgen's flash attention.

    python benchmarks/bench_attention.py [--device cpu] [--dtype float32] [--floors FILE] [--json FILE]

For each shape: microseconds of `shared_attention` (prompt once per input, generated keys per row) and of
`scaled_dot_product_attention` on keys that hold the prompt for every row, and the elements of keys that sharing saves;
`CostModel.min_saved_elements` is chosen from them. On a GPU they show whether `CostModel.min_saved_bytes`, of
keys and values, is right. --floors takes a file of how many times as fast two segments, and flash attention, have to be
(floors.json, cases are shapes such as "4-4-12-1-512-16-64", and prompts); the status is 1 where one is missed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from harness import below, finish, parse_flags, parser_of
from machine import print_head
from torch.nn import functional

from fastgen.ops.flash_attention import FlashAttention
from fastgen.ops.shared_attention import shared_attention

# inputs, rows per input, key heads, query heads per key head, prompt length, generated length, head_dim
SHAPES = [
    (1, 2, 12, 1, 16, 16, 64),
    (1, 4, 12, 1, 64, 16, 64),
    (1, 4, 12, 1, 256, 16, 64),
    (1, 4, 12, 1, 512, 16, 64),
    (4, 2, 12, 1, 128, 16, 64),
    (4, 4, 3, 4, 128, 16, 64),
    (4, 4, 3, 4, 512, 16, 64),
    (4, 4, 12, 1, 512, 16, 64),
    (4, 16, 3, 4, 512, 16, 64),
    (4, 16, 12, 1, 512, 16, 64),
]

# inputs, query heads, key heads, length, head_dim, and what a query does not see
PROMPTS = {
    "bart-encoder": (4, 12, 12, 512, 64, ""),
    "t5-encoder": (8, 12, 12, 128, 64, "bias"),
    "whisper-encoder": (8, 6, 6, 1500, 64, ""),
    "gpt2-prompt": (4, 12, 12, 512, 64, "later"),
    "llama-prompt": (4, 12, 3, 512, 64, "later and padding"),
}


def microseconds(call: Callable[[], object], device: str) -> list[float]:
    """Of each call, after some that warm it up."""
    found = []
    for _ in range(40):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e6)
    return found[10:]


def name(shape: tuple[int, ...]) -> str:
    return "-".join(map(str, shape))


def measure(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Any]:
    inputs, rows_per_input, kv_heads, groups, prompt, generated, width = shape
    rows, kind = inputs * rows_per_input, {"device": device, "dtype": dtype}
    query = torch.randn(rows, kv_heads * groups, 1, width, **kind)
    shared = torch.randn(2, inputs, kv_heads, prompt, width, **kind)
    added = torch.randn(2, rows, kv_heads, generated, width, **kind)
    whole = torch.cat([shared.repeat_interleave(rows_per_input, dim=1), added], dim=3)
    grouped = query.reshape(rows, kv_heads, groups, width)

    def two_segments() -> torch.Tensor:
        return shared_attention(query, (shared[0], added[0]), (shared[1], added[1]))

    def one_segment() -> torch.Tensor:
        return functional.scaled_dot_product_attention(grouped, whole[0], whole[1])

    turns = {"two segments": microseconds(two_segments, device), "one segment": microseconds(one_segment, device)}
    return result_of(name(shape), turns) | {"saved": inputs * (rows_per_input - 1) * kv_heads * prompt * width}


def result_of(case: str, turns: dict[str, list[float]]) -> dict[str, Any]:
    """ratio: how many times as long the second way takes as the first."""
    medians = {way: statistics.median(found) for way, found in turns.items()}
    first, second = medians.values()
    return {"case": case, "microseconds": medians, "turns": turns, "ratio": second / first}


def measure_prompt(case: str, dtype: torch.dtype) -> dict[str, Any]:
    inputs, heads, kv_heads, length, width, hides = PROMPTS[case]
    query, keys, values = (
        torch.randn(inputs, length, count, width, dtype=dtype).transpose(1, 2) for count in (heads, kv_heads, kv_heads)
    )
    mask = torch.randn(1, heads, length, length, dtype=dtype) if hides == "bias" else None
    if hides == "later and padding":
        mask = torch.ones(inputs, 1, length, length, dtype=torch.bool).tril()
        mask[1, ..., :100] = False
    usage: Counter[str] = Counter()

    def by_torch() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=hides == "later", enable_gqa=heads != kv_heads
        )

    def by_fastgen() -> torch.Tensor:
        with FlashAttention(usage):
            return by_torch()

    with torch.no_grad():
        turns = {"fastgen": microseconds(by_fastgen, "cpu"), "torch": microseconds(by_torch, "cpu")}
    if not usage:
        raise SystemExit(f"{case}: this machine has no flash attention of fastgen's: python -m fastgen says why")
    return result_of(case, turns)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, repeats=None, has_devices=True)
    args = parse_flags(parser, argv, "attention", (), [*map(name, SHAPES), *PROMPTS])
    print_head()
    print(
        f"{'inputs-rows_per_input-kv_heads-groups-prompt-generated-head_dim':64} {'two':>10} {'one':>10} {'saved':>10}"
    )
    results, missed = [], []
    for shape in SHAPES:
        result = measure(shape, args.device, getattr(torch, args.dtype))
        results.append(result)
        two, one = result["microseconds"].values()
        print(f"{result['case']:64} {two:10.0f} {one:10.0f} {result['saved']:10d}", flush=True)
        missed += below(result["case"], {"one segment": result["ratio"]}, args.floors)
    if args.device == "cpu":
        print(f"{'prompt':64} {'fastgen':>10} {'torch':>10} {'ratio':>10}")
        for case in PROMPTS:
            result = measure_prompt(case, getattr(torch, args.dtype))
            results.append(result)
            fastgen, by_torch = result["microseconds"].values()
            print(f"{case:64} {fastgen:10.0f} {by_torch:10.0f} {result['ratio']:10.2f}", flush=True)
            missed += below(case, {"torch": result["ratio"]}, args.floors)
    return finish(args, results, missed)


if __name__ == "__main__":
    raise SystemExit(main())
