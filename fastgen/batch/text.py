"""Text input and output: lines of INPUT through the library's tokenizer, and generated tokens back to text.

What is done here beside the tokenizer:

    long texts       are not tokenized beyond a number of characters: a tokenizer needs some 250 bytes for each
    token ids        that the model has no embedding for fail their line: an invalid index breaks a GPU's process
    padding          of arrays: `tokenizer.pad` turns them into lists first
    counts           of tokens and why an output ended, which the library does not return

A problem with a line is that line's error and does not stop other lines. Requests of OpenAI's batch format with the
same settings share batches. A request with its own seed has a batch to itself if its random numbers depend on the other
rows.

Tests: tests/batch/test_text.py, tests/batch/test_records.py, tests/batch/test_openai.py
"""

from __future__ import annotations

import inspect
import json
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers

from fastgen.batch import records
from fastgen.batch.config import BatchConfig
from fastgen.batch.files import Line
from fastgen.batch.model import Loaded, embedded_tokens, input_limit, lengths_of_inputs, positions
from fastgen.batch.planner import GeneratedBatch, Item
from fastgen.batch.settings import draws_by_row, token_ids
from fastgen.optimizer.transformers.compat import REPETITION_PENALTY_COUNTS_PADDING

# Texts with more characters per allowed token than this are white space or unknown words; texts shorter than the second
# number cost little.
CHARACTERS_PER_TOKEN = 16
SHORTEST_LONG_TEXT = 1 << 18
TOKENS_WITHOUT_LIMIT = 1 << 16  # if nothing limits the number of tokens
TOKENIZER_RAISES = "cannot be tokenized"


