"""JSON records: one object per line of INPUT, and the same object with what was generated in OUTPUT.

The fields of a record go to OUTPUT character by character as they stand in INPUT, and the others are put behind them.
Writing anew what was read would change what Python does not hold as JSON does: 1e400, 0.10000000000000000001, integers
of thousands of digits. Only fields that an earlier run added get other names.
"""

from __future__ import annotations

import codecs
import json
import re
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.cli.transformers.stages.items import Line

# What a record of OUTPUT has besides the fields of its record of INPUT. There, with a number: those of earlier runs.
ADDED_FIELDS = ("input_tokens", "outputs", "error")
# A record is read whole or not at all.
LONGEST_RECORD = 1 << 24
BYTE_ORDER_MARK = "\ufeff"
FIELDS_NAMED = 10
_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
# JSON allows these inside strings, and some programs end a line at them.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class RecordError(Exception):
    """A line of INPUT that cannot be used. The message says why; which line it is, the caller knows."""


def decode(line: Line) -> str:
    """The line's text, without the byte order mark of a file and without the CR of a CRLF.

    Where a line is cut in the middle of a character, without that.
    """
    return decode_raw(line.raw, line.number, line.cut)


def decode_raw(raw: bytes, number: int, cut: bool = False) -> str:
    """The text of the line with this number, as `decode` gives it."""
    try:
        text, _ = codecs.utf_8_decode(raw, "strict", not cut)
    except UnicodeDecodeError as error:
        raise RecordError(f"is not UTF-8 text ({error.reason} at byte {error.start + 1})") from error
    if number == 1:
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


def own_fields(line: Line) -> str:
    """The record of a line, with which `extended` begins; raises RecordError for a line that is none.

    Fields that are called as those of OUTPUT get a number, the first that is free for all of them: outputs_1, and in
    the run after that outputs_2.
    """
    text = decode(line)
    taken = parse(text).keys()
    if taken.isdisjoint(ADDED_FIELDS):
        return text
    numbered = ({name: f"{name}_{number}" for name in ADDED_FIELDS} for number in count(1))
    names = next(names for names in numbered if taken.isdisjoint(names.values()))
    decoder = json.JSONDecoder(parse_int=_integer)
    pieces, done, at = [], 0, text.index("{")
    while text[at] != "}":  # at the brace or a comma before a field
        start = _behind_space(text, at + 1)
        name, end = decoder.raw_decode(text, start)
        if name in names:
            pieces += [text[done:start], quoted(names[name])]
            done = end
        _, end = decoder.raw_decode(text, _behind_space(text, text.index(":", end) + 1))
        at = _behind_space(text, end)
    return "".join([*pieces, text[done:]])


def extended(own: str | None, line_number: int, added: dict[str, Any]) -> bytes:
    """A record of OUTPUT with its line end: `added` behind the fields of the record `own`, or behind the line's number.

    `own` must come from `own_fields`, and the floats in `added` must be finite.
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


def _behind_space(text: str, at: int) -> int:
    return _WHITE_SPACE.match(text, at).end()


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
