"""Parsing of INPUT's lines and writing of OUTPUT's records: text, JSON records, OpenAI's batch format.

Python reads and writes JSON, and so determines how numbers look: 1E3 becomes 1000.0.

Tests: tests/batch/test_records.py, tests/batch/test_openai.py, tests/batch/test_tables.py
"""

from __future__ import annotations

import codecs
import json
import math
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from textwrap import shorten
from typing import Any

from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import reason
from fastgen.batch.files import NO_VALUE, Line
from fastgen.batch.planner import Item

# The most bytes of a record: longer ones are not read.
LONGEST_RECORD = 1 << 24
# The fields that OUTPUT adds to those of INPUT's record, which may contain, with a number, those of earlier runs.
ADDED_FIELDS = ("input_tokens", "outputs", "error")
Messages = list[dict[str, Any]]
ANY = sys.float_info.max
# Numbers in a body: the library's name of the setting, its type, the bounds, and their form in messages.
NUMBERS: dict[str, tuple[str, type[int] | type[float], float, float, str]] = {
    "max_tokens": ("max_new_tokens", int, 1, ANY, "a whole number, 1 or more"),
    "max_completion_tokens": ("max_new_tokens", int, 1, ANY, "a whole number, 1 or more"),
    "temperature": ("temperature", float, 0, ANY, "a number, 0 or more"),
    "top_p": ("top_p", float, 0, 1, "a number from 0 to 1"),
    "top_k": ("top_k", int, -1, ANY, "a whole number, 0 or more, or -1"),
    "min_p": ("min_p", float, 0, 1, "a number from 0 to 1"),
    "repetition_penalty": ("repetition_penalty", float, sys.float_info.min, ANY, "a number above 0"),
    "n": ("num_return_sequences", int, 1, 128, "1 to 128"),  # OpenAI's limit
    "seed": ("seed", int, -(1 << 63), (1 << 63) - 1, "a whole number of 64 bits"),
}
# Fields of a body for the chat template, and the other ones that are read.
TEMPLATE_FIELDS = ("chat_template_kwargs", "enable_thinking", "continue_final_message", "add_generation_prompt")
OTHER_FIELDS = ("model", "messages", "stop", *TEMPLATE_FIELDS)
SEPARATOR = "####"
LONGEST_LIST = 100  # characters of names of fields in a message
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
# Byte order marks; UTF-32's come first, because they may begin with UTF-16's.
WIDE_MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
# How files of other formats begin, what they are, and how they can be read.
BINARY_FORMATS = (
    (rb"PAR1[\0-\x1f]", "a Parquet table", "a name that ends with .parquet"),
    (rb"ARROW1\0|\xff{4}", "an Arrow table", "a name that ends with .arrow"),
    (
        rb"\x1f\x8b|BZh\d1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd",
        "a compressed file",
        "a name that ends with .gz, .bz2, .xz or .zst",
    ),
    (rb"RIFF.{4}WAVE|fLaC\0|OggS\0|ID3[\2-\4]\0|FORM.{4}AIF", "a sound", "UTF-8 text with a path in each line"),
    (rb"PK\x03\x04", "a ZIP archive or an Excel table", "UTF-8 text, or .csv"),
    (rb"%PDF-\d|SQLite format 3\0|\x89HDF|\x89PNG|\xff\xd8\xff", "a PDF, a database or an image", "UTF-8 text"),
)
# How JSON begins: an object, or the first line of a list or an object over several lines.
BEGINS_AS_JSON = re.compile(r'\s*(\{\s*"[^"]*"\s*:|\[\s*\{|[\[{]\s*$)')
# JSON allows these characters in strings, but some programs end lines at them.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class RecordError(Exception):
    """A line of INPUT cannot be used. The message says why; the caller adds the number of the line."""


class WrongKindError(RecordError):
    """A line's input is of a kind that this run never takes; the other lines are probably the same."""


class OpenAIRequestError(WrongKindError):
    """A line is a request of OpenAI's batch format."""


def items_of(lines: list[Line], args: BatchConfig, take: Callable[[Item, Any], None]) -> list[Item]:
    """Returns an item for each line; `take` gets the items with an input, and the input. Bad lines get their error."""
    items = [Item(line) for line in lines]
    for item in items:
        try:
            if (content := read_input(item.line, args)) is not None:
                take(item, content)
        except RecordError as error:
            item.error = str(error)
    return items


