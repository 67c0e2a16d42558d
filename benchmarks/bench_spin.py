"""How long OpenMP's threads should spin while they wait: seconds by GOMP_SPINCOUNT, on a quiet machine and a busy one.

    python benchmarks/bench_spin.py [--busy 2] [--repeats 3] [--settings unset 1000 2000 passive] [--floors FILE]

libgomp reads the variable when it is loaded, so each setting has a process of its own. These take turns, one call at a
time, and all others sleep meanwhile. --busy: so many processes that only count run beside them. Printed are medians, in
seconds, with fastgen. --floors takes a file of how many times as fast CHOSEN, which the commands set, has to be as
"unset" (floors.json, for --busy 2); the status is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict

from harness import below, finish, parse_flags, parser_of
from machine import describe_cpu

SETTINGS = ["unset", "1000", "2000", "5000", "10000", "20000", "50000", "passive"]
CHOSEN = "5000"
NEW_TOKENS = {"gpt2-greedy-one-row": 24, "bart-beam4-one-row": 24, "bart-beam4": 8}


def environment(setting: str) -> dict[str, str]:
    """GOMP_SPINCOUNT as told; "passive" is OMP_WAIT_POLICY."""
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    if setting == "unset":
        return clean
    return clean | ({"OMP_WAIT_POLICY": "PASSIVE"} if setting == "passive" else {"GOMP_SPINCOUNT": setting})


def work() -> None:
    """A process of one setting: makes the models, then for each case that is named on stdin prints its seconds."""
    import torch
    from generate_cases import CASES

    import fastgen  # noqa: F401

    torch.manual_seed(0)
    models: dict[type, torch.nn.Module] = {}
    prepared = {}
    for name in NEW_TOKENS:
        model, inputs = CASES[name].make()
        prepared[name] = models.setdefault(type(model), model.eval()), inputs
    del model
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        model, inputs = prepared[name]
        length = {"max_new_tokens": NEW_TOKENS[name], "min_new_tokens": NEW_TOKENS[name]}
        begin = time.perf_counter()
        model.generate(**inputs, **CASES[name].arguments | length)
        print(time.perf_counter() - begin, flush=True)


def start(*command: str, **options: object) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([sys.executable, *command], **(pipes | options))


def ask(process: subprocess.Popen, case: str) -> float:
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def measure(settings: list[str], repeats: int, busy: int) -> dict[tuple[str, str], list[float]]:
    """The seconds of each case and setting."""
    workers = {setting: start(__file__, "--worker", env=environment(setting)) for setting in settings}
    loops: list[subprocess.Popen] = []
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    try:
        for setting, worker in workers.items():
            if worker.stdout.readline().strip() != "ready":
                raise SystemExit(f"the process with {setting} ended")
        for case in NEW_TOKENS:  # the first call measures products and captures steps
            for worker in workers.values():
                ask(worker, case)
        loops += [start("-c", "while True: pass") for _ in range(busy)]
        for case in NEW_TOKENS:
            for setting in list(workers) * repeats:
                seconds[case, setting].append(ask(workers[setting], case))
    finally:
        for process in (*loops, *workers.values()):
            process.kill()
    return seconds


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, repeats="calls of each setting")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops beside it (default 0)")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="COUNT")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parse_flags(parser, argv, "spin", (), NEW_TOKENS)
    if args.worker:
        work()
        return 0
    seconds = measure(args.settings, args.repeats, args.busy)
    print(f"{describe_cpu()}; {args.busy} busy loops, {os.cpu_count()} CPUs, medians of {args.repeats} calls, seconds")
    print("| GOMP_SPINCOUNT |", *(f"{case} |" for case in NEW_TOKENS))
    print("|---|" + "---|" * len(NEW_TOKENS))
    medians = {key: statistics.median(found) for key, found in seconds.items()}
    for setting in args.settings:
        print(f"| {setting} |", *(f"{medians[case, setting]:.2f} |" for case in NEW_TOKENS))
    results, missed = [], []
    for case in NEW_TOKENS:
        results.append({"case": case, "turns": {setting: seconds[case, setting] for setting in args.settings}})
        if {CHOSEN, "unset"} <= set(args.settings):
            results[-1]["ratio"] = medians[case, "unset"] / medians[case, CHOSEN]
            missed += below(case, {"unset": results[-1]["ratio"]}, args.floors)
    return finish(args, results, missed, busy=args.busy)


if __name__ == "__main__":
    raise SystemExit(main())
