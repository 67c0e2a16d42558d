"""Measures cases, with stock, fastgen and peers in turns, and makes the tables of what was measured.

    python benchmarks/bench.py list [KIND]
    python benchmarks/bench.py run CASE… [--against PEER…] [--set FIELD=VALUE] [--floors FILE] [--json FILE]
    python benchmarks/bench.py papers [--only PART…] [--device cuda] [--seconds S]
    python benchmarks/bench.py report
    python benchmarks/bench.py install ENVIRONMENT

A CASE is KIND/NAME, a KIND for all of its cases, or the NAME of a `generate` case. The status is 1 if outputs differ,
or a ratio is below its floor. A file of --json is written after each case, and keeps its results of other cases.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import papers
import peers
import report
import torch
from measure import Options, UsageError, commit, cpu, describe_cpu, failures, head, read_floors

from fastgen.optimizer.decoding.timing import Load

KINDS = {  # and the modules that have their cases
    **dict.fromkeys(("models", "generate", "prefix", "rollouts", "constrained"), "calls"),
    "fairseq": "fairseq_cases",
    **dict.fromkeys(("pipeline", "fairseq_command"), "commands"),
    "lm_eval": "lm_eval_cases",
    "trainer": "trainer_cases",
    **dict.fromkeys(("attention", "ngram"), "ops"),
    **dict.fromkeys(("mqa", "seamless"), "stages"),
    "small": "small",
    "drafts": "drafts",
    "reach": "reach",
}
WITH_PEERS = ("generate", "prefix")


def module_of(kind: str) -> Any:
    return importlib.import_module(KINDS[kind])


def cases_of(kind: str) -> dict[str, Any]:
    return module_of(kind).CASES[kind]


def find_cases(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns kind and name of each case; raises UsageError for an unknown name."""
    cases = []
    for name in names:
        kind, _, case = name.partition("/") if name.partition("/")[0] in KINDS else ("generate", "", name)
        if name in KINDS:
            cases += [(name, each) for each in cases_of(name)]
        elif case in cases_of(kind):
            cases.append((kind, case))
        else:
            choices = [*cases_of(kind), *(KINDS if kind == "generate" else ())]
            raise UsageError(f"CASE {name!r}: choose from {', '.join(choices)}")
    return cases


