"""The values that settings accept: each check parses a value, and says in messages and in docs/flags.md what it takes.

Tests: tests/batch/test_settings.py, tests/cli/transformers/test_flags.py
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

# Counts, lengths, token ids and seeds fit; larger numbers would overflow inside torch.
LARGEST_NUMBER = 2**31 - 1
UNSET = {"-1": None}  # FastSeq's number for "not set"
AUTO = {"auto": "auto"}
TODAY = "today"  # --date: the day on which the run starts


class BadValue(ValueError):
    """A value that a setting does not accept. The message says why; the caller adds the name of the setting."""


@dataclass(frozen=True)
class Check:
    """What a setting accepts. accepted: in words; parse: returns the parsed value, or raises BadValue."""

    accepted: str
    parse: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        """Returns the parsed value. Raises BadValue with what is accepted."""
        try:
            return self.parse(value)
        except BadValue as error:
            raise BadValue(f"{error} (accepted: {self.accepted})") from None


def _number(convert: Callable[[Any], Any], fits: Callable[[Any], bool], value: Any) -> Any:
    try:
        number = convert(value)
    except (TypeError, ValueError, OverflowError):
        raise BadValue(f"{value!r} is not a number") from None
    if not fits(number) or isinstance(value, bool):
        raise BadValue(f"{value} is out of range")
    return number


def whole(minimum: int, words: dict[str, Any] | None = None) -> Check:
    """Returns the check of whole numbers from `minimum` on, and of words for special values."""
    values = words or {}

    def parse(value: Any) -> Any:
        if isinstance(value, str) and value in values:
            return values[value]
        convert = int if isinstance(value, str) else operator.index
        return _number(convert, lambda number: minimum <= number <= LARGEST_NUMBER, value)

    return Check(", or ".join([f"a whole number, {minimum} to {LARGEST_NUMBER}", *values]), parse)


def real(above: float = -math.inf, up_to: float = math.inf) -> Check:
    """Returns the check of finite numbers greater than `above` and not greater than `up_to`."""
    bounds = [f"greater than {above:g}"] * (above > -math.inf) + [f"at most {up_to:g}"] * (up_to < math.inf)

    def parse(value: Any) -> Any:
        return _number(float, lambda number: math.isfinite(number) and above < number <= up_to, value)

    return Check(" and ".join(["a finite number", *bounds]), parse)


def one_of(*values: Any) -> Check:
    """Returns the check of these values, or of their names in any case."""
    named = {str(value).lower(): value for value in values}

    def parse(value: Any) -> Any:
        if str(value).lower() not in named or not isinstance(value, (str, bool)):
            raise BadValue(f"{value!r} is not known")
        return named[str(value).lower()]

    return Check(", ".join(named), parse)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValue(f"{value!r} is not text")
    return value


def _iso_date(value: Any) -> str:
    """Returns a date in ISO 8601, with or without the time of day, or TODAY."""
    if value == TODAY:
        return TODAY
    try:
        return datetime.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise BadValue(f"{value!r} is not a date") from None


def _json_object(value: Any) -> dict[str, Any]:
    """Returns an object, or the object in a JSON file with this path."""
    values = value
    if isinstance(value, str):
        try:
            values = json.loads(Path(value).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise BadValue(f"{value}: {getattr(error, 'strerror', None) or f'is not JSON: {error}'}") from None
    if not isinstance(values, dict):
        raise BadValue(f"{value}: holds no JSON object")
    return values


text = Check("a string", _text)
flag = one_of(True, False)
iso_date = Check(f"{TODAY}, or a date such as 2026-10-05 or 2026-10-05T14:30", _iso_date)
json_object = Check('{"num_beams": 4, …}', _json_object)
