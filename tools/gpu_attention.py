"""Errors and times of the ways to attend, and from what size on a shared prompt is faster: `gpu_check.py`.

Tests: tests/optimizer/test_cuda_twin.py
"""

from __future__ import annotations

import itertools
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastgen.ops import shared_attention
from fastgen.ops.kernel import tolerance
from fastgen.optimizer.decoding.cost_model import CostModel
from fastgen.optimizer.decoding.kv_cache import should_share
from fastgen.testing import configured

CALLS = 20  # in one measurement
L2_BYTES = 60 << 20  # more than a GPU's cache holds: calls take turns with inputs of so many bytes

# Attention: inputs, rows per input, key heads, query heads of each, prompt, generated, width, dtype, with a mask.
ATTENTION = {
    "BART-large, 128 inputs, beam 4": (128, 4, 16, 1, 1024, 32, 64, torch.float16, False),
    "Llama-8B, 4 inputs, 16 samples": (4, 16, 8, 4, 2048, 128, 128, torch.bfloat16, False),
    "the same, with a mask": (4, 16, 8, 4, 2048, 128, 128, torch.bfloat16, True),
    "Llama-8B, 1 input, beam 4": (1, 4, 8, 4, 512, 64, 128, torch.bfloat16, True),
    "8 query heads for each key head": (4, 4, 4, 8, 1024, 64, 128, torch.bfloat16, True),
    "T5-base, 8 inputs, beam 4": (8, 4, 12, 1, 128, 32, 64, torch.float32, True),
}


def attention(dry: bool) -> dict[str, Callable[[], Any]]:
    """Returns what measures microseconds in a CUDA graph, and relative errors against fp64, for each case and way.

    fastgen: the kernel that it chooses, which is not Triton's in fp32, or if Triton is missing.
    """
    return {name: partial(_attention, *case, dry) for name, case in ATTENTION.items()}