def with_fields(case: Any, fields: Sequence[str]) -> Any:
    """Returns the case with fields set; raises UsageError for a field that it does not have."""
    names = [field.name for field in dataclasses.fields(case)]
    values = {}
    for text in fields:
        name, equals, value = text.partition("=")
        if not equals or name not in names:
            raise UsageError(f"--set {text!r}: write FIELD=VALUE, with a FIELD of {', '.join(names)}")
        try:
            values[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            values[name] = value
    return dataclasses.replace(case, **values)


class Results:
    """A file of results, which keeps those of other cases; without a path nothing is written."""

    def __init__(self, path: str | None, device: str) -> None:
        self.path, self.device, self.begun, self.load = path, device, time.perf_counter(), Load()
        self.results: list[dict[str, Any]] = []
        if path and Path(path).exists():
            before = json.loads(Path(path).read_text(encoding="utf-8"))
            if before["cpu"] != cpu():
                raise UsageError(f"--json {path}: has results of another CPU, {before['cpu']}")
            self.results = before["results"]

    def add(self, result: dict[str, Any]) -> None:
        kind, case = result["kind"], result["case"]  # older files have one kind, without its name
        self.results = [old for old in self.results if (old.get("kind", kind), old["case"]) != (kind, case)] + [result]
        if self.path:
            seconds = round(time.perf_counter() - self.begun)
            facts = {**head(self.device), "part_seconds": seconds, "others": others(self.load)}
            text = json.dumps({**facts, "results": self.results}, indent=1)
            Path(self.path).write_text(text + "\n", encoding="utf-8")


def others(load: Load) -> float:
    """Returns the share of the CPUs that other programs took; 0 if the system does not say."""
    return round(load.share() or 0.0, 3)


def describe(result: Mapping[str, Any]) -> str:
    """Returns lines: seconds or microseconds, ratios, memory, equal outputs, and why a peer has no figure."""
    unit = "s" if "seconds" in result else "µs"
    lines = [f"{result['kind']}/{result['case']}:"]
    for way, value in (result.get("seconds") or result.get("microseconds") or {}).items():
        if isinstance(value, dict):
            lines.append(f"  {way:33} " + ", ".join(f"{stage} {part:,.2f} {unit}" for stage, part in value.items()))
            continue
        notes = [f"{value:10,.2f} {unit}"]
        notes += [f"{result['ratios'][way]:6.2f} of fastgen's"] if way in result["ratios"] else []
        notes += [f"{result['added_mb'][way]:.0f} MB"] if way in result.get("added_mb", {}) else []
        notes += [f"rows equal: {result['rows_equal'][way]}"] if way in result.get("rows_equal", {}) else []
        lines.append(f"  {way:33} " + ", ".join(notes))
    lines += [f"  {peer:33}          - {reason}" for peer, reason in result.get("reasons", {}).items()]
    shown = result.get("seconds", {}).keys() - {"stock"}
    ratios = ", ".join(f"{value:.2f} against {way}" for way, value in result["ratios"].items() if way not in shown)
    same = "outputs equal" if result["equal"] else "OUTPUTS DIFFER"
    tokens = f" ({result['tokens']} rows)" if isinstance(result.get("tokens"), str) else ""
    return "\n".join([*lines, f"  {ratios}, {same}{tokens}, others {result['others']:.0%}"])


def run(args: argparse.Namespace) -> int:
    """Measures the cases; raises UsageError for flags that do not fit them."""
    cases = find_cases(args.cases)
    floors = {kind: read_floors(args.floors, kind, args.device, cases_of(kind)) for kind, _ in cases}
    if args.against and (alone := sorted({kind for kind, _ in cases} - {*WITH_PEERS})):
        raise UsageError(f"--against: of {', '.join(WITH_PEERS)} cases, not {alone[0]}")
    if args.against and (args.device, args.dtype) != ("cpu", "float32"):
        raise UsageError(f"--against: with --device cpu and --dtype float32 only, not {args.device} and {args.dtype}")
    rows = [(kind, name, with_fields(cases_of(kind)[name], args.set)) for kind, name in cases]
    against = tuple(peers.names() if args.against == ["all"] else args.against)
    options = Options(args.repeats, args.device, args.dtype, args.cpu_time, against, peers.PAUSE if against else 0.0)
    results, missed = Results(args.json, args.device), []
    print_head()
    for kind, name, case in rows:
        load = Load()
        result = {"kind": kind, "commit": commit(), **module_of(kind).measure(kind, name, case, options)}
        result |= {"others": others(load)} | ({"set": args.set} if args.set else {})
        results.add(result)
        print(describe(result), flush=True)
        missed += failures(result, floors[kind])
    print("\n".join(missed), end="\n" * bool(missed))
    return int(bool(missed))


def print_head() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(describe_cpu(), flush=True)


def list_cases(args: argparse.Namespace) -> int:
    for kind in [args.kind] if args.kind else KINDS:
        for name, case in cases_of(kind).items():
            print(f"{kind}/{name}".ljust(36), getattr(case, "workload", case))
    return 0


def run_papers(args: argparse.Namespace) -> int:
    status = papers.run(args)
    report.write()
    return status


def make_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(function: Any, name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(function=function)
        return added

    cases = command(run, "run", "measure cases")
    cases.add_argument("cases", nargs="+", metavar="CASE", help="KIND/NAME, a KIND, or the NAME of a generate case")
    cases.add_argument("--against", nargs="+", default=[], metavar="PEER", choices=[*peers.names(), "all"])
    cases.add_argument("--repeats", type=int, default=3, help="turns, times four of one row of `generate` (default 3)")
    cases.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the cases, such as lines=5000"
    )
    cases.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    cases.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    cases.add_argument("--cpu_time", action="store_true", help="seconds of the CPU, not of the clock: a busy machine")
    parts = command(run_papers, "papers", "measure the papers' tables in parts, and write the report")
    parts.add_argument("--only", nargs="+", metavar="PART", choices=papers.PARTS, help=f"of {', '.join(papers.PARTS)}")
    parts.add_argument("--again", action="store_true", help="also measure parts that this commit has measured")
    parts.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parts.add_argument("--seconds", type=float, default=float("inf"), help="begin no further part after so many")
    for some in (cases, parts):
        some.add_argument("--floors", metavar="FILE", help="JSON of the ratios to reach: benchmarks/floors.json")
    cases.add_argument("--json", metavar="FILE", help="also write the results here, with every turn")
    command(lambda _: report.write(), "report", "write docs/benchmarks.md, docs/papers.md and docs/speed.svg")
    command(list_cases, "list", "list the cases").add_argument("kind", nargs="?", choices=KINDS)
    command(lambda args: peers.install(args.environment), "install", "make a peer's virtual environment").add_argument(
        "environment", choices=sorted({peer.environment for peer in peers.PEERS} - {""})
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return args.function(args) or 0
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
