"""Stock transformers and fastgen, alternately in one process, on random weights of real size.

    python benchmarks/bench_generate.py [CASE …] [--repeats 3] [--device cpu] [--dtype float32] [--json FILE]

For each case: median seconds of both, their ratio, the memory that one call adds at its peak, and whether the outputs
are equal. Each repeat runs stock and fastgen directly after each other; the order changes from repeat to repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
import transformers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import fastgen


@dataclass
class Case:
    """A model, its inputs and the arguments of `generate`; floor is the ratio that is promised on a 2-core CPU."""

    make: Callable[[], tuple[torch.nn.Module, dict]]
    arguments: dict = field(default_factory=dict)
    floor: float = 1.0


def bart_base() -> tuple[torch.nn.Module, dict]:
    config = BartConfig(
        vocab_size=50265,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config), {"input_ids": torch.randint(10, 50000, (4, 512))}


def bart_base_short() -> tuple[torch.nn.Module, dict]:
    model, _ = bart_base()
    return model, {"input_ids": torch.randint(10, 50000, (1, 16))}


def whisper_tiny() -> tuple[torch.nn.Module, dict]:
    config = WhisperConfig(
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        vocab_size=51865,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config), {"input_features": torch.randn(8, 80, 3000)}


def gpt2_small() -> tuple[torch.nn.Module, dict]:
    return GPT2LMHeadModel(GPT2Config(pad_token_id=50256)), {"input_ids": torch.randint(10, 50000, (4, 512))}


def gpt2_small_short() -> tuple[torch.nn.Module, dict]:
    model, _ = gpt2_small()
    return model, {"input_ids": torch.randint(10, 50000, (1, 16))}


def llama_like() -> tuple[torch.nn.Module, dict]:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=3,
        intermediate_size=2048,
        pad_token_id=0,
    )
    input_ids = torch.randint(10, 32000, (4, 512))
    attention_mask = torch.ones_like(input_ids)
    input_ids[1, :100], attention_mask[1, :100] = 0, 0
    return LlamaForCausalLM(config), {"input_ids": input_ids, "attention_mask": attention_mask}


BEAMS = {"num_beams": 4, "do_sample": False}
SAMPLES = {"num_return_sequences": 16, "do_sample": True}
CASES = {
    "bart-beam4": Case(bart_base, {**BEAMS, "no_repeat_ngram_size": 3}, floor=1.5),
    "whisper-beam5": Case(whisper_tiny, {"num_beams": 5, "do_sample": False, "max_new_tokens": 48}, floor=3.8),
    "gpt2-beam4": Case(gpt2_small, BEAMS, floor=3.8),
    "gpt2-sample16": Case(gpt2_small, SAMPLES, floor=9.0),
    "llama-sample16": Case(llama_like, SAMPLES, floor=6.0),
    "llama-beam4": Case(llama_like, BEAMS, floor=2.7),
    "bart-greedy-short": Case(bart_base_short, {"do_sample": False}, floor=0.97),
    "gpt2-greedy-short": Case(gpt2_small_short, {"do_sample": False}, floor=0.97),
}


class PeakMemory:
    """Bytes that a block adds at its peak: allocated memory on a GPU, resident memory of the process otherwise."""

    def __init__(self, device: str) -> None:
        self.device, self.added = device, 0

    def __enter__(self) -> PeakMemory:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return self
        import psutil

        self.process, self.stopped = psutil.Process(), threading.Event()
        self.before = self.process.memory_info().rss
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()
        return self

    def _watch(self) -> None:
        while not self.stopped.wait(0.005):
            self.added = max(self.added, self.process.memory_info().rss - self.before)

    def __exit__(self, *exception: object) -> None:
        if self.device == "cuda":
            self.added = torch.cuda.max_memory_allocated() - self.before
        else:
            self.stopped.set()
            self.watcher.join()


@dataclass
class Result:
    case: str
    stock_seconds: float
    fastgen_seconds: float
    ratio: float
    floor: float
    stock_added_mb: float
    fastgen_added_mb: float
    equal: bool


def run(name: str, repeats: int, device: str, dtype: torch.dtype) -> Result:
    case = CASES[name]
    torch.manual_seed(0)
    model, inputs = case.make()
    model = model.to(device=device, dtype=dtype).eval()
    inputs = {key: value.to(device, dtype if value.is_floating_point() else None) for key, value in inputs.items()}
    arguments = {"max_new_tokens": 32, **case.arguments}
    if "eos_token_id" not in arguments:
        arguments["eos_token_id"] = None  # random weights: every case generates as many tokens as it may

    def generate(seed: int) -> tuple[float, torch.Tensor]:
        torch.manual_seed(seed)
        start = time.perf_counter()
        output = model.generate(**inputs, **arguments)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, output

    def stock(seed: int) -> tuple[float, torch.Tensor]:
        with fastgen.disabled():
            return generate(seed)

    added = {}
    for kind, call in (("fastgen", generate), ("stock", stock)):  # warms both up
        with PeakMemory(device) as memory:
            call(0)
        added[kind] = memory.added / 1e6
    seconds: dict[str, list[float]] = {"stock": [], "fastgen": []}
    equal = True
    for repeat in range(repeats):
        outputs = {}
        order = [("stock", stock), ("fastgen", generate)]
        for kind, call in order if repeat % 2 == 0 else order[::-1]:
            elapsed, outputs[kind] = call(repeat)
            seconds[kind].append(elapsed)
        equal = equal and torch.equal(outputs["stock"], outputs["fastgen"])
    ratio = statistics.median(a / b for a, b in zip(seconds["stock"], seconds["fastgen"]))
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return Result(
        name, medians["stock"], medians["fastgen"], ratio, case.floor, added["stock"], added["fastgen"], equal
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs per case (default 3)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    args = parser.parse_args()
    unknown = sorted(set(args.cases) - set(CASES))
    if unknown:
        parser.error(f"CASE {unknown[0]!r}: choose from {', '.join(CASES)}")
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    columns = ("stock s", "fastgen s", "ratio", "floor", "stock MB", "fastgen MB", "equal")
    print("{:20} {:>9} {:>9} {:>7} {:>6} {:>9} {:>10} {}".format("case", *columns))
    results = []
    for name in args.cases or CASES:
        repeats = args.repeats if CASES[name].floor > 1 else 4 * args.repeats
        result = run(name, repeats, args.device, getattr(torch, args.dtype))
        results.append(result)
        print(
            f"{name:20} {result.stock_seconds:9.3f} {result.fastgen_seconds:9.3f} {result.ratio:6.2f}x "
            f"{result.floor:5.2f}x {result.stock_added_mb:9.0f} {result.fastgen_added_mb:10.0f} {result.equal}",
            flush=True,
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(result) for result in results], file, indent=1)
    return 0 if all(result.equal for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