def _attention(
    inputs: int,
    rows_per_input: int,
    kv_heads: int,
    groups: int,
    prompt: int,
    generated: int,
    width: int,
    dtype: torch.dtype,
    masked: bool,
    dry: bool,
) -> dict[str, dict[str, float]]:
    if dry:
        inputs, prompt, generated = 2, 24, 5
    rows = inputs * rows_per_input
    random = partial(torch.randn, dtype=dtype, device="cuda")
    sizes = (inputs, kv_heads, prompt, width), (rows, kv_heads, generated, width)
    mask = torch.ones(rows, 1, 1, prompt + generated, dtype=torch.bool, device="cuda") if masked else None
    nbytes = 2 * sum(rows * kv_heads * length * width * dtype.itemsize for rows, _, length, _ in sizes)
    copies = 1 if dry else min(CALLS, -(-L2_BYTES // nbytes))
    sets = []
    for _ in range(copies):
        query = random(rows, kv_heads * groups, 1, width)
        sets.append((query, *([random(*size) for size in sizes] for _ in range(2))))

    def repeated(parts: Sequence[Tensor]) -> Tensor:
        first, second = parts
        return torch.cat([first.repeat_interleave(rows_per_input, 0), second], 2).repeat_interleave(groups, 1)

    def stock(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return functional.scaled_dot_product_attention(query, keys, values, mask, scale=scale)

    scale, few = width**-0.5, slice(0, 16)
    doubles = (tensor[few].double() for tensor in (sets[0][0], *map(repeated, sets[0][1:])))
    exact = stock(*doubles, None if mask is None else mask[few], scale)
    ways = {
        "stock": stock,
        "torch's products": shared_attention.attention_by_products,
        "fastgen": shared_attention.shared_attention,
    }
    if (triton_kernels := shared_attention._triton_attention(torch.device("cuda"))) is not None:
        ways["Triton"] = triton_kernels.attention
    results = {}
    for way, attend in ways.items():
        operands = [(query, *map(repeated, parts)) if way == "stock" else (query, *parts) for query, *parts in sets]
        calls = [partial(attend, *each, mask, scale) for each in operands]
        error = float((calls[0]()[few].double() - exact).norm() / exact.norm())
        results[way] = {"us": _graph_us(calls), "error": error}
    return results


def failures(name: str, ways: dict[str, dict[str, float]]) -> list[str]:
    """Returns a message for each kernel that is less exact than stock's, or than its dtype allows.

    fastgen without Triton may round scores, which stock does not.
    """
    *_, dtype, _ = ATTENTION[name]
    stock = ways["stock"]["error"]
    bounds = {"Triton": 1.1 * stock + 1e-6, "fastgen": tolerance("product", dtype)}
    return [
        f"attention, {name}: {way}'s error {ways[way]['error']:.1e}, stock's {stock:.1e}"
        for way, most in bounds.items()
        if way in ways and not ways[way]["error"] <= most
    ]


def _graph_us(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Returns the microseconds of a call in a CUDA graph of several, which take turns."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            for call in itertools.islice(itertools.cycle(calls), CALLS):
                call()
        finally:
            graph.capture_end()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


# Attention whose prompt grows until sharing it is faster: rows of one input, heads, width; bf16, without a mask.
ROWS, HEADS, WIDTH, GENERATED = 16, 8, 128, 64
LENGTHS, DRY_LENGTHS = [16 << power for power in range(11)], [16, 32]


def rates(dry: bool) -> dict[str, Callable[[], Any]]:
    """Returns what measures in how many saved megabytes sharing a prompt breaks even, for each way.

    measured: in this attention, None if never; by_rates: by `should_share`, with the rates of an H200.
    """
    triton_kernels = shared_attention._triton_attention(torch.device("cuda"))
    ways = {
        "eager": (_eager_us, shared_attention.attention_by_products),
        "in a graph": (_graph_us, shared_attention.attention_by_products),
    }
    if triton_kernels is not None:
        ways["in a graph, Triton"] = _graph_us, triton_kernels.attention
    return {way: partial(_rates, way, us_of, attend, dry) for way, (us_of, attend) in ways.items()}


def _rates(
    way: str, us_of: Callable[[Sequence[Callable[[], Tensor]]], float], attend: Callable[..., Tensor], dry: bool
) -> dict[str, float | None]:
    faster_from = None
    for length in reversed(DRY_LENGTHS if dry else LENGTHS):
        stock, shared, saved_bytes = _attentions(length, attend)
        if us_of([shared]) >= us_of([stock]):
            break
        faster_from = saved_bytes / 1e6
    with configured(cuda_kernels="Triton" in way, share="auto"):
        return {"measured": faster_from, "by_rates": _break_even(CostModel(), way != "eager")}


def _attentions(length: int, attention: Callable[..., Tensor]) -> tuple[partial[Tensor], partial[Tensor], int]:
    """Returns stock's attention to a prompt of this length, this one's, and how many bytes the latter does not read."""
    prompt, own = (
        torch.randn(2, rows, HEADS, count, WIDTH, dtype=torch.bfloat16, device="cuda")
        for rows, count in ((1, length), (ROWS, GENERATED))
    )
    query = torch.randn(ROWS, HEADS, 1, WIDTH, dtype=torch.bfloat16, device="cuda")
    whole = torch.cat([prompt.expand(-1, ROWS, -1, -1, -1), own], 3)
    segments = [prompt[0], own[0]], [prompt[1], own[1]]
    shared = partial(attention, query, *segments, None, WIDTH**-0.5)
    return partial(functional.scaled_dot_product_attention, query, *whole), shared, prompt.nbytes * (ROWS - 1)


def _break_even(costs: CostModel, is_captured: bool) -> float:
    """Returns the saved megabytes from which on such a prompt is stored once."""
    position = torch.empty(1, HEADS, 1, WIDTH, dtype=torch.bfloat16, device="cuda")

    def shares(length: int) -> bool:
        return should_share(costs, position.expand(-1, -1, length, -1), ROWS, is_captured=is_captured)

    length = bisect_left(range(1 << 24), True, key=shares)
    return 2 * position.nbytes * length * (ROWS - 1) / 1e6


def _eager_us(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Returns the microseconds of a call without a graph."""
    for call in calls:
        call()
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for call in itertools.islice(itertools.cycle(calls), CALLS):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e6 / CALLS)
    return statistics.median(times)
