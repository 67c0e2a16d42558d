"""`make gpu-check`: what a GPU can show that a CPU cannot, in about ten minutes, part by part.

    python tools/gpu_check.py [PART …] [--json gpu-check.json]

Each part is written to the file of JSON as soon as it has ended. A part that the file has, of this GPU and day, is not
run again. Parts: environment, attention (errors and times of `triton_attention`), generate (models of real shape in
four ways), tests (`tests/gpu`), sanitize (kernels under compute-sanitizer). Ends with 1 if tests fail or a kernel is
less exact than torch's attention, with 2 if there is no GPU. As a whole not yet run on a GPU: docs/gpu-checks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

import fastgen
from fastgen.config import CONFIG
from fastgen.ops.shared_attention import attention_by_products

REPOSITORY = Path(__file__).resolve().parents[1]
SANITIZER = ["compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no", "--tool", "memcheck"]


def environment() -> dict[str, Any]:
    versions = {module.__name__: module.__version__ for module in (torch, transformers, fastgen)}
    return {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), **versions}


# Attention: inputs, rows per input, key heads, query heads of each, prompt, generated, width, dtype, with a mask.
ATTENTION = {
    "BART-large, 128 inputs, beam 4": (128, 4, 16, 1, 1024, 32, 64, torch.float16, False),
    "Llama-8B, 4 inputs, 16 samples": (4, 16, 8, 4, 2048, 128, 128, torch.bfloat16, False),
    "the same, with a mask": (4, 16, 8, 4, 2048, 128, 128, torch.bfloat16, True),
    "Llama-8B, 1 input, beam 4": (1, 4, 8, 4, 512, 64, 128, torch.bfloat16, True),
    "T5-base, 8 inputs, beam 4": (8, 4, 12, 1, 128, 32, 64, torch.float32, True),
}


def attention() -> dict[str, Any]:
    """Microseconds in a CUDA graph, and relative errors against fp64, of three ways to attend."""
    from fastgen.ops import triton_attention

    results = {}
    for name, (inputs, rows_per_input, kv_heads, groups, prompt, generated, width, dtype, masked) in ATTENTION.items():
        rows = inputs * rows_per_input

        def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, dtype=dtype, device="cuda")

        query = random(rows, kv_heads * groups, 1, width)
        keys, values = (
            [random(inputs, kv_heads, prompt, width), random(rows, kv_heads, generated, width)] for _ in range(2)
        )
        mask = torch.ones(rows, 1, 1, prompt + generated, dtype=torch.bool, device="cuda") if masked else None
        repeated = [
            torch.cat([parts[0].repeat_interleave(rows_per_input, 0), parts[1]], 2).repeat_interleave(groups, 1)
            for parts in (keys, values)
        ]
        scale, few = width**-0.5, slice(0, 16)
        ways = {
            "stock": partial(functional.scaled_dot_product_attention, query, *repeated, mask),
            "torch": partial(attention_by_products, query, keys, values, mask, scale),
            "triton": partial(triton_attention.attention, query, keys, values, mask, scale),
        }
        doubles = (one[few].double() for one in (query, *repeated))
        exact = functional.scaled_dot_product_attention(*doubles, None if mask is None else mask[few])
        results[name] = {
            way: {"us": _graph_us(call), "error": float((call()[few].double() - exact).norm() / exact.norm())}
            for way, call in ways.items()
        }
    return results


def _graph_us(call: Callable[[], Tensor], calls: int = 20) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


@dataclass
class Model:
    """kind, config: of transformers; a few layers of a large model, since each is like the next."""

    kind: str
    config: dict[str, Any]
    shape: tuple[int, int]
    arguments: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    new_tokens: int = field(default=48)


LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip
BART_LARGE = {"vocab_size": 50265, "forced_eos_token_id": None, "decoder_start_token_id": 1, "eos_token_id": None}
BEAMS, SAMPLES = {"num_beams": 4, "do_sample": False}, {"do_sample": True, "num_return_sequences": 16}
MODELS = {
    "Llama-8B, 4 layers, 4 × 2048, 16 samples": Model(
        "Llama", {**LLAMA_8B, "num_hidden_layers": 4}, (4, 2048), SAMPLES
    ),
    "Llama-8B, 4 layers, 4 × 512, beam 4": Model("Llama", {**LLAMA_8B, "num_hidden_layers": 4}, (4, 512), BEAMS),
    "Llama-8B, 8 layers, 1 × 512, greedy": Model(
        "Llama", {**LLAMA_8B, "num_hidden_layers": 8}, (1, 512), {"do_sample": False}
    ),
    "BART-large, 128 × 1024, beam 4": Model("Bart", BART_LARGE, (128, 1024), BEAMS, torch.float16),
    "BART-large, 1 × 64, beam 4, fp32": Model("Bart", BART_LARGE, (1, 64), BEAMS, torch.float32),
    "GPT-2, 4 × 512, beam 4, fp32": Model(
        "GPT2", {"pad_token_id": 50256, "eos_token_id": None}, (4, 512), BEAMS, torch.float32
    ),
}
WAYS = {
    "stock": None,
    "graphs off": ("off", True),
    "graphs, torch's attention": ("auto", False),
    "fastgen": ("auto", True),
}
CLASSES = {"Llama": "LlamaForCausalLM", "Bart": "BartForConditionalGeneration", "GPT2": "GPT2LMHeadModel"}


def generate() -> dict[str, Any]:
    """Seconds of a call and milliseconds of a step in each way; and how many generated tokens are those of stock."""
    return {name: _times(model) for name, model in MODELS.items()}


def _times(case: Model) -> dict[str, Any]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{case.kind}Config")(**case.config)
    with torch.device("cuda"):
        model = getattr(transformers, CLASSES[case.kind])(config).to(case.dtype).eval()
    ids = torch.randint(10, 30000, case.shape, device="cuda")

    def call(way: str, new_tokens: int) -> tuple[float, Tensor]:
        torch.manual_seed(3)
        arguments = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, **case.arguments}
        begun = time.perf_counter()
        if WAYS[way] is None:
            with fastgen.disabled():
                output = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        else:
            CONFIG.cuda_graphs, CONFIG.cuda_kernels = WAYS[way]
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        torch.cuda.synchronize()
        return time.perf_counter() - begun, output[:, -new_tokens:]

    few, many = 4, case.new_tokens
    first = {way: call(way, many)[0] for way in WAYS}
    turns = [{way: (call(way, few)[0], call(way, many)) for way in WAYS} for _ in range(3)]
    results = {}
    for way in WAYS:
        short, long = (
            statistics.median(turn[way][0] for turn in turns),
            statistics.median(t[way][1][0] for t in turns),
        )
        equal = (turns[-1][way][1][1] == turns[-1]["stock"][1][1]).float().mean().item()
        step = (long - short) / (many - few) * 1e3
        results[way] = {"first_s": first[way], "s": long, "ms_per_step": step, "equal_tokens": equal}
    return results


def tests() -> dict[str, Any]:
    """Runs tests/gpu; returns the last lines and the status."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:randomly", "tests/gpu"]
    return _ended(command, 15, FASTGEN_STRICT="1")


