"""JSON records: one object per line of INPUT, and the same object with what was generated in OUTPUT.

The fields of a record go to OUTPUT character by character as they stand in INPUT, and the others are put behind them.
Writing anew what was read would change what Python does not hold as JSON does: 1e400, 0.10000000000000000001, integers
of thousands of digits.
"""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.cli.transformers.items import Line

# What a record of OUTPUT has besides the fields of its record of INPUT.
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
        record = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise RecordError(f"is not JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise RecordError("is JSON that is nested too deeply") from error
    if not isinstance(record, dict):
        raise RecordError(f"is {kind(record)} (accepted: a JSON object)")
    return record


def field(record: dict[str, Any], name: str) -> Any:
    """The value of a field that a record must have."""
    if name in record:
        return record[name]
    names = [quoted(each) for each in record]
    found = ", ".join(names[:FIELDS_NAMED]) + f" and {len(names) - FIELDS_NAMED} more" * (len(names) > FIELDS_NAMED)
    raise RecordError(f"has no field {quoted(name)} (its fields: {found or 'none'})")


def check_added_fields(record: dict[str, Any]) -> None:
    """Raise RecordError for a record whose own fields have a name that OUTPUT gives to others."""
    if clashing := [quoted(name) for name in ADDED_FIELDS if name in record]:
        raise RecordError(f"has {', '.join(clashing)}, which is what OUTPUT calls its own fields (rename the field)")


def can_be_extended(line: Line) -> bool:
    """Whether the line is a record to which the fields of OUTPUT can be added."""
    try:
        check_added_fields(parse(decode(line)))
    except RecordError:
        return False
    return True


def extended(own: str | None, line_number: int, added: dict[str, Any]) -> bytes:
    """A record of OUTPUT with its line end: `added` behind the fields of the record `own`, or behind the line's number.

    `own` must be what `parse` takes, and the floats in `added` must be finite.
    """
    # A CR that is white space between the fields of one record ends a line for programs that take any line end.
    head = json.dumps({"line": line_number}) if own is None else own.replace("\r", " ")
    head = head.rstrip().removesuffix("}").rstrip()
    separator = "" if head.endswith("{") else ", "
    text = head + separator + json.dumps(added, ensure_ascii=False).removeprefix("{")
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


def _integer(digits: str) -> int | float:
    """Python refuses to read integers of thousands of digits; that such a field is a number is all that matters."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecordError(f"has the field {quoted(twice)} twice in one object")
    return found
