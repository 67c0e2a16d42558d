"""A benchmark's cases, and the ratios that it has to reach: JSON of {case: {what fastgen is compared with: ratio}}."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping
from pathlib import Path

Floors = Mapping[str, Mapping[str, float]]


def case_parser(description: str | None, cases: Collection[str], floors: str) -> ArgumentParser:
    """Of a benchmark that runs some of its cases, several times; floors: the name of its file of floors."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)}; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="turns (default 3)")
    parser.add_argument("--floors", metavar="FILE", help=f"JSON of the ratios to reach: benchmarks/{floors}")
    return parser


def parse_cases(parser: ArgumentParser, argv: list[str] | None, cases: Collection[str]) -> Namespace:
    """What was given, with the content of the file of floors; ends with the parser's error where it is wrong."""
    args = parser.parse_args(argv)
    check_cases(parser, args.cases, cases)
    args.floors = floors_of(parser, args.floors, cases)
    return args


def check_cases(parser: ArgumentParser, given: Collection[str], cases: Collection[str]) -> None:
    """Ends with the parser's error where a case is given that there is none of."""
    if unknown := sorted(set(given) - set(cases)):
        parser.error(f"CASE {unknown[0]!r}: choose from {', '.join(cases)}")


def floors_of(parser: ArgumentParser, path: str | None, cases: Collection[str]) -> Floors:
    """What `--floors` names, or nothing; ends with the parser's error where that cannot be read."""
    try:
        return read_floors(path, cases) if path else {}
    except (OSError, ValueError) as error:
        parser.error(f"--floors: {error}")


def read_floors(path: str, cases: Collection[str]) -> Floors:
    """Raises ValueError where the file names a case that there is none of."""
    floors = json.loads(Path(path).read_text(encoding="utf-8"))
    if unknown := sorted(set(floors) - set(cases)):
        raise ValueError(f"{path}: case {unknown[0]!r}: choose from {', '.join(cases)}")
    return floors


# What a ratio is called that is not of seconds.
_CALLED = {"memory": "times less memory than stock"}


def below(case: str, ratios: Mapping[str, float], floors: Floors) -> list[str]:
    """A sentence for each measured ratio of a case that is below its floor."""
    wanted = floors.get(case, {})
    return [
        f"{case}: {ratios[other]:.2f} {_CALLED.get(other, f'times as fast as {other}')}, "
        f"below the floor of {wanted[other]:.2f}"
        for other in ratios
        if other in wanted and ratios[other] < wanted[other]
    ]
