"""`make gpu-check`: the checks that need a GPU, in about ten minutes, part by part.

    python tools/gpu_check.py [PART …] [--json gpu-check.json] [--page FILE]

Each part is written to the file of JSON as soon as it has ended. A part that the file has, of this GPU, versions,
kernels and day, is not run again. If a part raises, or its process takes too long, its error is written instead, the
next parts run, and the next call runs it again. The parts, and the minutes that each should take:

    environment              versions, the GPU, fastgen's kernels for it
    attention    1           errors and times of the ways to attend
    break_even   1           from what size on a shared prompt is faster
    parity       1.5         ten architectures with and without fastgen, in fp32 and bf16
    generate     3           models of real shape in four ways (gpu_models.py)
    tests        2           captured steps and what can go wrong around them, kernels
    sanitize     1           kernels under compute-sanitizer

--page writes the tables into a page. Ends with 1 if a part raises, tests fail, a model in fp32 has other tokens or a
kernel is less exact than torch's attention, with 2 without a GPU. Not yet run as a whole on a GPU; its dry run, with
tiny shapes, runs on the tests' twin of a GPU.

Tests: tests/test_gpu_check.py, tests/optimizer/test_cuda_twin.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_models import MODELS, generate
from torch import Tensor
from torch.nn import functional

import fastgen
from fastgen.ops import kernels, shared_attention
from fastgen.ops.kernel import tolerance
from fastgen.optimizer.decoding.cost_model import CostModel
from fastgen.optimizer.decoding.kv_cache import should_share
from fastgen.testing import configured

REPOSITORY = Path(__file__).resolve().parents[1]
SANITIZER = ["compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no", "--tool", "memcheck"]
SECONDS = {"tests": 300, "sanitize": 120}  # after which the process of a part is killed
BEGIN, END = "<!-- gpu-check: begin -->", "<!-- gpu-check: end -->"  # around what --page replaces
Results = dict[str, dict[str, Any]]


def environment(dry: bool) -> dict[str, Any]:
    versions = {module.__name__: module.__version__ for module in (torch, transformers, fastgen)}
    states = {name: [str(kernel) for kernel in listed if kernel.device == "cuda"] for name, listed in kernels().items()}
    states = {name: listed for name, listed in states.items() if listed}
    day = time.strftime("%Y-%m-%d")
    return {"gpu": torch.cuda.get_device_name(), "date": day, "dry": dry, **versions, "kernels": states}


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
    """Returns microseconds in a CUDA graph, and relative errors against fp64, of the ways to attend.

    fastgen: the kernel that it chooses, which is not Triton's in fp32, or if Triton is missing.
    """
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
            "fastgen": partial(shared_attention.shared_attention, query, keys, values, mask, scale),
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
        try:
            for _ in range(calls):
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
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


# Attention whose prompt grows until sharing it is faster: rows of one input, heads, width; bf16, without a mask.
ROWS, HEADS, WIDTH, GENERATED = 16, 8, 128, 64
LENGTHS, DRY_LENGTHS = [16 << power for power in range(11)], [16, 32]


def break_even(dry: bool) -> dict[str, Any]:
    """Returns in how many saved megabytes sharing a prompt breaks even.

    measured: in this attention, None if never; by_rates: by `should_share`, with the rates of an H200.
    """
    triton_kernels = shared_attention._triton_attention(torch.device("cuda"))
    ways = {
        "eager": (_eager_us, shared_attention.attention_by_products),
        "in a graph": (_graph_us, shared_attention.attention_by_products),
    }
    if triton_kernels is not None:
        ways["in a graph, Triton"] = _graph_us, triton_kernels.attention
    results = {}
    for way, (us_of, attention) in ways.items():
        faster_from = None
        for length in reversed(DRY_LENGTHS if dry else LENGTHS):
            stock, shared, saved_bytes = _attentions(length, attention)
            if us_of(shared) >= us_of(stock):
                break
            faster_from = saved_bytes / 1e6
        with configured(cuda_kernels="Triton" in way, share="auto"):
            by_rates = _break_even(CostModel(), way != "eager")
        results[way] = {"measured": faster_from, "by_rates": by_rates}
    return results


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


def _eager_us(call: Callable[[], Tensor], calls: int = 20) -> float:
    call()
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e6 / calls)
    return statistics.median(times)


NAMES = ("gpt2", "llama", "qwen3", "gemma2", "mixtral", "bloom", "bart", "m2m_100", "t5", "whisper")
# The largest differences of scores; in bf16 those of the first steps, which are within 0.05 on the twin of a GPU.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.2}


def parity(dry: bool) -> dict[str, Any]:
    """Returns for tiny models, with prompts shared: equal tokens, the largest difference of scores, replayed steps.

    Models, inputs and comparisons are those of the tests, in tests/helpers. In bf16 rounding decides between close
    tokens: they are counted, and only the scores of the first steps are compared.
    """
    from architecture_parity import MODES, measure
    from architectures import BY_NAME
    from parity import run_both
    from reports import capturing
    from tiny_models import lively

    results: dict[str, Any] = {}
    for name, dtype in itertools.product(NAMES[-2:] if dry else NAMES, TOLERANCES):
        model = lively(BY_NAME[name].model()).to(dtype).cuda()
        inputs = {key: value.cuda() for key, value in BY_NAME[name].inputs().items()}
        inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
        differences, equal, replayed = [], [], 0
        with configured(share="always"), capturing():
            for mode in MODES:
                scores = measure(model, inputs, mode, new_tokens=12 if dtype == torch.float32 else 2)
                differences.append(scores.largest_score_difference)
                stock, tokens, report = run_both(partial(_tokens, model, {**inputs, **MODES[mode]}))
                equal.append(torch.equal(stock, tokens))
                replayed += report.replays
        cell = {"equal": sum(equal), "of": len(equal), "difference": max(differences), "replayed": replayed}
        results.setdefault(name, {})[str(dtype).removeprefix("torch.")] = cell
    return results


def _tokens(model: torch.nn.Module, arguments: dict[str, Any]) -> Tensor:
    torch.manual_seed(1)
    return model.generate(**arguments, min_new_tokens=12, max_new_tokens=24)


def _parity_cell(cell: dict[str, Any]) -> str:
    return f"{cell['equal']} of {cell['of']}, {cell['difference']:.0e}, {cell['replayed']}"


# Captured steps and whatever can go wrong around them, and the kernels. `make test-gpu` runs the others too.
FILES = (
    "test_captured_steps_cuda.py",
    "test_triton_attention_cuda.py",
    "test_no_repeat_ngram_cuda.py",
    "test_checksums_cuda.py",
)


def tests(dry: bool) -> dict[str, Any]:
    """Runs `FILES` of tests/gpu, or one of their tests; returns the last lines and the status."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:randomly"]
    if dry:
        test = f"{FILES[0]}::test_a_failed_capture_warns_once_and_leaves_no_trace"
        command += ["-p", "cuda_twin", f"tests/gpu/{test}"]
    else:
        command += [f"tests/gpu/{name}" for name in FILES]
    return _ended(command, 15, SECONDS["tests"], FASTGEN_STRICT="1")


