"""What the benchmarks have in common: flags, the ratios that a case has to reach, and a file of results.

--floors takes JSON of {benchmark: {case: {what fastgen is compared with: ratio}}}, as benchmarks/floors.json; on a GPU
the floors of "BENCHMARK cuda" count. --json writes every turn, with versions, threads, CPU and commit.
"""

from __future__ import annotations

import json
import platform
import subprocess
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from clock import in_turns, medians, times_as_fast
from machine import cpu, print_head
from memory import added_mb

import fastgen

Floors = Mapping[str, Mapping[str, float]]

_PACKAGES = ("torch", "transformers", "ve-fairseq", "fairseq", "ctranslate2", "lm_eval", "ray")
# What a ratio is called that is not of seconds.
_CALLED = {
    "memory": "times less memory than stock",
    "a tenth": "of the largest memory is reached with a tenth of the lines",
}


def parser_of(
    description: str | None, cases: Collection[str] = (), repeats: str | None = "turns", has_devices: bool = False
) -> ArgumentParser:
    """With the flags that benchmarks share. cases: all there are, where a run may choose. repeats: what is repeated;
    None if that has flags of its own."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    if cases:
        parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)}; default: all")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=3, help=f"{repeats} (default 3)")
    parser.add_argument("--floors", metavar="FILE", help="JSON of the ratios to reach: benchmarks/floors.json")
    parser.add_argument("--json", metavar="FILE", help="also write the results here, with every turn")
    if has_devices:
        parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
        parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    return parser


def parse_flags(
    parser: ArgumentParser, argv: list[str] | None, benchmark: str, cases: Collection[str], names: Collection[str] = ()
) -> Namespace:
    """What the command line asks for, with the content of the file of floors; ends with the parser's error.

    names: what floors are for, if not for cases.
    """
    args = parser.parse_args(argv)
    if unknown := sorted(set(vars(args).get("cases", ())) - set(cases)):
        parser.error(f"CASE {unknown[0]!r}: choose from {', '.join(cases)}")
    args.cases = vars(args).get("cases") or list(cases)
    device = vars(args).get("device", "cpu")
    section = benchmark if device == "cpu" else f"{benchmark} {device}"
    try:
        args.floors = read_floors(args.floors, section, names or cases) if args.floors else {}
    except (OSError, ValueError) as error:
        parser.error(f"--floors {args.floors}: {error}")
    return args


def read_floors(path: str, benchmark: str, names: Collection[str]) -> Floors:
    """Those of a benchmark, none if the file has none; raises ValueError for a case that there is none of."""
    floors = json.loads(Path(path).read_text(encoding="utf-8")).get(benchmark, {})
    if unknown := sorted(set(floors) - set(names)):
        raise ValueError(f"{benchmark} {unknown[0]!r}: choose from {', '.join(names)}")
    return floors


def below(case: str, ratios: Mapping[str, float], floors: Floors) -> list[str]:
    """A sentence for each measured ratio of a case that is below its floor."""
    wanted = floors.get(case, {})
    return [
        f"{case}: {ratios[other]:.2f} {_CALLED.get(other, f'times as fast as {other}')}, "
        f"below the floor of {wanted[other]:.2f}"
        for other in ratios
        if other in wanted and ratios[other] < wanted[other]
    ]


def finish(args: Namespace, results: Sequence[Mapping[str, Any]], missed: Sequence[str], **head: Any) -> int:
    """Writes the file of results and prints what was missed; the exit status, 1 where something was.

    head: what else the file says of the run.
    """
    if args.json:
        versions = {name: found for name in _PACKAGES if (found := _version_of(name))}
        told = {
            "cpu": cpu(),
            **({"gpu": torch.cuda.get_device_name()} if vars(args).get("device") == "cuda" else {}),
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), **versions},
            "commit": commit(),
            **head,
            "results": results,
        }
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print("\n".join(missed), end="\n" * bool(missed))
    return int(bool(missed))


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def commit() -> str:
    """Empty outside of a checkout; with a "+" where files other than results and docs differ from the commit's."""

    def git(*asked: str) -> str:
        done = subprocess.run(["git", "-C", str(Path(__file__).parent.parent), *asked], capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    return git("describe", "--always", "--exclude=*") + "+" * bool(changed)


def compare(
    case: str,
    ways: Mapping[str, Callable[[], Any]],
    repeats: int,
    are_equal: Callable[[Any, Any], bool] = torch.equal,
    after: Callable[[], object] = bool,
    warm_up: int = 1,
) -> dict[str, Any]:
    """Seconds of "stock" and "fastgen" in turns, the median ratio, and whether what they return is equal in each.

    after: called when both have run. warm_up: turns before those that count.
    """
    turns, equal = [], True
    for seconds, returned in in_turns(ways, repeats + warm_up):
        turns.append(seconds)
        equal = equal and are_equal(returned["stock"], returned["fastgen"])
        after()
    turns = turns[warm_up:]
    return {"case": case, "seconds": medians(turns), "turns": turns, "ratio": times_as_fast(turns), "equal": equal}


def with_and_without(call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """This call as "fastgen" and, with the library's own functions, as "stock"."""
    return {"fastgen": call, "stock": fastgen.disabled()(call)}


def summary(result: Mapping[str, Any]) -> str:
    seconds = result["seconds"]
    times = f"{seconds['stock']:.2f} s, fastgen {seconds['fastgen']:.2f} s, {result['ratio']:.2f} times as fast"
    return f"{result['case']}: transformers {times}"


def missed_by(result: Mapping[str, Any], floors: Floors, what: str = "tokens") -> list[str]:
    """Sentences for what `compare` returned. what: is to be equal."""
    differs = [] if result["equal"] else [f"{result['case']}: {what} differ"]
    return below(result["case"], {"stock": result["ratio"]}, floors) + differs


def measure(
    case: str, generate: Callable[[], torch.Tensor], repeats: int, after: Callable[[], object] = bool
) -> dict[str, Any]:
    """What `compare` returns, with the megabytes that a call adds."""
    ways = with_and_without(generate)
    added = {way: added_mb(call, "cpu") for way, call in ways.items()}
    return compare(case, ways, repeats, after=after, warm_up=0) | {"added_mb": added}


def run(
    description: str | None,
    benchmark: str,
    cases: Collection[str],
    measured: Callable[[str, int], dict[str, Any]],
    argv: list[str] | None,
) -> int:
    """The `main` of a benchmark whose cases are what `measure` returns.

    measured: of a case and a number of repeats, its result.
    """
    args = parse_flags(parser_of(description, cases), argv, benchmark, cases)
    print_head()

    def told(result: Mapping[str, Any]) -> str:
        added = result["added_mb"]
        return f"{summary(result)}, {added['stock']:.0f} and {added['fastgen']:.0f} MB"

    def missed(result: Mapping[str, Any]) -> list[str]:
        added = result["added_mb"]
        memory = below(result["case"], {"memory": added["stock"] / max(added["fastgen"], 1)}, args.floors)
        return missed_by(result, args.floors) + memory

    return run_cases(args, lambda name: measured(name, args.repeats), told, missed)


def run_cases(
    args: Namespace,
    measured: Callable[[str], dict[str, Any]],
    told: Callable[[Mapping[str, Any]], str],
    missed: Callable[[Mapping[str, Any]], list[str]],
) -> int:
    """Measures each case that the flags ask for, prints a text about it, and ends as `finish`."""
    results, sentences = [], []
    for name in args.cases:
        result = measured(name)
        results.append(result)
        print(told(result), flush=True)
        sentences += missed(result)
    return finish(args, results, sentences)
