"""JSON records: one object per line of INPUT, and its fields before what was generated in OUTPUT.

Fields are read and written by Python, which decides how a number looks: 1E3 becomes 1000.0. What Python cannot hold,
and what is no JSON, makes the record a bad one.
"""

from __future__ import annotations

import codecs
import json
import math
from contextlib import suppress
from itertools import count
from typing import Any

from fastgen.cli.transformers.stages.items import Line

# What a record of OUTPUT has besides the fields of its record of INPUT. There, with a number: those of earlier runs.
ADDED_FIELDS = ("input_tokens", "outputs", "error")
# A record is read whole or not at all.
LONGEST_RECORD = 1 << 24
BYTE_ORDER_MARK = "\ufeff"
FIELDS_NAMED = 10
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
# JSON allows these inside strings, and some programs end a line at them.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class RecordError(Exception):
    """A line of INPUT that cannot be used. The message says why; which line it is, the caller knows."""


def decode(line: Line) -> str:
    """The line's text, without the byte order mark of a file and without the CR of a CRLF.

    Where a line is cut in the middle of a character, without that.
    """
    try:
        text, _ = codecs.utf_8_decode(line.raw, "strict", not line.cut)
    except UnicodeDecodeError as error:
        raise RecordError(f"is not UTF-8 text ({error.reason} at byte {error.start + 1})") from error
    if line.number == 1:
        text = text.removeprefix(BYTE_ORDER_MARK)
    return text.removesuffix("\r")


def parse(text: str) -> dict[str, Any]:
    """The object that a record is; raises RecordError for anything else, and for a field that stands there twice."""
    try:
        record = json.loads(
            text, parse_int=_integer, parse_float=_finite, parse_constant=_no_constant, object_pairs_hook=_object
        )
    except json.JSONDecodeError as error:
        raise RecordError(f"is not JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise RecordError("is JSON that is nested too deeply") from error
    if not isinstance(record, dict):
        raise RecordError(f"is {kind(record)} (accepted: a JSON object)")
    return record


def field(record: dict[str, Any], path: str) -> Any:
    """The value that `path` leads to; raises RecordError where there is none.

    a.b is the field b of the object a, and a.0 the first of the list a; a field whose own name is a.b comes before.
    An empty list on the way gives an empty text: an empty line has no outputs, and stays empty in the next run.
    """
    value: Any = record
    rest = path
    while rest:
        if value == []:
            return ""
        parts = value if isinstance(value, dict) else {}
        if isinstance(value, list):
            parts = {str(index): each for index, each in enumerate(value)}
        words = rest.split(".")
        beginnings = (".".join(words[:length]) for length in range(len(words), 0, -1))
        name = next((each for each in beginnings if each in parts), None)
        if name is None:
            whose = "its fields" if value is record else f"in {quoted(path[: -len(rest) - 1])}"
            names = [quoted(each) for each in parts]
            found = ", ".join(names[:FIELDS_NAMED]) + f" and {len(names) - FIELDS_NAMED} more" * (
                len(names) > FIELDS_NAMED
            )
            raise RecordError(f"has no field {quoted(path)} ({whose}: {found or 'none'})")
        value, rest = parts[name], rest[len(name) + 1 :]
    return value


def written(line: Line, is_record: bool, added: dict[str, Any]) -> bytes:
    """A record of OUTPUT with its line end: the fields of the line's own record, or else its number, then `added`.

    A line that is no record, or one that is nested too deeply to be written, is known by its number only.
    """
    if is_record:
        with suppress(RecordError, RecursionError):
            return _one_line(_own_fields(line) | added)
    return _one_line({"line": line.number} | added)


def _own_fields(line: Line) -> dict[str, Any]:
    """Fields that are called as those of OUTPUT get a number, the first that is free for all of them.

    These are outputs_1, and in the run after that outputs_2.
    """
    record = parse(decode(line))
    numbered = ({name: f"{name}_{number}" for name in ADDED_FIELDS} for number in count(1))
    names = next(names for names in numbered if record.keys().isdisjoint(names.values()))
    return {names.get(name, name): value for name, value in record.items()}


def _one_line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False)
    for character, escape in _LINE_ENDS.items():
        text = text.replace(character, escape)
    # Half a surrogate pair, which UTF-8 has no bytes for, becomes the escape by which JSON writes it.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def kind(value: Any) -> str:
    """What JSON calls a value."""
    return _KINDS.get(type(value), "a number")


def quoted(value: Any) -> str:
    """A value as JSON writes it, for a message."""
    return json.dumps(value, ensure_ascii=False)


def reason(error: BaseException) -> str:
    """An exception's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python reads no integers of thousands of digits
        raise RecordError(f"has an integer of {len(digits)} digits, which is too long") from None


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise RecordError(f"has the number {number}, which is too large")
    return value


def _no_constant(name: str) -> None:
    raise RecordError(f"has {name}, which is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecordError(f"has the field {quoted(twice)} twice in one object")
    return found