def sanitize() -> dict[str, Any]:
    """Runs the n-gram kernels under memcheck; returns the last lines and the status, None where the tool is missing."""
    if not shutil.which(SANITIZER[0]):
        return {"status": None, "end": [f"{SANITIZER[0]} is not on the PATH"]}
    command = [*SANITIZER, sys.executable, "tests/gpu/sanitize_no_repeat_ngram.py"]
    return _ended(command, 5, PYTHONPATH=str(REPOSITORY / "tests" / "helpers"))


def _ended(command: list[str], lines: int, **environment: str) -> dict[str, Any]:
    process = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    return {"status": process.returncode, "end": (process.stdout + process.stderr).splitlines()[-lines:]}


PARTS = {part.__name__: part for part in (environment, attention, generate, tests, sanitize)}


def failures(results: dict[str, Any]) -> list[str]:
    """Returns a message for each failed part, and for each kernel that is less exact than stock's attention."""
    statuses = {part: results.get(part, {}).get("status") for part in ("tests", "sanitize")}
    messages = [f"{part} ended with status {status}" for part, status in statuses.items() if status]
    for name, ways in results.get("attention", {}).items():
        if ways["triton"]["error"] > 1.1 * ways["stock"]["error"] + 1e-6:
            messages.append(
                f"attention, {name}: error {ways['triton']['error']:.1e}, stock {ways['stock']['error']:.1e}"
            )
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="the file of results")
    flags = parser.parse_args()
    if unknown := set(flags.parts) - PARTS.keys():
        parser.error(f"PART {', '.join(sorted(unknown))} (accepted: {', '.join(PARTS)})")
    if not torch.cuda.is_available():
        print("torch finds no GPU: nothing was checked", file=sys.stderr)
        return 2
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    results = json.loads(flags.json.read_text()) if flags.json.exists() else {}
    if results.get("environment", environment()) != environment():
        results = {}
    for name in flags.parts or PARTS:
        if name in results and not results[name].get("status"):
            print(f"{name}: already in {flags.json}")
        else:
            begun = time.perf_counter()
            results[name] = PARTS[name]()
            flags.json.write_text(json.dumps(results, indent=2))
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    print(json.dumps(results, indent=2))
    for message in (messages := failures(results)):
        print(f"FAILED: {message}", file=sys.stderr)
    return bool(messages)


if __name__ == "__main__":
    sys.exit(main())