def sanitize(dry: bool) -> dict[str, Any]:
    """Runs the n-gram kernels under memcheck; returns the last lines and the status, None if the tool is missing."""
    if not shutil.which(SANITIZER[0]):
        return {"status": None, "end": [f"{SANITIZER[0]} is not on the PATH"]}
    command = [*SANITIZER, sys.executable, "tests/gpu/sanitize_no_repeat_ngram.py"]
    return _ended(command, 5, SECONDS["sanitize"], PYTHONPATH=str(REPOSITORY / "tests" / "helpers"))


def _ended(command: list[str], lines: int, seconds: float, **environment: str) -> dict[str, Any]:
    """Runs a command; returns its status and last lines. Raises subprocess.TimeoutExpired after so many seconds."""
    environment = os.environ | environment
    process = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=seconds
    )
    return {"status": process.returncode, "end": (process.stderr + process.stdout).splitlines()[-lines:]}


PARTS = {part.__name__: part for part in (environment, attention, break_even, parity, generate, tests, sanitize)}


def run(names: Iterable[str], results: Results, file: Path, dry: bool) -> None:
    """Runs these parts, but for those that have ended well, and writes all results to the file after each."""
    for name in names:
        if name in results and "error" not in results[name] and results[name].get("status", 0) == 0:
            print(f"{name}: already in {file}")
        else:
            begun = time.perf_counter()
            try:
                results[name] = PARTS[name](dry)
            except Exception as error:
                traceback.print_exc()
                first_line = str(error).partition("\n")[0]  # torch's other lines say how to debug
                results[name] = {"error": f"{type(error).__name__}: {first_line}"}
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
        file.write_text(json.dumps(results, indent=2))


def _split(results: Results) -> tuple[Results, dict[str, str]]:
    """Returns the results of the parts that have ended, and the errors of the others."""
    errors = {part: result["error"] for part, result in results.items() if "error" in result}
    return {part: result for part, result in results.items() if part not in errors}, errors


