"""fastgen-generate-for-transformers against the loop that a user would write, and its pipeline against the model alone.

    python benchmarks/bench_pipeline.py [loop] [sleep] [memory] [--lines 20000] [--repeats 3] [--json FILE]

The input is as many lines, 4 to 122 tokens long, drawn from the demo model's sample; beam 4, batches of 32.

loop: seconds of the loop (tokenizer, generate, batch_decode, batches as the lines stand in the file) without fastgen
    and with it, and of the command, alternately, on the first LOOP_LINES lines; outputs are compared line by line.
sleep: the command with the model call replaced by a sleep as long as the call took in a run before, and by what it
    returned there: seconds from the first line read to OUTPUT renamed, over the seconds of sleep alone.
memory: largest resident memory of the command's process with a tenth of the lines and with all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import fastgen
from fastgen.cli.transformers import pipeline
from fastgen.cli.transformers.command import main
from fastgen.models.demo import demo_path

BS = 32
SETTINGS = {"num_beams": 4}
FLAGS = ("--bs", str(BS), "--beam", "4", "--quiet", "--overwrite")
LOOP_LINES = 2000

LOOP_FLOOR = 1.3
SLEEP_CEILING = 1.03
MEMORY_CEILING_MB = 50


def write_input(path: Path, lines: int) -> Path:
    sample = (demo_path() / "sample.txt").read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(random.Random(1).choices(sample, k=lines)) + "\n", encoding="utf-8")
    return path


def user_loop(source: Path, output: Path) -> None:
    """What a user would write."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_path())
    device = "cuda" if torch.cuda.is_available() else "cpu"  # what the command takes
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(demo_path()).eval().to(device)
    lines = source.read_text(encoding="utf-8").splitlines()
    with output.open("w", encoding="utf-8") as file:
        for start in range(0, len(lines), BS):
            batch = tokenizer(lines[start : start + BS], padding=True, return_tensors="pt").to(device)
            sequences = model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **SETTINGS)
            for text in tokenizer.batch_decode(sequences, skip_special_tokens=True):
                file.write(text + "\n")


def run_command(source: Path, output: Path) -> None:
    if status := main(["demo", str(source), str(output), *FLAGS]):
        raise SystemExit(f"the command ended with status {status}")


def stock_loop(source: Path, output: Path) -> None:
    with fastgen.disabled():
        user_loop(source, output)


def bench_loop(folder: Path, repeats: int) -> dict[str, Any]:
    source = write_input(folder / "loop.txt", LOOP_LINES)
    ways: dict[str, Callable[[Path, Path], None]] = {
        "loop": stock_loop,
        "loop with fastgen": user_loop,
        "command": run_command,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in list(ways)[:: 1 if repeat % 2 == 0 else -1]:
            begun = time.perf_counter()
            ways[name](source, folder / f"{name}.out")
            seconds[name].append(time.perf_counter() - begun)
            print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    outputs = {name: (folder / f"{name}.out").read_text(encoding="utf-8").splitlines() for name in ways}
    equal = sum(a == b for a, b in zip(outputs["loop"], outputs["command"], strict=True))
    ratios = {
        f"command over {name}": statistics.median(a / b for a, b in zip(seconds[name], seconds["command"]))
        for name in ("loop", "loop with fastgen")
    }
    return {
        "seconds": {k: statistics.median(v) for k, v in seconds.items()},
        **ratios,
        "equal": equal,
        "of": LOOP_LINES,
    }


class Recorded:
    """A generate method that sleeps as long as the model needed for the same batch, and returns what that gave."""

    def __init__(self, original: Callable[..., torch.Tensor]) -> None:
        self.original = original
        self.answers: dict[bytes, tuple[torch.Tensor, float]] = {}
        self.asleep = 0.0

    def record(self, model: Any, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        begun = time.perf_counter()
        sequences = self.original(model, input_ids=input_ids, **settings)
        self.answers[input_ids.numpy().tobytes()] = (sequences, time.perf_counter() - begun)
        return sequences

    def replay(self, model: Any, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        sequences, seconds = self.answers[input_ids.numpy().tobytes()]
        time.sleep(seconds)
        self.asleep += seconds
        return sequences


def bench_sleep(folder: Path, lines: int) -> dict[str, Any]:
    source = write_input(folder / "sleep.txt", lines)
    kind = transformers.BartForConditionalGeneration
    recorded = Recorded(kind.generate)
    with mock.patch.object(kind, "generate", lambda model, **inputs: recorded.record(model, **inputs)):
        run_command(source, folder / "recorded.out")
    spans = []
    drain = pipeline.Pipeline.drain

    def timed(*args: Any) -> bool:
        begun = time.perf_counter()
        complete = drain(*args)
        spans.append(time.perf_counter() - begun)
        return complete

    with (
        mock.patch.object(kind, "generate", lambda model, **inputs: recorded.replay(model, **inputs)),
        mock.patch.object(pipeline.Pipeline, "drain", timed),
    ):
        run_command(source, folder / "slept.out")
    if (folder / "slept.out").read_bytes() != (folder / "recorded.out").read_bytes():
        raise SystemExit("the outputs of both runs differ")
    return {"lines": lines, "asleep": recorded.asleep, "seconds": spans[0], "ratio": spans[0] / recorded.asleep}


def bench_memory(folder: Path, lines: int) -> dict[str, Any]:
    largest = {}
    for number in (lines // 10, lines):
        source = write_input(folder / f"{number}.txt", number)
        call = [
            sys.executable,
            "-m",
            "fastgen.cli.transformers.command",
            "demo",
            source,
            folder / "memory.out",
            *FLAGS,
        ]
        process = subprocess.Popen(call, env=os.environ | {"FASTGEN_LOG": "warning"})
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"the command ended with status {status}")
        largest[number] = usage.ru_maxrss / 1024
    small, large = largest.values()
    return {"MB": largest, "growth_MB": large - small}


def main_benchmark() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", metavar="CASE", nargs="*", help="of loop, sleep, memory; default: all")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    args = parser.parse_args()
    cases = args.cases or ["loop", "sleep", "memory"]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "loop" in cases:
            results["loop"] = bench_loop(folder, args.repeats)
        if "sleep" in cases:
            results["sleep"] = bench_sleep(folder, args.lines)
        if "memory" in cases:
            results["memory"] = bench_memory(folder, args.lines)
    print(json.dumps(results, indent=2))
    print(f"floors: command {LOOP_FLOOR}x the loop, sleep at most {SLEEP_CEILING}, memory {MEMORY_CEILING_MB} MB")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main_benchmark()
