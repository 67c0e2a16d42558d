"""Lines of INPUT to what the model takes: text through the tokenizer.

What is wrong with a line is that line's error and stops no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import transformers

from fastgen.cli.transformers.items import Line, Prepared
from fastgen.cli.transformers.records import RecordError, decode, field, kind, parse, reason

Tokenizer = transformers.PreTrainedTokenizerBase
Messages = list[dict[str, Any]]
# Token ids of texts, or of conversations; raises what the tokenizer raises.
Encode = Callable[[list[Any]], list[list[int]]]
CHAT_IS_NOT_TRUNCATED = "--max_tokenizer_length; a conversation is not truncated, its end is where the answer begins"


@dataclass(frozen=True)
class InputFormat:
    """How a line of INPUT is to be read, and what may come of it.

    jsonl: lines are JSON objects with the text in `text_field` and, where it is given, something in `id_field`.
    prefix: stands before every text that is not empty, but not before a list of messages.
    chat: the text becomes a user's message, after the message `system`; `text_field` may also hold a list of messages.
    max_tokenizer_length: texts are truncated to so many tokens.
    limit: the most tokens that the model takes, and what sets this limit.
    """

    jsonl: bool
    text_field: str
    id_field: str | None
    prefix: str
    chat: bool
    system: str | None
    max_tokenizer_length: int | None
    limit: tuple[int, str] | None


def prepare_text(tokenizer: Tokenizer, input_format: InputFormat) -> Callable[[list[Line]], list[Prepared]]:
    """A function that tokenizes lines, {"input_ids": int64 [N]} for each; threads may share it."""
    truncation: dict[str, Any] = {}
    limits = [] if input_format.limit is None else [input_format.limit]
    # Truncating is asked for by a length; without one the full length is wanted, to compare it with the limit.
    if input_format.max_tokenizer_length is not None:
        if input_format.chat:
            limits.append((input_format.max_tokenizer_length, CHAT_IS_NOT_TRUNCATED))
        else:
            truncation = {"truncation": True, "max_length": input_format.max_tokenizer_length}
    if isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        # The first call with these settings writes them into the tokenizer, which must not be in use then: tokenizers
        # before 0.23 raise "Already borrowed" where another thread is in the middle of a call.
        tokenizer([""], verbose=False, **truncation)
    encode = partial(_encode_conversations if input_format.chat else _encode_texts, tokenizer, truncation)
    return partial(_prepare, encode, input_format, min(limits, default=None))


def read_input(line: Line, input_format: InputFormat) -> str | Messages | None:
    """The text of a line, or with chat its messages; None for a line with nothing in it. Raises RecordError."""
    text: Any = decode(line)
    if not text.strip():
        return None
    if input_format.jsonl:
        record = parse(text)
        if input_format.id_field is not None:
            field(record, input_format.id_field)
        text = field(record, input_format.text_field)
        if isinstance(text, list) and input_format.chat:
            return _messages(text, input_format)
        if not isinstance(text, str):
            accepted = "a string or a list of messages" if input_format.chat else "a string"
            raise RecordError(f'has {kind(text)} in its field "{input_format.text_field}" (accepted: {accepted})')
    if not text.strip():
        return None
    text = input_format.prefix + text
    return _messages([{"role": "user", "content": text}], input_format) if input_format.chat else text


def _messages(messages: list[Any], input_format: InputFormat) -> Messages:
    """The messages of a conversation, with the system message of the command before those that have none."""
    name = input_format.text_field
    if not messages:
        raise RecordError(f'has an empty list in its field "{name}" (accepted: a string or a list of messages)')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise RecordError(f'has {kind(message)} as message {number} in its field "{name}" (accepted: an object)')
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RecordError(f'has no text as "{key}" of message {number} in its field "{name}"')
    if input_format.system is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": input_format.system}, *messages]
    return messages


def _encode_texts(tokenizer: Tokenizer, truncation: dict[str, Any], texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, verbose=False, **truncation)["input_ids"]


def _encode_conversations(tokenizer: Tokenizer, _: dict[str, Any], conversations: list[Messages]) -> list[list[int]]:
    """Special tokens are those of the template; the tokenizer adds none."""
    return tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]


def _prepare(
    encode: Encode, input_format: InputFormat, limit: tuple[int, str] | None, lines: list[Line]
) -> list[Prepared]:
    prepared = [Prepared() for _ in lines]
    inputs = {}
    for index, line in enumerate(lines):
        try:
            found = read_input(line, input_format)
        except RecordError as error:
            prepared[index] = Prepared(error=str(error))
            continue
        if found is not None:
            inputs[index] = found
    for index, ids in zip(inputs, _encode_each(encode, list(inputs.values())), strict=True):
        if isinstance(ids, Prepared):
            prepared[index] = ids
        elif limit is not None and len(ids) > limit[0]:
            prepared[index] = Prepared(error=f"has {len(ids)} tokens, the limit is {limit[0]} ({limit[1]})")
        elif ids:  # a tokenizer may find no token in a text of characters that it drops
            prepared[index] = Prepared({"input_ids": np.array(ids, np.int64)})
    return prepared


def _encode_each(encode: Encode, inputs: list[Any]) -> list[list[int] | Prepared]:
    """Token ids of every input in one call; if that raises, in a call for each, with the error of those that raise."""
    if not inputs:
        return []
    try:
        return list(encode(inputs))
    except Exception:
        return [_encode_one(encode, each) for each in inputs]


def _encode_one(encode: Encode, text: Any) -> list[int] | Prepared:
    try:
        return encode([text])[0]
    except Exception as error:  # a tokenizer or a template may raise anything
        return Prepared(error=f"cannot be tokenized ({reason(error)})")