def failures(results: Results) -> list[str]:
    """Returns a message for each failed part, each model without parity, and each kernel less exact than stock's.

    In half precision stock's tokens are not expected: rounding decides between close ones. fastgen without Triton may
    round scores, which stock does not.
    """
    results, errors = _split(results)
    messages = [f"{part}: {error}" for part, error in errors.items()]
    statuses = {part: results.get(part, {}).get("status") for part in SECONDS}
    messages += [f"{part} ended with status {status}" for part, status in statuses.items() if status]
    for name, ways in results.get("attention", {}).items():
        *_, dtype, _ = ATTENTION[name]
        stock = ways["stock"]["error"]
        for way, most in {"Triton": 1.1 * stock + 1e-6, "fastgen": tolerance("product", dtype)}.items():
            if way in ways and not ways[way]["error"] <= most:
                messages.append(f"attention, {name}: {way}'s error {ways[way]['error']:.1e}, stock's {stock:.1e}")
    tolerances = {str(dtype).removeprefix("torch."): most for dtype, most in TOLERANCES.items()}
    for name, dtypes in results.get("parity", {}).items():
        for dtype, cell in dtypes.items():
            is_equal = cell["equal"] == cell["of"] or dtype != "float32"
            if not (is_equal and cell["difference"] <= tolerances[dtype]):
                messages.append(f"parity, {name}, {dtype}: {_parity_cell(cell)}")
    for name, ways in results.get("generate", {}).items():
        if not ways["fastgen"]["replayed"]:
            messages.append(f"generate, {name}: no step was captured")
        if name in MODELS and MODELS[name].dtype == torch.float32:
            others = {way: cell["equal_tokens"] for way, cell in ways.items() if cell["equal_tokens"] < 1}
            messages += [f"generate, {name}, {way}: {equal:.0%} of stock's tokens" for way, equal in others.items()]
    return messages


def page(results: Results) -> Iterator[str]:
    """Yields the lines of Markdown that say what was measured."""
    results, errors = _split(results)
    facts = results["environment"]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "fastgen"))
    what = "A dry run with tiny shapes, whose figures say nothing" if facts["dry"] else "`make gpu-check`"
    yield f"{what}: {facts['gpu']}, {facts['date']}, {versions}."
    listed = "; ".join(f"{name} ({', '.join(states)})" for name, states in facts["kernels"].items())
    yield from ("", f"Kernels: {listed}.")
    if "attention" in results:
        yield from ("", "Attention of one layer in a CUDA graph, µs, and its relative error against fp64:", "")
        yield from _table(results["attention"], lambda way: f"{way['us']:.0f}, {way['error']:.1e}")
    if "break_even" in results:
        yield from (
            "",
            "MB that a prompt stored once must save in a layer, measured and by the rates of an H200:",
            "",
        )
        yield from _table(results["break_even"], lambda cell: "never" if cell is None else f"{cell:.3g}")
    if "parity" in results:
        yield from (
            "",
            "Tiny models: ways with the tokens of stock, difference of scores, replayed steps:",
            "",
        )
        yield from _table(results["parity"], _parity_cell)
    if "generate" in results:
        yield from (
            "",
            "Seconds of a call, milliseconds of a step, tokens that are those of stock, and replayed steps:",
            "",
        )
        yield from _table(
            results["generate"],
            lambda way: f"{way['s']:.3f} s, {way['ms_per_step']:.2f} ms, {way['equal_tokens']:.0%}, {way['replayed']}",
        )
    for part in SECONDS:
        if part in results:
            status = results[part]["status"]
            outcome = "not run" if status is None else f"status {status}"
            yield from ("", f"{part}: {outcome}, `{' '.join(results[part]['end'][-1:])}`")
    for part, error in errors.items():
        yield from ("", f"{part}: not ended, `{error}`")


def _table(rows: dict[str, dict[str, Any]], cell: Callable[[Any], str]) -> Iterator[str]:
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
    sys.path.append(str(REPOSITORY / "tests" / "helpers"))
    transformers.logging.set_verbosity_error()  # about lengths that Whisper is given twice
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    results = json.loads(flags.json.read_text()) if flags.json.exists() else {}
    present = environment(flags.dry)
    if results.get("environment") != present:
        results = {"environment": present}
    run(flags.parts or PARTS, results, flags.json, flags.dry)
    print("\n".join(page(results)))
    if flags.page is not None:
        write_page(flags.page, results)
    for message in (messages := failures(results)):
        print(f"FAILED: {message}", file=sys.stderr)
    return bool(messages)


if __name__ == "__main__":
    sys.exit(main())