def each_or_error(call: Callable[[Any], Any], inputs: Any, what: str) -> list[Any]:
    """Returns the results of `call` for all inputs together or, if that raises, for each, or its error message."""
    try:
        return list(call(inputs)) if len(inputs) else []
    except Exception as error:  # a tokenizer or a template may raise anything
        if len(inputs) == 1:
            return [f"{what} ({reason(error)})"]
        return [each_or_error(call, inputs[index : index + 1], what)[0] for index in range(len(inputs))]


def decode(line: Line) -> str:
    """Returns the line's text, without a byte order mark and without the CR of a CRLF.

    A character in which the line is cut is omitted. Raises RecordError.
    """
    for beginning, what, accepted in BINARY_FORMATS if line.number == 1 else ():
        if re.match(beginning, line.raw, re.DOTALL):
            raise WrongKindError(f"begins like {what} (accepted: {accepted})")
    if line.number == 1 and (encoding := _wide_encoding(line.raw)) is not None:
        raise WrongKindError(f"is {encoding} text (accepted: UTF-8, as iconv -f {encoding} -t UTF-8 makes it)")
    try:
        text, _ = codecs.utf_8_decode(line.raw, "strict", not line.cut)
    except UnicodeDecodeError as error:
        raise RecordError(f"is not UTF-8 text ({error.reason} at byte {error.start + 1})") from error
    if line.number == 1:
        text = text.removeprefix("\ufeff")
    return text.removesuffix("\r")


def _wide_encoding(raw: bytes) -> str | None:
    """Returns "UTF-16" or "UTF-32", recognized by the byte order mark or the zeros of ASCII letters, or None."""
    for encoding, marks in WIDE_MARKS.items():
        if raw.startswith(marks):
            return encoding
    is_wide = len(raw) > 3 and raw.strip(b"\0") and not (raw[::2].strip(b"\0") and raw[1::2].strip(b"\0"))
    if not is_wide:
        return None
    return "UTF-16LE" if raw[0] else "UTF-16BE"


def parse(text: str) -> dict[str, Any]:
    """Returns the JSON object of a record. Raises RecordError for anything else."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # Python refuses deep nesting, and integers of thousands of digits
        whole = "; accepted: an object per line, as jq -c writes them" if text.strip() in ("[", "{") else ""
        raise RecordError(f"is not JSON that can be read ({error}{whole})") from error
    if not isinstance(record, dict):
        raise RecordError(f"is {kind(record)} (accepted: a JSON object)")
    return record


def field(record: dict[str, Any], path: str) -> Any:
    """Returns the value at `path`. Raises RecordError if there is none.

    a.b is the field b of the object a, and a.0 the first item of the list a; a field named a.b takes precedence. An
    empty list on the way gives an empty text: an empty line has no outputs, and stays empty in the next run.
    """
    value: Any = record
    rest = path
    while rest:
        if value == []:
            return ""
        parts = value if isinstance(value, dict) else {}
        if isinstance(value, list):
            parts = {str(index): item for index, item in enumerate(value)}
        words = rest.split(".")
        beginnings = (".".join(words[:length]) for length in range(len(words), 0, -1))
        name = next((beginning for beginning in beginnings if beginning in parts), None)
        if name is None:
            whose = "its fields" if value is record else f"in {quoted(path[: -len(rest) - 1])}"
            names = shorten(", ".join(map(quoted, parts)), LONGEST_LIST, placeholder=" …") or "none"
            raise RecordError(f"has no field {quoted(path)} ({whose}: {names})")
        value = parts[name]
        rest = rest[len(name) + 1 :]
    return value


def read_input(line: Line, args: BatchConfig) -> str | Messages | None:
    """Returns the text of a line, or with chat its messages; None for an empty line. Raises RecordError."""
    if line.value is not NO_VALUE:
        return _input_of(line.value, args, "is {}")
    if line.cut and args.reads_records:
        raise RecordError(f"is longer than {len(line.raw)} bytes, the most that are read of a record")
    text = decode(line)
    if line.cut or not text.strip() or not args.reads_records:
        return _input_of(text, args, is_cut=line.cut)
    record = parse(text)
    if args.id_field is not None:
        field(record, args.id_field)
    is_request = "custom_id" in record and isinstance(record.get("body"), dict) and "messages" in record["body"]
    if is_request and args.text_field not in record and args.input_format == "jsonl":
        accepted = f"accepted with {args.named('input_format', 'openai')}"
        raise OpenAIRequestError(f"is a request of OpenAI's batch format ({accepted})")
    return _input_of(field(record, args.text_field), args, f'has {{}} in its field "{args.text_field}"')


def _input_of(value: Any, args: BatchConfig, said: str = "is {}", is_cut: bool = False) -> str | Messages | None:
    """Returns a value as the model's input; said: the form of messages about values of other kinds."""
    if isinstance(value, list) and args.chat:
        return _messages(value, args, said)
    if not isinstance(value, str):
        accepted = "a string or a list of messages" if args.chat else "a string"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            accepted += f"; messages with {args.named('causal_lm', True)} {args.named('chat', True)}"
        raise WrongKindError(f"{said.format(kind(value))} (accepted: {accepted})")
    if not value.strip() and not is_cut:
        return None
    text = (args.prefix or "") + value
    return _messages([{"role": "user", "content": text}], args, said) if args.chat else text


