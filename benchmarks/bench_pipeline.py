"""fastgen-generate-for-transformers against the loop that a user would write, and its pipeline against the model alone.

    python benchmarks/bench_pipeline.py [loop] [sleep] [memory] [--lines 20000] [--floors FILE] [--json FILE]

The input is as many lines, 4 to 122 tokens long, drawn from the demo model's sample; beam 4, batches of 32.

loop: seconds of the loop (tokenizer, generate, batch_decode, batches as the lines stand in the file) without fastgen
    and with it, and of the command, in turns, on a tenth of the lines; outputs are compared line by line.
sleep: the command with the model call replaced by a sleep as long as the call took in a run before, and by what it
    returned there: seconds of sleep alone by those from the first line read to OUTPUT renamed.
memory: largest resident memory of the command's process, that of a tenth of the lines by that of all.

--floors takes a file of the ratios to reach (floors.json); the status is 1 where one is missed, or a line differs.
"""

from __future__ import annotations

import os
import random
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
from clock import in_turns, medians, times_as_fast
from harness import below, finish, parse_flags, parser_of
from machine import print_head

import fastgen
from fastgen.batch import pipeline
from fastgen.cli.transformers.command import main
from fastgen.models.demo import demo_path

BS = 32
SETTINGS = {"num_beams": 4}
FLAGS = ("--bs", str(BS), "--beam", "4", "--quiet", "--overwrite")
CASES = ("loop", "sleep", "memory")


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


def bench_loop(folder: Path, lines: int, repeats: int) -> dict[str, Any]:
    source = write_input(folder / "loop.txt", lines)
    jobs = {"stock": stock_loop, "loop with fastgen": user_loop, "fastgen": run_command}
    ways: dict[str, Callable[[], None]] = {
        way: lambda way=way: jobs[way](source, folder / f"{way}.out") for way in jobs
    }
    turns = []
    for seconds, _ in in_turns(ways, repeats):
        turns.append(seconds)
        print("loop:", ", ".join(f"{way} {one:.2f} s" for way, one in seconds.items()), flush=True)
    outputs = {way: (folder / f"{way}.out").read_text(encoding="utf-8").splitlines() for way in ways}
    same = sum(len(set(texts)) == 1 for texts in zip(*outputs.values(), strict=True))
    ratios = {"stock": times_as_fast(turns)}
    return {"seconds": medians(turns), "turns": turns, "ratios": ratios, "same": same, "lines": lines}


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
    ratios = {"sleep alone": recorded.asleep / spans[0]}
    return {"lines": lines, "asleep": recorded.asleep, "seconds": spans[0], "ratios": ratios}


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
    return {"lines": lines, "MB": largest, "ratios": {"a tenth": small / large}}


def main_benchmark(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES, "turns of the loop")
    parser.add_argument("--lines", type=int, default=20_000, help="of the input (default 20000)")
    args = parse_flags(parser, argv, "pipeline", CASES)
    print_head()
    results, missed = [], []
    with tempfile.TemporaryDirectory() as name:
        for case in args.cases:
            if case == "loop":
                result = bench_loop(Path(name), args.lines // 10, args.repeats)
            else:
                result = (bench_sleep if case == "sleep" else bench_memory)(Path(name), args.lines)
            results.append({"case": case, **result})
            print({key: value for key, value in results[-1].items() if key != "turns"}, flush=True)
            missed += below(case, result["ratios"], args.floors)
            if result.get("same", args.lines) < result["lines"]:
                missed.append(f"{case}: lines differ")
    return finish(args, results, missed)


if __name__ == "__main__":
    raise SystemExit(main_benchmark())
