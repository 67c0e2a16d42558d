"""`make gpu-check`: the checks that need a GPU, in about ten minutes, part by part.

    python tools/gpu_check.py [PART …] [--json gpu-check.json] [--page FILE]

Each part is written to the file of JSON as soon as it has ended. A part that the file has, of this GPU, versions and
day, is not run again. Parts: environment, attention (errors and times of the ways to attend), generate (models of real
shape in four ways), tests (`tests/gpu`), sanitize (kernels under compute-sanitizer). --page writes the tables into a
page. Ends with 1 if tests fail or a kernel is less exact than torch's attention, with 2 without a GPU. Not yet run as a
whole on a GPU; its dry run, with tiny shapes, runs on the tests' twin of a GPU.

Tests: tests/optimizer/test_cuda_twin.py
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

import fastgen
from fastgen.config import CONFIG
from fastgen.ops import shared_attention

REPOSITORY = Path(__file__).resolve().parents[1]
SANITIZER = ["compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no", "--tool", "memcheck"]
BEGIN, END = "<!-- gpu-check: begin -->", "<!-- gpu-check: end -->"  # around what --page replaces
Results = dict[str, dict[str, Any]]


def environment(dry: bool) -> dict[str, Any]:
    versions = {module.__name__: module.__version__ for module in (torch, transformers, fastgen)}
    return {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "dry": dry, **versions}


# Attention: inputs, rows per input, key heads, query heads of each, prompt, generated, width, dtype, with a mask.
ATTENTION = {
    "BART-large, 128 inputs, beam 4": (128, 4, 16, 1, 1024, 32, 64, torch.float16, False),
    "Llama-8B, 4 inputs, 16 samples": (4, 16, 8, 4, 2048, 128, 128, torch.bfloat16, False),
    "the same, with a mask": (4, 16, 8, 4, 2048, 128, 128, torch.bfloat16, True),
    "Llama-8B, 1 input, beam 4": (1, 4, 8, 4, 512, 64, 128, torch.bfloat16, True),
    "8 query heads for each key head": (4, 4, 4, 8, 1024, 64, 128, torch.bfloat16, True),
    "T5-base, 8 inputs, beam 4": (8, 4, 12, 1, 128, 32, 64, torch.float32, True),
}


def attention(dry: bool) -> dict[str, Any]:
    """Returns microseconds in a CUDA graph, and relative errors against fp64, of the ways to attend."""
    triton_kernels = shared_attention._triton_attention(torch.device("cuda"))
    results = {}
    for name, (inputs, rows_per_input, kv_heads, groups, prompt, generated, width, dtype, masked) in ATTENTION.items():
        if dry:
            inputs, prompt, generated = 2, 24, 5
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
            "torch's products": partial(shared_attention.attention_by_products, query, keys, values, mask, scale),
        }
        if triton_kernels is not None:
            ways["Triton"] = partial(triton_kernels.attention, query, keys, values, mask, scale)
        doubles = (tensor[few].double() for tensor in (query, *repeated))
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
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        for _ in range(calls):
            call()
        graph.capture_end()
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
    """A model of transformers. Of a large one a few layers are enough, because they are alike."""

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
T5_BASE = {
    "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "eos_token_id": None,
    "decoder_start_token_id": 0,
}  # fmt: skip
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
    "T5-base, 8 × 256, beam 4": Model("T5", T5_BASE, (8, 256), BEAMS),
    "GPT-2, 4 × 512, beam 4, fp32": Model(
        "GPT2", {"pad_token_id": 50256, "eos_token_id": None}, (4, 512), BEAMS, torch.float32
    ),
}
TINY = {
    "Llama": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "Bart": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    },
    "T5": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 600, "pad_token_id": 0, "bos_token_id": 1},
}  # fmt: skip
WAYS = {
    "stock": None,
    "graphs off": ("off", True),
    "graphs, torch's attention": ("auto", False),
    "fastgen": ("auto", True),
}
CLASSES = {
    "Llama": "LlamaForCausalLM",
    "Bart": "BartForConditionalGeneration",
    "T5": "T5ForConditionalGeneration",
    "GPT2": "GPT2LMHeadModel",
}


def generate(dry: bool) -> dict[str, Any]:
    """Returns seconds of a call and milliseconds of a step in each way, and how many tokens are those of stock."""
    return {name: _times(_tiny(model) if dry else model, "cpu" if dry else "cuda") for name, model in MODELS.items()}


def _tiny(model: Model) -> Model:
    config = {**model.config, "vocab_size": 600, **TINY[model.kind]}
    config |= {"num_hidden_layers": 2} if model.kind == "Llama" else {}
    return replace(model, config=config, shape=(min(2, model.shape[0]), 12), dtype=torch.float32, new_tokens=26)


def _times(case: Model, made_on: str) -> dict[str, Any]:
    """Measures a model. made_on: the device on which its weights are drawn."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{case.kind}Config")(**case.config)
    with torch.device(made_on):
        model = getattr(transformers, CLASSES[case.kind])(config)
    model = model.to(case.dtype).eval().cuda()
    ids = torch.randint(10, config.vocab_size, case.shape).cuda()

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
    before = CONFIG.cuda_graphs, CONFIG.cuda_kernels
    first = {way: call(way, many)[0] for way in WAYS}
    turns = [{way: (call(way, few)[0], call(way, many)) for way in WAYS} for _ in range(3)]
    CONFIG.cuda_graphs, CONFIG.cuda_kernels = before
    results = {}
    for way in WAYS:
        short, long = (
            statistics.median(turn[way][0] for turn in turns),
            statistics.median(turn[way][1][0] for turn in turns),
        )
        equal = (turns[-1][way][1][1] == turns[-1]["stock"][1][1]).float().mean().item()
        step = (long - short) / (many - few) * 1e3
        results[way] = {"first_s": first[way], "s": long, "ms_per_step": step, "equal_tokens": equal}
    return results