def _messages(messages: list[Any], args: BatchConfig, said: str) -> Messages:
    """Returns the messages of a conversation, with the run's system message first if it has none."""
    if not messages:
        raise RecordError(f"{said.format('an empty list')} (accepted: a string or a list of messages)")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise RecordError(f"{said.format(f'{kind(message)} as message {number}')} (accepted: an object)")
        for key, text in (("role", message.get("role")), ("content", _content(message))):
            if not isinstance(text, str):
                raise RecordError(said.format(f'no text as "{key}" of message {number}'))
    messages = [message | {"content": _content(message)} for message in messages]
    if args.system is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": args.system}, *messages]
    return messages


def _content(message: dict[str, Any]) -> str | None:
    """Returns the text of a message, with its parts as lines; None if it contains anything but text.

    A message of an assistant that calls tools has no text.
    """
    content = message.get("content")
    if content is None and message.get("role") == "assistant":
        return ""
    if isinstance(content, list):
        parts = (part.get("text") if isinstance(part, dict) else None for part in content)
        texts = [text for text in parts if isinstance(text, str)]
        return "\n".join(texts) if len(texts) == len(content) > 0 else None
    return content if isinstance(content, str) else None


def kind(value: Any) -> str:
    """Returns JSON's name for the type of a value, or Python's if JSON has no such values."""
    name = "a number" if isinstance(value, (int, float)) else f"a value of type {type(value).__name__}"
    return _KINDS.get(type(value), name)


def quoted(value: Any) -> str:
    """Returns a value as JSON, for a message."""
    return json.dumps(value, ensure_ascii=False)


def ignored_fields(body: dict[str, Any]) -> list[str]:
    """Returns the names of the fields of a request's body that change nothing here; null is not a value."""
    return sorted(name for name, value in body.items() if value is not None and name not in (*NUMBERS, *OTHER_FIELDS))


def name_of(item: Item, args: BatchConfig) -> str:
    """Returns the name of a failed record, from its `id_field`; empty if it has none."""
    if args.id_field is not None:
        with suppress(RecordError):
            return f"{args.id_field} {quoted(field(parse(decode(item.line)), args.id_field))}: "
    return ""


def record_of(item: Item, args: BatchConfig) -> bytes:
    """Returns a record of OUTPUT with its line end; without outputs it is empty, or NA for a score."""
    return {"text": _text, "jsonl": _jsonl, "openai": _openai}[args.output_format or "text"](item, args)


def fields_of(item: Item) -> dict[str, Any]:
    """Returns the fields that OUTPUT adds to a record."""
    added: dict[str, Any] = {} if item.error is not None else {"input_tokens": item.length}
    outputs = [{name: value for name, value in output.items() if name != "ended"} for output in item.outputs]
    for output in outputs:
        if not math.isfinite(output.get("score", 0)):
            output["score"] = None  # JSON has no infinity
    return added | {"outputs": outputs} | ({} if item.error is None else {"error": item.error})


def _text(item: Item, args: BatchConfig) -> bytes:
    text = SEPARATOR.join(re.sub("\r\n|\r|\n", " ", output["text"]) for output in item.outputs)
    if args.output_sequence_scores:
        scores = [f"{output['score']:f}" if "score" in output else "NA" for output in item.outputs]
        text = SEPARATOR.join(scores or ["NA"]) + "\t" + text
    return (text + "\n").encode("utf-8", "backslashreplace")


