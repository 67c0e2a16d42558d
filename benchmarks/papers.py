"""The papers' tables: a run of their cases in parts, each in a process of its own, and a file for each part.

The files are benchmarks/results/papers-MACHINE/PART.json. A part that has a file of this commit is skipped: a run that
was interrupted resumes. Threads spin as briefly as in the commands, so that other programs disturb less.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import torch
from measure import commit, cpu, describe_cpu

from fastgen.batch.threads import SPIN_COUNT

RESULTS = Path(__file__).parent / "results"


class Part(NamedTuple):
    """Arguments of `bench.py run`. on_gpu: further ones on a GPU, or None if the part does not run there."""

    arguments: tuple[str, ...]
    on_gpu: tuple[str, ...] | None = ("--device", "cuda", "--dtype", "float16")


_MULTI_QUERY = tuple(f"mqa/{name}" for name in ("multi-head", "multi-query", "multi-head local", "multi-query local"))
PARTS = {
    **{f"table1-{model}": Part((f"table1-{model}",)) for model in ("bart", "distilbart", "t5", "gpt2", "unilm")},
    **{f"table1-{model}": Part((f"fairseq/table1-{model}",)) for model in ("prophetnet", "wmt")},
    "table2-pipeline": Part(("pipeline/loop", "--set", "lines=200", "--repeats", "1"), on_gpu=None),
    "table3": Part(("ngram/own-128x128-3", "ngram/own-128x1024-3")),
    "multi-query": Part((*_MULTI_QUERY, "--set", "length=40", "--repeats", "1")),
    "seamless": Part(("seamless/v2", "--set", "layers=3", "--repeats", "1")),
}


def machine(device: str) -> str:
    """Returns a name for files, such as "amd-epyc-25-17"."""
    facts = cpu()
    names = [facts[key] for key in ("name", "family", "model") if key in facts]
    names = [torch.cuda.get_device_name()] if device == "cuda" else names
    return re.sub(r"[^a-z0-9]+", "-", " ".join(names).lower()).strip("-")


def measure_part(part: Part, path: Path, args: Namespace) -> int:
    """Runs a part; its file appears only when complete, even if the status is 1."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("bench.py")), "run", *part.arguments]
    command += [*(part.on_gpu or ())] * (args.device == "cuda") + ["--json", str(unfinished)]
    command += ["--floors", args.floors] if args.floors else []
    status = subprocess.run(command, env={"GOMP_SPINCOUNT": str(SPIN_COUNT), **os.environ}, check=False).returncode
    if unfinished.exists():
        os.replace(unfinished, path)
    return status


def run(args: Namespace) -> int:
    """Measures the parts that `args.only` names, or all; returns 1 if one failed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU was found: nothing was measured")
        return 0
    folder, commit_name, failed = RESULTS / f"papers-{machine(args.device)}", commit(), []
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{describe_cpu()}, commit {commit_name}, results in {folder}", flush=True)
    end = time.monotonic() + args.seconds
    for name, part in PARTS.items():
        path = folder / f"{name}.json"
        if (args.only and name not in args.only) or (args.device == "cuda" and part.on_gpu is None):
            continue
        is_done = path.exists() and json.loads(path.read_text(encoding="utf-8"))["commit"] == commit_name
        if is_done and not args.again:
            print(f"{name}: done before", flush=True)
            continue
        if time.monotonic() > end:
            print(f"{name}: not measured, {args.seconds:g} seconds are over", flush=True)
            continue
        print(f"{name}:", flush=True)
        failed += [name] * bool(measure_part(part, path, args))
    print("\n".join(f"{name}: failed" for name in failed), end="\n" * bool(failed))
    return int(bool(failed))