class TextInput:
    """Tokenizes lines to {"input_ids": int64 [N]}; threads may share it.

    With args.chat lines are conversations: the chat template adds their special tokens, and they are never truncated.

    args.prefix: is put before every text that is not empty, but not before lists of messages. truncate_to: the number
    of tokens to which texts are truncated. most: the most tokens that the model takes, and what sets this limit.
    embedded_tokens: the size of the model's embedding. None means no limit. bodies: reads requests of OpenAI's batch
    format.
    """

    def __init__(
        self,
        tokenizer: Any,
        args: BatchConfig,
        truncate_to: int | None = None,
        most: tuple[int, str] | None = None,
        embedded_tokens: int | None = None,
        bodies: Bodies | None = None,
    ) -> None:
        self._tokenizer, self._args, self._bodies, self._embedded = tokenizer, args, bodies, embedded_tokens
        self._truncate_to, self._most = truncate_to, most
        # A length switches truncation on; without it the full length is compared with the limit.
        self._options: dict[str, Any] = {}
        if truncate_to is not None and not args.chat:
            self._options = {"truncation": True, "max_length": truncate_to}
        elif truncate_to is not None:
            why = f"{args.named('max_tokenizer_length')}; a conversation is not truncated, its end is where the answer"
            self._most = min(filter(None, (most, (truncate_to, f"{why} begins"))))
        elif most is not None and not args.chat:
            self._most = most[0], f"{most[1]}; {args.named('truncation', True)} truncates"
        if isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
            # The first call with these settings stores them in the tokenizer, which must not be in use then:
            # tokenizers before 0.23 raise "Already borrowed" if another thread is inside a call.
            tokenizer([""], verbose=False, **self._options)
        tokens = [number for number in (truncate_to, most and most[0]) if number is not None]
        # Longer texts are not tokenized.
        self.characters = max(SHORTEST_LONG_TEXT, CHARACTERS_PER_TOKEN * min(tokens, default=TOKENS_WITHOUT_LIMIT))
        # The bytes of a line that are read. A cut text still has more characters than the limit, although a byte order
        # mark and a cut character do not count.
        self.line_bytes = max(4 * (self.characters + 2), records.LONGEST_RECORD if args.reads_records else 0)
        self.unused: set[str] = set() if bodies is None else bodies.unused

    @classmethod
    def of(cls, loaded: Loaded) -> TextInput:
        """Returns the input for a model."""
        limits = *lengths_of_inputs(loaded), embedded_tokens(loaded.model)
        bodies = Bodies(loaded) if loaded.args.input_format == "openai" else None
        return cls(loaded.tokenizer, loaded.args, *limits, bodies)

    def prepare(self, lines: list[Line]) -> list[Item]:
        """Returns an item for each line."""
        taken: dict[str, list[tuple[Item, Any]]] = {}  # by their arguments for the chat template, as JSON

        def take(item: Item, content: Any) -> None:
            arguments: dict[str, Any] = {}
            if self._bodies is not None:
                item.group, item.seed, arguments = self._bodies.settings(item.line)
            texts = [content] if isinstance(content, str) else [message["content"] for message in content]
            if sum(map(len, texts)) > self.characters:
                self._fill(item, self._encode_long(content))
            else:
                taken.setdefault(json.dumps(arguments, sort_keys=True), []).append((item, content))

        items = records.items_of(lines, self._args, take)
        for arguments, alike in taken.items():
            encode = partial(self._encode, **json.loads(arguments))
            encoded = records.each_or_error(encode, [content for _, content in alike], TOKENIZER_RAISES)
            for (item, _), ids in zip(alike, encoded, strict=True):
                self._fill(item, ids)
        return items

    def _encode(self, inputs: list[Any], /, **arguments: Any) -> list[list[int]]:
        if not self._args.chat:
            return self._tokenizer(inputs, verbose=False, **self._options)["input_ids"]
        options = {"add_generation_prompt": True, **arguments, "tokenize": True, "return_dict": True}
        return self._tokenizer.apply_chat_template(inputs, **options)["input_ids"]

    def _encode_long(self, text: Any) -> list[int] | str:
        """Returns the tokens of a long text's beginning; an error if half of the beginning gives other tokens."""
        why = f"has more than {self.characters} characters"
        # If the tokenizer keeps the end of texts, the beginning is not enough.
        if not self._options or self._tokenizer.truncation_side != "right":
            ways = f" ({self._args.named('max_tokenizer_length')} N truncates to N tokens)"
            return f"{why}, the most that are tokenized{ways if self._truncate_to is None else ''}"
        parts = [text[: self.characters // 2]], [text[: self.characters]]
        half, ids = (records.each_or_error(self._encode, part, TOKENIZER_RAISES)[0] for part in parts)
        if isinstance(ids, str) or (half == ids and len(ids) == self._truncate_to):
            return ids
        return f"{why}, and half of these give other first {self._truncate_to} tokens"

    def _fill(self, item: Item, ids: list[int] | str) -> None:
        vocabulary, most = self._embedded, self._most
        if self._bodies is not None:
            most = min(filter(None, (most, self._bodies.input_limit(item.group))), default=None)
        if isinstance(ids, str):
            item.error = ids
        elif most is not None and len(ids) > most[0]:
            item.error = f"has {len(ids)} tokens, the limit is {most[0]} ({most[1]})"
        elif vocabulary is not None and max(ids, default=0) >= vocabulary:
            item.error = f"has the token {max(ids)}, the last that MODEL knows is {vocabulary - 1}"
        elif ids:  # a tokenizer may return no token for characters that it drops
            item.arrays, item.length = {"input_ids": np.array(ids, np.int64)}, len(ids)

    def collate(self, items: list[Item]) -> dict[str, torch.Tensor]:
        """Returns padded input_ids [B, N] and their attention_mask."""
        rows = [item.arrays["input_ids"] for item in items if item.arrays is not None]
        return pad_text(rows, self._tokenizer.pad_token_id, self._tokenizer.padding_side == "left")


def pad_text(rows: list[np.ndarray], pad_token_id: int, left: bool) -> dict[str, torch.Tensor]:
    """Returns token ids [N] as int64 input_ids [B, N] and attention_mask [B, N]."""
    shape = len(rows), max(map(len, rows))
    input_ids = np.full(shape, pad_token_id, np.int64)
    attention_mask = np.zeros(shape, np.int64)
    for number, row in enumerate(rows):
        columns = slice(shape[1] - len(row), None) if left else slice(len(row))
        input_ids[number, columns] = row
        attention_mask[number, columns] = 1
    return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(attention_mask)}


class Bodies:
    """Reads bodies of requests; threads may share it. unused: names of fields without effect."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.unused: set[str] = set()

    def settings(self, line: Line) -> tuple[list[list[Any]] | None, tuple[int, int] | None, dict[str, Any]]:
        """Returns names and values of settings of generate, sorted, the seed, and arguments for the chat template.

        Raises RecordError for bad ones.
        """
        body = records.parse(records.decode(line))["body"]
        self.unused.update(records.ignored_fields(body))
        settings: dict[str, Any] = {}
        for name, (setting, kind, least, most, accepted) in records.NUMBERS.items():
            if (value := body.get(name)) is not None:
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not is_number or not least <= value <= most or kind(value) != value:
                    raise _refused(name, value, accepted)
                settings[setting] = kind(value)
        if settings.get("top_k") == -1:  # of servers: no limit, which generate writes as 0
            settings["top_k"] = 0
        if (stops := body.get("stop")) is not None and stops != []:
            settings["stop_strings"] = [stops] if isinstance(stops, str) else stops
            if not isinstance(stops, (str, list)) or not all(
                isinstance(stop, str) and stop for stop in settings["stop_strings"]
            ):
                raise _refused("stop", stops, "strings with text")
        if "temperature" in settings:
            settings |= {"do_sample": settings["temperature"] > 0, "temperature": settings["temperature"] or 1.0}
        self._check(settings)
        seed_of_line = None
        seed = settings.pop("seed", None)
        if seed is not None and draws_by_row(self._loaded, settings):
            seed_of_line = seed % (1 << 64), 0
        elif seed is not None and self._samples(settings):
            settings["seed"] = [seed, line.number]
        return [list(item) for item in sorted(settings.items())] or None, seed_of_line, template_arguments(body)

    def input_limit(self, settings: list[list[Any]] | None) -> tuple[int, str] | None:
        """Returns the most tokens that a prompt with these settings may have, and what sets the limit."""
        max_new_tokens = dict(settings or ()).get("max_new_tokens")
        return None if max_new_tokens is None else input_limit(self._loaded, max_new_tokens)

    def _samples(self, settings: dict[str, Any]) -> bool:
        return bool(settings.get("do_sample", self._loaded.value("do_sample")))

    def _check(self, settings: dict[str, Any]) -> None:
        """Raises RecordError for numbers of tokens and of outputs that this model or this run does not support."""
        loaded, args = self._loaded, self._loaded.args
        number = positions(loaded.model.config, "decoder")
        max_new_tokens = settings.get("max_new_tokens", 0)
        if number is not None and max_new_tokens >= number:
            raise _refused("max_tokens", max_new_tokens, f"up to {number - 1}, of MODEL's {number} positions")
        penalty = settings.get("repetition_penalty", 1)
        if REPETITION_PENALTY_COUNTS_PADDING and penalty not in (1, loaded.value("repetition_penalty")):
            ways = f"1, or {args.named('repetition_penalty', penalty)} for all requests"
            raise _refused("repetition_penalty", penalty, ways)
        outputs = settings.get("num_return_sequences", 1)
        beams = loaded.value("num_beams") or 1
        if beams > 1 and outputs > beams:
            raise _refused("n", outputs, f"up to {beams}, the beams of the run")
        if beams == 1 and outputs > 1 and not self._samples(settings):
            raise _refused("n", outputs, '1, or a "temperature" above 0')
        if outputs > 1 and not (args.writes_records or args.join_outputs):
            ways = f"{args.named('output_format', 'openai')}, or {args.named('join_outputs', True)}"
            raise _refused("n", outputs, f"1 for text; more with {ways}")


def template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a body for the chat template. Raises RecordError for those that it cannot have."""
    arguments = body.get("chat_template_kwargs")
    arguments = {} if arguments is None else arguments
    accepted = "an object with variables of the chat template"
    if not isinstance(arguments, dict):
        raise _refused("chat_template_kwargs", arguments, accepted)
    own = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters
    if names := sorted(own.keys() & arguments.keys()):
        raise _refused(f"chat_template_kwargs.{names[0]}", arguments[names[0]], accepted)
    switches = {name: body[name] for name in records.TEMPLATE_FIELDS[1:] if body.get(name) is not None}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise _refused(name, value, "true or false")
    if switches.get("continue_final_message"):
        messages = body["messages"]
        if not isinstance(messages, list) or messages[-1]["role"] != "assistant":
            raise _refused("continue_final_message", True, "true after a message of the assistant")
        if switches.get("add_generation_prompt"):
            raise _refused("add_generation_prompt", True, "false, or nothing, with continue_final_message")
        switches["add_generation_prompt"] = False
    return arguments | switches


def _refused(name: str, value: Any, accepted: str) -> records.RecordError:
    what = records.kind(value)
    what = records.quoted(value) if what == "a number" else what
    return records.RecordError(f'has {what} as "{name}" of its body (accepted: {accepted})')


class TextOutput:
    """Turns token ids into texts with their scores and numbers of tokens; threads may share it.

    start_tokens: the number of first tokens of a row that were not generated: 1 for an encoder-decoder, 0 for a causal
        LM.
    """

    def __init__(
        self, tokenizer: Any, args: BatchConfig, eos_token_ids: list[int], pad_token_id: int | None, start_tokens: int
    ) -> None:
        clean_up = {"clean_up_tokenization_spaces": True} if args.clean_up_tokenization_spaces else {}
        skip = not args.include_special_tokens
        self._decode = partial(tokenizer.batch_decode, skip_special_tokens=skip, **clean_up)
        self._eos, self._pad, self._start = eos_token_ids, pad_token_id, start_tokens

    @staticmethod
    def of(loaded: Loaded) -> TextOutput:
        """Returns the output for a model; sets its generate to return the scores of beams if OUTPUT has them."""
        args = loaded.args
        # Whisper's generate omits the prompt and the end token. With scores, it returns only a sound's last pass.
        is_whisper = loaded.args.reads is None and loaded.model.config.model_type == "whisper"
        is_scored = args.output_sequence_scores or args.writes_records
        if is_scored and not is_whisper and (loaded.value("num_beams") or 1) > 1:
            loaded.settings |= {"output_scores": True, "return_dict_in_generate": True}
        eos = [] if is_whisper else token_ids(loaded.value("eos_token_id"))
        start_tokens = int(loaded.args.reads != "decoder" and not is_whisper)
        return TextOutput(loaded.tokenizer, args, eos, loaded.value("pad_token_id"), start_tokens)

    def finish(self, generated: GeneratedBatch) -> float:
        """Fills the items' outputs, or errors if tokens cannot be decoded; returns the number of tokens."""
        sequences = generated.sequences
        if sequences is None or not len(sequences):
            return 0
        tokens, ended = count_tokens(sequences, self._start, self._eos, self._pad)
        if generated.segments is not None:
            tokens = np.array([sum(len(part[2]) for part in output) for output in generated.segments])
        outputs_per_item = len(sequences) // len(generated.items)
        by_item = sequences.reshape(len(generated.items), outputs_per_item, *sequences.shape[1:])
        decoded = records.each_or_error(self._texts, by_item, "the generated tokens cannot be decoded")
        for index, (item, texts) in enumerate(zip(generated.items, decoded, strict=True)):
            if isinstance(texts, str):
                item.error = texts
                continue
            stops = dict(item.group).get("stop_strings") if isinstance(item.group, list) else None
            for row, text in enumerate(texts, start=index * outputs_per_item):
                output: dict[str, Any] = {"text": text}
                if stops:
                    output["text"], stopped = self._until(stops, text, sequences[row])
                    ended[row] |= stopped
                if generated.scores is not None:
                    output["score"] = generated.scores[row]
                if generated.segments is not None:
                    output["segments"] = [
                        {"start": start, "end": end, "text": self._decode([ids])[0]}
                        for start, end, ids in generated.segments[row]
                    ]
                item.outputs.append(output | {"tokens": int(tokens[row]), "ended": bool(ended[row])})
        return int(tokens.sum())

    def _until(self, stops: list[str], text: str, sequence: np.ndarray) -> tuple[str, bool]:
        """Returns the text before the first stop string, and whether there is one or a special token; sequence: [T]."""
        if starts := [start for start in map(text.find, stops) if start >= 0]:
            return text[: min(starts)], True
        whole = self._decode(sequence[None, self._start :], skip_special_tokens=False)[0]
        return text, any(stop in whole for stop in stops)

    def _texts(self, sequences: np.ndarray) -> list[list[str]]:
        """Returns the texts of every item; sequences: [B, R, T]."""
        texts = self._decode(np.concatenate(sequences))
        outputs_per_item = sequences.shape[1]
        return [texts[start : start + outputs_per_item] for start in range(0, len(texts), outputs_per_item)]


def count_tokens(
    sequences: np.ndarray, start_tokens: int, eos_token_ids: list[int], pad_token_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many tokens of each row [B * R, T] were generated, including an EOS, and whether there is one.

    A row without an EOS ends where its padding begins: a stop string ended it, or it reached the greatest length.
    """
    generated = sequences[:, start_tokens:]
    rows, width = generated.shape
    if width == 0:
        return np.zeros(rows, np.int64), np.zeros(rows, bool)
    is_eos = np.isin(generated, eos_token_ids)
    is_text = np.ones_like(is_eos) if pad_token_id is None else generated != pad_token_id
    unpadded = np.where(is_text.any(axis=1), width - is_text[:, ::-1].argmax(axis=1), 0)
    has_eos = is_eos.any(axis=1)
    return np.where(has_eos, is_eos.argmax(axis=1) + 1, unpadded), has_eos