def _jsonl(item: Item, args: BatchConfig) -> bytes:
    """Returns a record with the fields of the line's own record, or else its number, and what was generated.

    A line that is not a record, or that is nested too deeply to be written, is identified by its number only.
    """
    if args.reads_records:
        with suppress(RecordError, RecursionError):
            record = _own_fields(item.line)
            return _one_line(record | fields_of(item) | (_ignored(record) if args.input_format == "openai" else {}))
    return _one_line({"line": item.line.number} | fields_of(item))


def _openai(item: Item, args: BatchConfig) -> bytes:
    """Returns a line of OpenAI's batch output format; `created` is 0, so that a repeated run writes the same bytes."""
    request: dict[str, Any] = {}
    with suppress(RecordError):
        request = parse(decode(item.line))
    named = {"id": f"batch_req_{item.line.number}", "custom_id": request.get("custom_id")}
    if item.error is not None or not item.outputs:
        error = {"code": "invalid_request", "message": item.error or "there is nothing in it"}
        return _one_line(named | {"response": None, "error": error})
    choices = []
    for index, output in enumerate(item.outputs):
        message = {"role": "assistant", "content": output["text"]}
        why = "stop" if output["ended"] else "length"
        choices.append({"index": index, "message": message, "finish_reason": why})
    tokens = sum(output["tokens"] for output in item.outputs)
    usage = {"prompt_tokens": item.length, "completion_tokens": tokens, "total_tokens": item.length + tokens}
    body = {"id": f"chatcmpl-{item.line.number}", "object": "chat.completion", "created": 0, "model": args.model}
    body |= {"choices": choices, "usage": usage, **_ignored(request)}
    response = {"status_code": 200, "request_id": "", "body": body}
    return _one_line(named | {"response": response, "error": None})


def _ignored(request: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the field of OUTPUT that names what was ignored of a request, if anything was."""
    body = request.get("body")
    names = ignored_fields(body) if isinstance(body, dict) else []
    return {"ignored_fields": names} if names else {}


def outputs_of(record: bytes, args: BatchConfig) -> tuple[list[dict[str, Any]], str | None]:
    """Returns outputs and error from which `record_of` makes the same record; text has no errors."""
    outputs: list[dict[str, Any]] = []
    if args.output_format == "openai":
        fields = json.loads(record)
        if (response := fields["response"]) is None:
            return outputs, fields["error"]["message"]
        tokens = response["body"]["usage"]["completion_tokens"]
        for choice in response["body"]["choices"]:
            ended = choice["finish_reason"] == "stop"
            outputs.append({"text": choice["message"]["content"], "tokens": tokens, "ended": ended})
            tokens = 0  # only their sum is stored
        return outputs, None
    if args.writes_records:
        fields = json.loads(record)
        for output in fields["outputs"]:
            unknown = {"score": math.nan} if output.get("score", 0) is None else {}
            outputs.append(output | unknown)
        return outputs, fields.get("error")
    text = record.decode().removesuffix("\n")
    scores = ["NA"]
    if args.output_sequence_scores:
        joined, _, text = text.partition("\t")
        scores = joined.split(SEPARATOR)
    for score, part in zip(scores, text.split(SEPARATOR, len(scores) - 1), strict=True):
        outputs.append({"text": part} | ({} if score == "NA" else {"score": float(score)}))
    return outputs, None


def first_text(record: bytes, args: BatchConfig) -> str:
    """Returns the first output's text of a record of OUTPUT, empty if there is none."""
    outputs, _ = outputs_of(record, args)
    text = outputs[0]["text"] if outputs else ""
    return text.partition(SEPARATOR)[0] if args.join_outputs else text


def _own_fields(line: Line) -> dict[str, Any]:
    """Returns the fields of a record; those that OUTPUT adds are renamed with the first number free for all of them."""
    record = parse(decode(line))
    numbered = ({name: f"{name}_{number}" for name in ADDED_FIELDS} for number in count(1))
    names = next(names for names in numbered if record.keys().isdisjoint(names.values()))
    return {names.get(name, name): value for name, value in record.items()}


def _one_line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False).translate(_LINE_ENDS)
    # Half a surrogate pair, which UTF-8 cannot encode, becomes JSON's escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"