def tests(dry: bool) -> dict[str, Any]:
    """Runs tests/gpu, or one of its tests; returns the last lines and the status."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:randomly"]
    if dry:
        test = "test_captured_steps_cuda.py::test_a_failed_capture_warns_once_and_leaves_no_trace"
        return _ended([*command, "-p", "cuda_twin", f"tests/gpu/{test}"], 15, FASTGEN_STRICT="1")
    return _ended([*command, "tests/gpu"], 15, FASTGEN_STRICT="1")


def sanitize(dry: bool) -> dict[str, Any]:
    """Runs the n-gram kernels under memcheck; returns the last lines and the status, None if the tool is missing."""
    if not shutil.which(SANITIZER[0]):
        return {"status": None, "end": [f"{SANITIZER[0]} is not on the PATH"]}
    command = [*SANITIZER, sys.executable, "tests/gpu/sanitize_no_repeat_ngram.py"]
    return _ended(command, 5, PYTHONPATH=str(REPOSITORY / "tests" / "helpers"))


def _ended(command: list[str], lines: int, **environment: str) -> dict[str, Any]:
    process = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    return {"status": process.returncode, "end": (process.stderr + process.stdout).splitlines()[-lines:]}


PARTS = {part.__name__: part for part in (environment, attention, generate, tests, sanitize)}


def failures(results: Results) -> list[str]:
    """Returns a message for each failed part, and for each kernel that is less exact than stock's attention."""
    statuses = {part: results.get(part, {}).get("status") for part in ("tests", "sanitize")}
    messages = [f"{part} ended with status {status}" for part, status in statuses.items() if status]
    for name, ways in results.get("attention", {}).items():
        error, stock = ways.get("Triton", ways["stock"])["error"], ways["stock"]["error"]
        if error > 1.1 * stock + 1e-6:
            messages.append(f"attention, {name}: error {error:.1e}, stock {stock:.1e}")
    return messages


def page(results: Results) -> Iterator[str]:
    """Yields the lines of Markdown that say what was measured."""
    facts = results["environment"]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "fastgen"))
    what = "A dry run with tiny shapes, whose figures say nothing" if facts["dry"] else "`make gpu-check`"
    yield f"{what}: {facts['gpu']}, {facts['date']}, {versions}."
    if "attention" in results:
        yield from ("", "Attention of one layer in a CUDA graph, µs, and its relative error against fp64:", "")
        yield from _table(results["attention"], lambda way: f"{way['us']:.0f}, {way['error']:.1e}")
    if "generate" in results:
        yield from (
            "",
            "Seconds of a call, milliseconds of a step, and the part of tokens that are those of stock:",
            "",
        )
        yield from _table(
            results["generate"],
            lambda way: f"{way['s']:.3f} s, {way['ms_per_step']:.2f} ms, {way['equal_tokens']:.0%}",
        )
    for part in ("tests", "sanitize"):
        if part in results:
            status = results[part]["status"]
            outcome = "not run" if status is None else f"status {status}"
            yield from ("", f"{part}: {outcome}, `{' '.join(results[part]['end'][-1:])}`")


def _table(rows: dict[str, dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    columns = list(dict.fromkeys(way for ways in rows.values() for way in ways))
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, ways in rows.items():
        yield f"| {name} | {' | '.join(cell(ways[way]) if way in ways else '' for way in columns)} |"


def write_page(path: Path, results: Results) -> None:
    """Replaces the part of a page between the two marks; a page that is not there holds nothing else."""
    before, _, rest = (path.read_text(encoding="utf-8") if path.exists() else "").partition(BEGIN)
    lines = [before + BEGIN, "", *page(results), "", END + rest.partition(END)[2]]
    path.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="the file of results")
    parser.add_argument("--page", type=Path, help="the page to write what was measured into")
    parser.add_argument("--dry", action="store_true", help="tiny shapes and one test, to see that each part runs")
    flags = parser.parse_args(arguments)
    if unknown := set(flags.parts) - PARTS.keys():
        parser.error(f"PART {', '.join(sorted(unknown))} (accepted: {', '.join(PARTS)})")
    if not torch.cuda.is_available():
        print("torch finds no GPU: nothing was checked", file=sys.stderr)
        return 2
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    results = json.loads(flags.json.read_text()) if flags.json.exists() else {}
    if results.get("environment") != environment(flags.dry):
        results = {"environment": environment(flags.dry)}
    for name in flags.parts or PARTS:
        if name in results and not results[name].get("status"):
            print(f"{name}: already in {flags.json}")
        else:
            begun = time.perf_counter()
            results[name] = PARTS[name](flags.dry)
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
        flags.json.write_text(json.dumps(results, indent=2))
    print("\n".join(page(results)))
    if flags.page is not None:
        write_page(flags.page, results)
    for message in (messages := failures(results)):
        print(f"FAILED: {message}", file=sys.stderr)
    return bool(messages)


if __name__ == "__main__":
    sys.exit(main())
