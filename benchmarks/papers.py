"""Measures the tables and figures of the four papers on this machine, in parts, and writes docs/papers.md.

    python benchmarks/papers.py [--only PART …] [--again] [--device cuda] [--floors FILE]

Each part is a run of a benchmark with some of its cases, in a process of its own, and a file in
benchmarks/results/papers-MACHINE/. A part that has a file of this commit is skipped, so that an interrupted run goes on
where it was; --again measures it all the same. The status is 1 where a part failed: outputs differ, or a ratio is below
its floor. Where --device cuda finds no GPU it says so.

Threads spin as briefly as in the commands (GOMP_SPINCOUNT), so that other programs disturb less. A file says which
share of the CPUs' time these took meanwhile: "others".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import show_papers
import torch
from harness import commit
from machine import cpu, describe_cpu
from paper_tables import TABLE_1

from fastgen.cli.threads import SPIN_COUNT

HERE = Path(__file__).parent
CPU_TIMES = Path("/proc/stat")


class Part(NamedTuple):
    """A run of `benchmark`, a file beside this one, with arguments. on_gpu: more of them there; None: not there."""

    benchmark: str
    arguments: tuple[str, ...]
    on_gpu: tuple[str, ...] | None = ("--device", "cuda", "--dtype", "float16")


MULTI_QUERY = ("multi-head", "multi-query", "multi-head local", "multi-query local")
PARTS = {
    **{f"table1-{model}": Part("bench_best_batch.py", (model, "--repeats", "2")) for model in TABLE_1},
    "table2": Part("bench_ablation.py", ("steps", "--repeats", "1")),
    "table2-pipeline": Part("bench_pipeline.py", ("loop", "--lines", "2000", "--repeats", "1"), on_gpu=None),
    "table3": Part(
        "bench_ngram.py", ("--forms", "own", "--rows", "128", "--lengths", "128", "1024", "--ngram_sizes", "3")
    ),
    "table4": Part("bench_quality.py", ("--lines", "100", "--repeats", "1"), on_gpu=("--device", "cuda")),
    "figure1": Part("bench_ablation.py", ("stages", "--repeats", "1")),
    **{f"growth-{size}": Part("bench_growth.py", (size, "--repeats", "1")) for size in show_papers.GROWTH},
    **{f"multigen-{size}": Part("bench_growth.py", (size, "--repeats", "1")) for size in show_papers.MULTIGEN},
    "multi-query": Part("bench_mqa.py", (*MULTI_QUERY, "--length", "40", "--repeats", "1")),
    "seamless": Part("bench_seamless.py", ("v2", "--layers", "3", "--repeats", "1")),
}


def machine(device: str) -> str:
    """A name for files, such as "amd-epyc-25-17"."""
    found = cpu()
    told = (
        [torch.cuda.get_device_name()]
        if device == "cuda"
        else [found[key] for key in ("name", "family", "model") if key in found]
    )
    return re.sub(r"[^a-z0-9]+", "-", " ".join(told).lower()).strip("-")


def is_done(path: Path, of_now: str) -> bool:
    """Whether the file holds what this commit has measured. of_now: its name."""
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return told.get("commit") == of_now


def busy_seconds() -> float:
    """All that the CPUs have worked since the machine started, also for other machines beside it; 0 if unknown."""
    if not CPU_TIMES.exists():
        return 0.0
    user, nice, system, _idle, _iowait, *others = map(int, CPU_TIMES.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def measure(part: Part, path: Path, device: str, floors: str | None) -> int:
    """Runs a part; its file appears as a whole, also where the status is 1."""
    unfinished = path.with_suffix(".unfinished")
    command = [sys.executable, str(HERE / part.benchmark), *part.arguments, "--json", str(unfinished)]
    command += part.on_gpu or () if device == "cuda" else ()
    command += ["--floors", floors] if floors else []
    begun, busy = time.perf_counter(), busy_seconds()
    process = subprocess.Popen(command, env={"GOMP_SPINCOUNT": str(SPIN_COUNT), **os.environ})
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    others = busy_seconds() - busy - usage.ru_utime - usage.ru_stime
    if unfinished.exists():
        told = json.loads(unfinished.read_text(encoding="utf-8"))
        told |= {"part_seconds": round(seconds), "others": round(max(others, 0) / seconds / (os.cpu_count() or 1), 3)}
        unfinished.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    return os.waitstatus_to_exitcode(status)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--again", action="store_true", help="also measure parts that this commit has measured")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--floors", metavar="FILE", help="JSON of the ratios to reach: benchmarks/floors.json")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.only or ()) - set(PARTS)):
        parser.error(f"--only {unknown[0]}: choose from {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU was found: nothing was measured")
        return 0
    folder = show_papers.RESULTS / f"papers-{machine(args.device)}"
    folder.mkdir(parents=True, exist_ok=True)
    of_now = commit()
    print(f"{describe_cpu()}, commit {of_now}, results in {folder}", flush=True)
    failed = []
    for name, part in PARTS.items():
        path = folder / f"{name}.json"
        if (args.only and name not in args.only) or (args.device == "cuda" and part.on_gpu is None):
            continue
        if not args.again and is_done(path, of_now):
            print(f"{name}: done before", flush=True)
            continue
        print(f"{name}:", flush=True)
        failed += [name] * bool(measure(part, path, args.device, args.floors))
    show_papers.main()
    print("\n".join(f"{name}: failed" for name in failed), end="\n" * bool(failed))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
