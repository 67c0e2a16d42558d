"""Lines of INPUT to what the model takes: text through the tokenizer.

What is wrong with a line is that line's error and stops no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import transformers

from fastgen.cli.transformers.files.records import LONGEST_RECORD, RecordError, decode, field, kind, parse, reason
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.stages.items import Line, Prepared

Tokenizer: TypeAlias = transformers.PreTrainedTokenizerBase
Messages = list[dict[str, Any]]
# Token ids of texts, or of conversations; raises what the tokenizer raises.
Encode = Callable[[list[Any]], list[list[int]]]
# A tokenizer needs some 250 bytes of memory for each character. Texts with more characters than these for each token
# that they may have are white space, or words that it does not know, and shorter ones than this cost little.
CHARACTERS_PER_TOKEN = 16
SHORTEST_LONG_TEXT = 1 << 18
# Where nothing says how many tokens there may be.
TOKENS_WITHOUT_LIMIT = 1 << 16
CHAT_IS_NOT_TRUNCATED = "--max_tokenizer_length; a conversation is not truncated, its end is where the answer begins"


@dataclass(frozen=True)
class TextLimits:
    """How long texts may be.

    truncate_to: to so many tokens they are truncated. most: the most tokens that the model takes, and what sets this
    limit. embedded_tokens: how many the model's embedding has. None of each: nobody knows, or nothing limits it.
    """

    truncate_to: int | None = None
    most: tuple[int, str] | None = None
    embedded_tokens: int | None = None

    @property
    def characters(self) -> int:
        """No tokenizer is given a text that has more."""
        limits = [self.truncate_to, None if self.most is None else self.most[0]]
        tokens = min((each for each in limits if each is not None), default=TOKENS_WITHOUT_LIMIT)
        return max(SHORTEST_LONG_TEXT, CHARACTERS_PER_TOKEN * tokens)

    def line_bytes(self, args: RunConfig) -> int:
        """How much of a line is to be read. Text of which this is not all has more than `characters` in it."""
        characters = 4 * (self.characters + 2)  # a byte order mark, and one that is cut, do not count
        return max(characters, LONGEST_RECORD) if args.reads_jsonl else characters


def prepare_text(
    tokenizer: Tokenizer, args: RunConfig, limits: TextLimits, **options: Any
) -> Callable[[list[Line]], list[Prepared]]:
    """A function that tokenizes lines, {"input_ids": int64 [N]} for each; threads may share it.

    args.prefix: stands before every text that is not empty, but not before a list of messages. options: of the
    tokenizer's call.
    """
    most = [] if limits.most is None else [limits.most]
    # Truncating is asked for by a length; without one the full length is wanted, to compare it with the limit.
    truncates = limits.truncate_to is not None and not args.chat
    if truncates:
        options |= {"truncation": True, "max_length": limits.truncate_to}
    elif limits.truncate_to is not None:
        most.append((limits.truncate_to, CHAT_IS_NOT_TRUNCATED))
    if isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        # The first call with these settings writes them into the tokenizer, which must not be in use then: tokenizers
        # before 0.23 raise "Already borrowed" where another thread is in the middle of a call.
        tokenizer([""], verbose=False, **options)
    encode = partial(_encode_conversations if args.chat else _encode_texts, tokenizer, options)
    # Where the end of a text is kept, its beginning says nothing.
    cuts = truncates and tokenizer.truncation_side == "right"
    return partial(_prepare, encode, args, limits, min(most, default=None), cuts)


def read_input(line: Line, args: RunConfig) -> str | Messages | None:
    """The text of a line, or with chat its messages; None for a line with nothing in it. Raises RecordError."""
    if line.cut and args.reads_jsonl:
        raise RecordError(f"is longer than {len(line.raw)} bytes, the most that are read of a record")
    text: Any = decode(line)
    if not text.strip() and not line.cut:
        return None
    if args.reads_jsonl:
        record = parse(text)
        if args.id_field is not None:
            field(record, args.id_field)
        text = field(record, args.text_field)
        if isinstance(text, list) and args.chat:
            return _messages(text, args)
        if not isinstance(text, str):
            accepted = "a string or a list of messages" if args.chat else "a string"
            raise RecordError(f'has {kind(text)} in its field "{args.text_field}" (accepted: {accepted})')
    if not text.strip() and not line.cut:
        return None
    text = (args.prefix or "") + text
    return _messages([{"role": "user", "content": text}], args) if args.chat else text


def _messages(messages: list[Any], args: RunConfig) -> Messages:
    """The messages of a conversation, with the system message of the command before those that have none."""
    name = args.text_field
    if not messages:
        raise RecordError(f'has an empty list in its field "{name}" (accepted: a string or a list of messages)')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise RecordError(f'has {kind(message)} as message {number} in its field "{name}" (accepted: an object)')
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RecordError(f'has no text as "{key}" of message {number} in its field "{name}"')
    if args.system is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": args.system}, *messages]
    return messages


def _encode_texts(tokenizer: Tokenizer, options: dict[str, Any], texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, verbose=False, **options)["input_ids"]


def _encode_conversations(tokenizer: Tokenizer, _: dict[str, Any], conversations: list[Messages]) -> list[list[int]]:
    """Special tokens are those of the template; the tokenizer adds none."""
    return tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]


def _prepare(
    encode: Encode, args: RunConfig, limits: TextLimits, most: tuple[int, str] | None, cuts: bool, lines: list[Line]
) -> list[Prepared]:
    prepared = [Prepared() for _ in lines]
    inputs: dict[int, Any] = {}
    long: dict[int, Any] = {}
    for index, line in enumerate(lines):
        try:
            found = read_input(line, args)
        except RecordError as error:
            prepared[index] = Prepared(error=str(error))
            continue
        if found is not None:
            (long if _length(found) > limits.characters else inputs)[index] = found
    encoded = dict(zip(inputs, _encode_each(encode, list(inputs.values())), strict=True))
    for index, text in long.items():
        encoded[index] = _encode_long(encode, limits, cuts, text)
    for index, ids in encoded.items():
        if isinstance(ids, Prepared):
            prepared[index] = ids
        elif most is not None and len(ids) > most[0]:
            prepared[index] = Prepared(error=f"has {len(ids)} tokens, the limit is {most[0]} ({most[1]})")
        elif limits.embedded_tokens is not None and max(ids, default=0) >= limits.embedded_tokens:
            last = limits.embedded_tokens - 1
            prepared[index] = Prepared(error=f"has the token {max(ids)}, the last that MODEL knows is {last}")
        elif ids:  # a tokenizer may find no token in a text of characters that it drops
            prepared[index] = Prepared({"input_ids": np.array(ids, np.int64)})
    return prepared


def _length(found: str | Messages) -> int:
    return len(found) if isinstance(found, str) else sum(len(message["content"]) for message in found)


def _encode_long(encode: Encode, limits: TextLimits, cuts: bool, text: Any) -> list[int] | Prepared:
    """The tokens that a text is truncated to, of its beginning, where half of that comes to the same ones."""
    most, tokens = limits.characters, limits.truncate_to
    why = f"has more than {most} characters"
    if not cuts:
        hint = " (--max_tokenizer_length N truncates to N tokens)" if tokens is None else ""
        return Prepared(error=f"{why}, the most that are tokenized{hint}")
    half, ids = (_encode_one(encode, text[:size]) for size in (most // 2, most))
    if isinstance(ids, Prepared) or (half == ids and len(ids) == tokens):
        return ids
    return Prepared(error=f"{why}, and half of these do not come to its first {tokens} tokens")


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
