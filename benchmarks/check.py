"""A quick run of the benchmarks against the committed results of this CPU: whether something has become slower.

    python benchmarks/check.py [BENCHMARK …] [--repeats 2] [--noise 0.1]

Runs a few short cases and compares their ratios to stock with those of benchmarks/results. The
status is 1 where a ratio is lower by more than --noise, a part of it, or where an output differs, and 2 where there is
nothing of this CPU to compare with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import cpu, describe_cpu
from papers import PARTS

HERE = Path(__file__).parent

# By benchmark, cases of a few seconds each.
QUICK: dict[str, tuple[str, ...]] = {
    "generate": ("bart-beam4-one-row", "whisper-beam5", "gpt2-beam4", "gpt2-greedy-one-row"),
    "fairseq": ("bart-batch1", "wmt-beam5"),
    "prefix": ("classify16", "short2"),
    "rollouts": ("g8",),
    "best_batch": ("t5",),
    "quality": ("float32",),
}


def committed(benchmark: str) -> dict[str, float]:
    """The ratios to stock of each case that were measured on a CPU like this one, also for the tables of the papers."""
    parts = [name for name, part in PARTS.items() if part.benchmark == f"bench_{benchmark}.py"]
    found: dict[str, float] = {}
    for pattern in (f"{benchmark}-*.json", *(f"papers-*/{name}.json" for name in parts)):
        for path in (HERE / "results").glob(pattern):
            told = json.loads(path.read_text(encoding="utf-8"))
            found |= ratios(told) if told["cpu"] == cpu() and "gpu" not in told else {}
    return found


def ratios(told: Mapping[str, Any]) -> dict[str, float]:
    return {result["case"]: result.get("ratios", {}).get("stock", result.get("ratio")) for result in told["results"]}


def slower(found: Mapping[str, float], before: Mapping[str, float], noise: float) -> list[str]:
    """A sentence for each case whose ratio is lower than the committed one by more than this part of it."""
    lowest = {case: before[case] * (1 - noise) for case in found if case in before}
    return [
        f"{case}: {found[case]:.2f} times as fast as stock, {before[case]:.2f} when it was committed"
        for case, least in lowest.items()
        if found[case] < least
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"of {', '.join(QUICK)}; default: all")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each case (default 2)")
    parser.add_argument("--noise", type=float, default=0.1, metavar="PART", help="of a ratio (default 0.1)")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.benchmarks) - set(QUICK)):
        parser.error(f"BENCHMARK {unknown[0]!r}: choose from {', '.join(QUICK)}")
    before = {name: found for name in args.benchmarks or QUICK if (found := committed(name))}
    if not before:
        print(f"no results of {describe_cpu()} in benchmarks/results: bench_NAME.py --json writes them")
        return 2
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, expected in before.items():
            told = Path(folder, name)
            command = [sys.executable, str(HERE / f"bench_{name}.py"), *QUICK[name]]
            done = subprocess.run([*command, "--repeats", str(args.repeats), "--json", str(told)], check=False)
            if done.returncode:
                status = 1
                continue
            missed = slower(ratios(json.loads(told.read_text(encoding="utf-8"))), expected, args.noise)
            print("\n".join(missed), end="\n" * bool(missed))
            status = status or int(bool(missed))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
