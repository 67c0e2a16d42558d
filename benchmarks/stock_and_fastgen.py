"""Cases that stock and fastgen run in turns: a line for each, floors, and a file of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import torch
from clock import in_turns, medians, times_as_fast
from floors import below, case_parser, parse_cases
from machine import cpu, print_head
from memory import added_mb

import fastgen


def measure(
    case: str, generate: Callable[[], torch.Tensor], repeats: int, after: Callable[[], object] = bool
) -> dict[str, Any]:
    """Median seconds of each way, the median ratio, added megabytes, and whether tokens are equal.

    after: called when both have run.
    """
    ways = {"fastgen": generate, "stock": fastgen.disabled()(generate)}
    added = {way: added_mb(call, "cpu") for way, call in ways.items()}
    turns, equal = [], True
    for seconds, tokens in in_turns(ways, repeats):
        turns.append(seconds)
        equal = equal and torch.equal(tokens["stock"], tokens["fastgen"])
        after()
    ratio = times_as_fast(turns)
    return {"case": case, "seconds": medians(turns), "ratio": ratio, "added_mb": added, "equal": equal}


def run(
    description: str | None,
    cases: Collection[str],
    floors: str,
    measured: Callable[[str, int], dict[str, Any]],
    argv: list[str] | None,
) -> int:
    """A benchmark's `main`: the exit status is 1 where a ratio misses its floor, or tokens differ.

    floors: the file that `--help` names. measured: of a case and a number of repeats, what `measure` returns.
    """
    parser = case_parser(description, cases, floors)
    parser.add_argument("--json", metavar="FILE", help="write the results here, too")
    args = parse_cases(parser, argv, cases)
    print_head()
    results, status = [], 0
    for name in args.cases or cases:
        result = measured(name, args.repeats)
        results.append(result)
        seconds, added = result["seconds"], result["added_mb"]
        print(
            f"{name}: transformers {seconds['stock']:.2f} s, fastgen {seconds['fastgen']:.2f} s, "
            f"{result['ratio']:.2f} times as fast, {added['stock']:.0f} and {added['fastgen']:.0f} MB",
            flush=True,
        )
        ratios = {"stock": result["ratio"], "memory": added["stock"] / max(added["fastgen"], 1)}
        missed = below(name, ratios, args.floors) + ([] if result["equal"] else [f"{name}: tokens differ"])
        print("\n".join(missed), end="\n" * bool(missed))
        status = status or bool(missed)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"cpu": cpu(), "results": results}, file, indent=1)
            file.write("\n")
    return int(status)
