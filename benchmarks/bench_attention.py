"""Where keeping the prompt once per input pays: one decode step of attention, in two segments and in one.

    python benchmarks/bench_attention.py [--device cpu] [--dtype float32]

For each shape: microseconds of `shared_attention` (prompt once per input, generated keys per row) and of
`scaled_dot_product_attention` on keys that hold the prompt for every row, and the elements of keys that sharing saves;
`CostModel.min_saved_elements` is chosen from them. On a GPU they show whether `CostModel.min_saved_bytes`, of
keys and values, is right.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

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


def median_microseconds(call: Callable[[], object], device: str) -> float:
    seconds = []
    for _ in range(40):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[10:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    args = parser.parse_args()
    kind = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    names = "inputs rows_per_input kv_heads groups prompt generated head_dim"
    print(f"{names:64} {'two':>10} {'one':>10} {'saved':>10}")
    for shape in SHAPES:
        inputs, rows_per_input, kv_heads, groups, prompt, generated, width = shape
        rows = inputs * rows_per_input
        query = torch.randn(rows, kv_heads * groups, 1, width, **kind)
        shared = torch.randn(2, inputs, kv_heads, prompt, width, **kind)
        added = torch.randn(2, rows, kv_heads, generated, width, **kind)
        whole = torch.cat([shared.repeat_interleave(rows_per_input, dim=1), added], dim=3)
        grouped = query.reshape(rows, kv_heads, groups, width)

        def two_segments(query=query, shared=shared, added=added) -> torch.Tensor:
            return shared_attention(query, (shared[0], added[0]), (shared[1], added[1]))

        def one_segment(grouped=grouped, whole=whole) -> torch.Tensor:
            return functional.scaled_dot_product_attention(grouped, whole[0], whole[1])

        times = [median_microseconds(call, args.device) for call in (two_segments, one_segment)]
        saved = inputs * (rows_per_input - 1) * kv_heads * prompt * width
        print(f"{' '.join(map(str, shape)):64} {times[0]:10.0f} {times[1]:10.0f} {saved:10d}")


if __name__ == "__main__":
    main()
