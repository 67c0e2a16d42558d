"""A benchmark's cases, and the ratios that it has to reach: JSON of {case: {what fastgen is compared with: ratio}}."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Collection, Mapping
from pathlib import Path

Floors = Mapping[str, Mapping[str, float]]


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


def below(case: str, ratios: Mapping[str, float], floors: Floors) -> list[str]:
    """A sentence for each measured ratio of a case that is below its floor."""
    wanted = floors.get(case, {})
    return [
        f"{case}: {ratios[other]:.2f} times as fast as {other}, below the floor of {wanted[other]:.2f}"
        for other in ratios
        if other in wanted and ratios[other] < wanted[other]
    ]
