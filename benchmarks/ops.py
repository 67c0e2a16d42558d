"""Single operations, in microseconds: attention of one decode step and of prompts, and n-gram blocking.

`attention` rows with numbers: a prompt that is kept once per input ("fastgen", two segments) against keys that hold it
for every row ("one segment"), from which the launches of `DeviceRates` follow. Others: whole
prompts and encoders, by torch and in fastgen's flash attention, on a CPU. `ngram` rows: Table 3 of FastSeq, fairseq's
loop, transformers' processor, and each implementation here, as the decoding loop calls it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import Options, Ways, statistics_of
from torch import Tensor
from torch.nn import functional

import fastgen
from fastgen.ops import no_repeat_ngram as ngram_op
from fastgen.ops.cpu_attention import FlashAttention
from fastgen.ops.no_repeat_ngram.kernels import KERNELS
from fastgen.ops.shared_attention import shared_attention

VOCABULARY = 50265
SECONDS_PER_CALL, SECONDS_PER_CASE, TURNS = 0.005, 10.0, 7
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Step:
    """Attention of one decode step: inputs, rows of each, key heads, query heads of each, lengths, head_dim."""

    inputs: int
    rows_per_input: int
    key_heads: int
    groups: int
    prompt: int
    generated: int = 16
    width: int = 64

    def ways(self, kind: dict[str, Any]) -> Ways:
        rows = self.inputs * self.rows_per_input
        query = torch.randn(rows, self.key_heads * self.groups, 1, self.width, **kind)
        shared = torch.randn(2, self.inputs, self.key_heads, self.prompt, self.width, **kind)
        added = torch.randn(2, rows, self.key_heads, self.generated, self.width, **kind)
        whole = torch.cat([shared.repeat_interleave(self.rows_per_input, dim=1), added], dim=3)
        grouped = query.reshape(rows, self.key_heads, self.groups, self.width)
        return {
            "fastgen": lambda: shared_attention(query, (shared[0], added[0]), (shared[1], added[1])).view_as(query),
            "one segment": lambda: functional.scaled_dot_product_attention(grouped, whole[0], whole[1]).view_as(query),
        }

    def saved(self) -> int:
        """Returns the elements of keys that sharing saves."""
        return self.inputs * (self.rows_per_input - 1) * self.key_heads * self.prompt * self.width


@dataclass(frozen=True)
class Prompt:
    """Attention of whole prompts. hides: the keys that a query does not see."""

    inputs: int
    heads: int
    key_heads: int
    length: int
    hides: str = ""
    width: int = 64

    def ways(self, kind: dict[str, Any]) -> Ways:
        heads = (self.heads, self.key_heads, self.key_heads)
        query, keys, values = (
            torch.randn(self.inputs, self.length, count, self.width, **kind).transpose(1, 2) for count in heads
        )
        mask = torch.randn(1, self.heads, self.length, self.length, **kind) if self.hides == "bias" else None
        if self.hides == "later and padding":
            mask = torch.ones(self.inputs, 1, self.length, self.length, dtype=torch.bool).tril()
            mask[1, ..., :100] = False
        is_causal, is_grouped = self.hides == "later", self.heads != self.key_heads
        usage: Counter[str] = Counter()

        def by_torch() -> Tensor:
            return functional.scaled_dot_product_attention(
                query, keys, values, mask, is_causal=is_causal, enable_gqa=is_grouped
            )

        def by_fastgen() -> Tensor:
            with FlashAttention(usage):
                return by_torch()

        with torch.no_grad():
            by_fastgen()
        if not usage:
            raise SystemExit("this machine has no flash attention of fastgen's: python -m fastgen says why")
        return {"fastgen": by_fastgen, "torch": by_torch}


@dataclass(frozen=True)
class Ngrams:
    """One step of blocking n-grams of the rows themselves."""

    rows: int
    length: int
    ngram_size: int

    def ways(self, kind: dict[str, Any]) -> Ways:
        device, size = kind["device"], self.ngram_size
        tokens = torch.randint(4, VOCABULARY, (self.rows, self.length), device=device)
        # The end of every second row repeats earlier tokens, so that something is banned.
        tokens[::2, self.length - size + 1 :] = tokens[::2, 3 : 2 + size]
        scores = torch.randn(self.rows, VOCABULARY, **kind)
        ways: Ways = {}
        for kernel in KERNELS:  # in the order of choice
            if kernel.device in ("", device) and not kernel.unsupported_reasons():
                ways[f"fastgen {kernel.name}"] = partial(ban_by, kernel, tokens, scores, size)
        ways[next(iter(ways))] = lambda: ngram_op.no_repeat_ngram_(tokens, scores, size)  # chooses the first
        stock = stock_ngrams(tokens, scores, size)
        return ways | {name: fastgen.disabled()(call) for name, call in stock.items()}


def ban_by(kernel: Any, tokens: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    kernel.run(tokens, scores, ngram_size, None, None)
    return scores


def stock_ngrams(tokens: Tensor, scores: Tensor, ngram_size: int) -> Ways:
    from transformers import NoRepeatNGramLogitsProcessor

    processor = NoRepeatNGramLogitsProcessor(ngram_size)
    calls: Ways = {"transformers": lambda: processor(tokens, scores)}
    try:
        from fairseq.ngram_repeat_block import NGramRepeatBlock
    except ImportError as error:
        print(f"fairseq's loop is left out: {error}")
        return calls
    block, (rows, length) = NGramRepeatBlock(ngram_size, use_extension=False), tokens.shape
    return calls | {"fairseq": lambda: block._no_repeat_ngram(tokens, scores, rows, 1, length - 1)}


_SHAPES = [
    *((1, 2, 12, 1, 16), (1, 4, 12, 1, 64), (1, 4, 12, 1, 256), (1, 4, 12, 1, 512), (4, 2, 12, 1, 128)),
    *((4, 4, 3, 4, 128), (4, 4, 3, 4, 512), (4, 4, 12, 1, 512), (4, 16, 3, 4, 512), (4, 16, 12, 1, 512)),
]
CASES: dict[str, dict[str, Any]] = {
    "attention": {
        **{"-".join(map(str, (*shape, 16, 64))): Step(*shape) for shape in _SHAPES},
        "bart-encoder": Prompt(4, 12, 12, 512),
        "t5-encoder": Prompt(8, 12, 12, 128, "bias"),
        "whisper-encoder": Prompt(8, 6, 6, 1500),
        "gpt2-prompt": Prompt(4, 12, 12, 512, "later"),
        "llama-prompt": Prompt(4, 12, 3, 512, "later and padding"),
    },
    "ngram": {
        f"own-{rows}x{length}-{size}": Ngrams(rows, length, size)
        for rows, length, size in itertools.product((4, 128, 512), (32, 128, 1024), (2, 3, 4))
    },
}


def microseconds(call: Callable[[], object], options: Options) -> float:
    """Returns the microseconds of a call, as a mean over SECONDS_PER_CALL; waits for a GPU at the end."""
    calls, begun, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < SECONDS_PER_CALL:
        call()
        calls += 1
        elapsed = time.perf_counter() - begun
    if options.device == "cuda":
        elapsed = options.clock() - begun
    return elapsed / calls * 1e6


def are_equal(case: Any, kind: dict[str, Any]) -> bool:
    """Returns whether all ways return the same; each has its own inputs, because some change them."""
    outputs = []
    for name in case.ways(kind):
        torch.manual_seed(0)
        outputs.append(case.ways(kind)[name]())
    return all(torch.allclose(outputs[0], other, atol=TOLERANCES[kind["dtype"]], rtol=0) for other in outputs[1:])


@torch.no_grad()
def measure(kind: str, name: str, case: Step | Prompt | Ngrams, options: Options) -> dict[str, Any]:
    """Returns the microseconds of all ways, in turns: TURNS for each repeat, fewer after SECONDS_PER_CASE."""
    tensors = {"device": options.device, "dtype": options.torch_dtype}
    equal, ways = are_equal(case, tensors), case.ways(tensors)
    ours = next(way for way in ways if way.startswith("fastgen"))
    for call in ways.values():
        call()
    turns, begun = [], time.perf_counter()
    for turn in range(TURNS * options.repeats):
        seconds = {}
        for way in [*ways][:: -1 if turn % 2 else 1]:
            seconds[way] = microseconds(ways[way], options)
        turns.append({way: seconds[way] for way in ways})
        if len(turns) >= options.repeats and time.perf_counter() - begun > SECONDS_PER_CASE:
            break
    result = statistics_of(turns, ours)
    result["microseconds"] = result.pop("seconds")
    facts = {"saved": case.saved()} if isinstance(case, Step) else {}
    facts |= {"rows": case.rows, "length": case.length} if isinstance(case, Ngrams) else {}
    return {"case": name, "equal": equal, **result, **facts}
