"""Text in and text out: lines of INPUT through the tokenizer, and what was generated back to text.

What is wrong with a line is that line's error and stops no other.

Tests: tests/batch/test_text.py, tests/batch/test_records.py
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import transformers

from fastgen.batch import records
from fastgen.batch.config import BatchConfig
from fastgen.batch.files import Line
from fastgen.batch.model import Loaded, embedded_tokens, lengths_of_inputs
from fastgen.batch.openai import Bodies, before_stop, stop_strings
from fastgen.batch.planner import GeneratedBatch, Item
from fastgen.batch.settings import token_ids

TOKENIZER_RAISES = "cannot be tokenized"
DECODER_RAISES = "what was generated cannot be decoded"
# A tokenizer needs some 250 bytes of memory for each character. Texts with more characters than these for each token
# that they may have are white space, or words that it does not know, and shorter ones than this cost little.
CHARACTERS_PER_TOKEN = 16
SHORTEST_LONG_TEXT = 1 << 18
# Where nothing says how many tokens there may be.
TOKENS_WITHOUT_LIMIT = 1 << 16
CHAT_IS_NOT_TRUNCATED = "; a conversation is not truncated, its end is where the answer begins"
# What brings the scores of beams.
SCORES = {"output_scores": True, "return_dict_in_generate": True}


class TextInput:
    """Tokenizes lines, {"input_ids": int64 [N]} for each; threads may share it.

    args.prefix: stands before every text that is not empty, but not before a list of messages. truncate_to: to so many
    tokens texts are truncated. most: the most tokens that the model takes, and what sets this limit. embedded_tokens:
    how many the model's embedding has. None: nothing limits it. bodies: reads requests of OpenAI's batch format.
    """

    truncates: ClassVar[bool] = True

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
        limits = [] if most is None else [most]
        # Truncating is asked for by a length; without one the full length is wanted, to compare it with the limit.
        self._options: dict[str, Any] = {}
        if truncate_to is None:
            hint = f"; {args.named('truncation', True)} truncates" if self.truncates else ""
            limits = [(number, why + hint) for number, why in limits]
        elif self.truncates:
            self._options = {"truncation": True, "max_length": truncate_to}
        else:
            limits.append((truncate_to, args.named("max_tokenizer_length") + CHAT_IS_NOT_TRUNCATED))
        if isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
            # The first call with these settings writes them into the tokenizer, which must not be in use then:
            # tokenizers before 0.23 raise "Already borrowed" where another thread is in the middle of a call.
            tokenizer([""], verbose=False, **self._options)
        self._truncate_to, self._most = truncate_to, min(limits, default=None)
        # Where the end of a text is kept, its beginning says nothing.
        self._cuts = bool(self._options) and tokenizer.truncation_side == "right"
        tokens = min(
            (each for each in (truncate_to, most and most[0]) if each is not None), default=TOKENS_WITHOUT_LIMIT
        )
        self.characters = max(SHORTEST_LONG_TEXT, CHARACTERS_PER_TOKEN * tokens)  # no tokenizer is given a longer text
        # How much of a line is read. Text of which this is not all has more characters in it than that, for a byte
        # order mark, and a character that is cut, do not count.
        self.line_bytes = 4 * (self.characters + 2)
        if args.reads_records:
            self.line_bytes = max(self.line_bytes, records.LONGEST_RECORD)
        self.unused: set[str] = set() if bodies is None else bodies.unused

    def prepare(self, lines: list[Line]) -> list[Item]:
        """An item for each line."""
        taken: list[tuple[Item, Any]] = []

        def take(item: Item, found: Any) -> None:
            if self._bodies is not None:
                item.group, item.seed = self._bodies.settings(item.line)
            contents = [found] if isinstance(found, str) else [message["content"] for message in found]
            if sum(map(len, contents)) > self.characters:
                self._fill(item, self._encode_long(found))
            else:
                taken.append((item, found))

        items = records.items_of(lines, self._args, take)
        encoded = records.each_or_error(self._encode, [found for _, found in taken], TOKENIZER_RAISES)
        for (item, _), ids in zip(taken, encoded, strict=True):
            self._fill(item, ids)
        return items

    def _encode(self, inputs: list[Any]) -> list[list[int]]:
        """Token ids of several inputs."""
        return self._tokenizer(inputs, verbose=False, **self._options)["input_ids"]

    def _fill(self, item: Item, ids: list[int] | str) -> None:
        known, most = self._embedded, self._most
        if self._bodies is not None:
            most = min(filter(None, (most, self._bodies.input_limit(item.group))), default=None)
        if isinstance(ids, str):
            item.error = ids
        elif most is not None and len(ids) > most[0]:
            item.error = f"has {len(ids)} tokens, the limit is {most[0]} ({most[1]})"
        elif known is not None and max(ids, default=0) >= known:
            item.error = f"has the token {max(ids)}, the last that MODEL knows is {known - 1}"
        elif ids:  # a tokenizer may find no token in a text of characters that it drops
            item.arrays, item.length = {"input_ids": np.array(ids, np.int64)}, len(ids)

    def collate(self, items: list[Item]) -> dict[str, torch.Tensor]:
        """input_ids [B, N], padded, with the attention_mask that tells them from padding."""
        rows = [item.arrays["input_ids"] for item in items if item.arrays is not None]
        return pad_text(rows, self._tokenizer.pad_token_id, self._tokenizer.padding_side == "left")

    def _encode_long(self, text: Any) -> list[int] | str:
        """The tokens that a text is truncated to, of its beginning, where half of that comes to the same ones."""
        most, tokens = self.characters, self._truncate_to
        why = f"has more than {most} characters"
        if not self._cuts:
            ways = f" ({self._args.named('max_tokenizer_length')} N truncates to N tokens)"
            hint = ways if tokens is None else ""
            return f"{why}, the most that are tokenized{hint}"
        half, ids = (
            records.each_or_error(self._encode, [text[:size]], TOKENIZER_RAISES)[0] for size in (most // 2, most)
        )
        if isinstance(ids, str) or (half == ids and len(ids) == tokens):
            return ids
        return f"{why}, and half of these do not come to its first {tokens} tokens"

    @classmethod
    def of(cls, loaded: Loaded) -> TextInput:
        """Returns the input for a model, with the prefix of its task unless there is another."""
        limits = *lengths_of_inputs(loaded), embedded_tokens(loaded.model)
        bodies = Bodies(loaded) if loaded.args.input_format == "openai" else None
        return cls(loaded.tokenizer, loaded.args, *limits, bodies)


class ChatInput(TextInput):
    """Lines are conversations, none of which is truncated; their special tokens are those of the chat template."""

    truncates = False

    def _encode(self, inputs: list[Any]) -> list[list[int]]:
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return self._tokenizer.apply_chat_template(inputs, **options)["input_ids"]


def pad_text(rows: list[np.ndarray], pad_token_id: int, left: bool) -> dict[str, torch.Tensor]:
    """Token ids [N] as int64 input_ids [B, N] and attention_mask [B, N]."""
    shape = len(rows), max(map(len, rows))
    input_ids = np.full(shape, pad_token_id, np.int64)
    attention_mask = np.zeros(shape, np.int64)
    for number, row in enumerate(rows):
        columns = slice(shape[1] - len(row), None) if left else slice(len(row))
        input_ids[number, columns] = row
        attention_mask[number, columns] = 1
    return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(attention_mask)}


class TextOutput:
    """Turns token ids into texts with their scores and numbers of tokens; threads may share it.

    start_tokens: how many tokens at the start of a row were given to the decoder and not generated: 1 for an
        encoder-decoder, 0 for a causal LM.
    """

    def __init__(
        self, tokenizer: Any, args: BatchConfig, eos_token_ids: list[int], pad_token_id: int | None, start_tokens: int
    ) -> None:
        clean_up = {"clean_up_tokenization_spaces": True} if args.clean_up_tokenization_spaces else {}
        skip = not args.include_special_tokens
        self._decode = partial(tokenizer.batch_decode, skip_special_tokens=skip, **clean_up)
        self._eos, self._pad, self._start = eos_token_ids, pad_token_id, start_tokens

    @staticmethod
    def of(
        loaded: Loaded, starts_with_token: bool, ends_with_token: bool = True, has_scores: bool = True
    ) -> TextOutput:
        """Returns the output for a model, whose generate is asked for the scores of beams if OUTPUT has them.

        starts_with_token, ends_with_token: sequences begin with a token given to the decoder, end with one for the end.
        """
        args, eos = loaded.args, token_ids(loaded.value("eos_token_id")) if ends_with_token else []
        scored = has_scores and (args.output_sequence_scores or args.writes_records)
        if scored and (loaded.value("num_beams") or 1) > 1:
            loaded.settings |= SCORES
        return TextOutput(loaded.tokenizer, args, eos, loaded.value("pad_token_id"), int(starts_with_token))

    def finish(self, generated: GeneratedBatch) -> float:
        """Fills the items' outputs, and an error where what was generated cannot be decoded; returns the tokens."""
        sequences = generated.sequences
        if sequences is None or not len(sequences):
            return 0
        tokens, ended = count_tokens(sequences, self._start, self._eos, self._pad)
        if generated.segments is not None:
            tokens = np.array([sum(len(part[2]) for part in output) for output in generated.segments])
        each = len(sequences) // len(generated.items)  # R outputs of every item
        by_item = sequences.reshape(len(generated.items), each, *sequences.shape[1:])
        texts = records.each_or_error(self._texts, by_item, DECODER_RAISES)
        for index, (item, found) in enumerate(zip(generated.items, texts, strict=True)):
            if isinstance(found, str):
                item.error = found
                continue
            stops = stop_strings(item)
            for row, text in enumerate(found, start=index * each):
                if stops:
                    text, stopped = self._until(stops, text, sequences[row])
                    ended[row] |= stopped
                output: dict[str, Any] = {"text": text}
                if generated.scores is not None:
                    output["score"] = generated.scores[row]
                if generated.segments is not None:
                    output["segments"] = [self._segment(*part) for part in generated.segments[row]]
                item.outputs.append(output | {"tokens": int(tokens[row]), "ended": bool(ended[row])})
        return int(tokens.sum())

    def _until(self, stops: list[str], text: str, sequence: np.ndarray) -> tuple[str, bool]:
        """The text before the first of these strings, and whether one is there, or a special token; sequence: [T]."""
        if (before := before_stop(text, stops)) is not None:
            return before, True
        whole = self._decode(sequence[None, self._start :], skip_special_tokens=False)[0]
        return text, before_stop(whole, stops) is not None

    def _segment(self, start: float, end: float, tokens: list[int]) -> dict[str, Any]:
        return {"start": start, "end": end, "text": self._decode([tokens])[0]}

    def _texts(self, sequences: np.ndarray) -> list[list[str]]:
        """Returns the texts of every item; sequences: [B, R, T]."""
        texts = self._decode(np.concatenate(sequences))
        each = sequences.shape[1]
        return [texts[start : start + each] for start in range(0, len(texts), each)]


def count_tokens(
    sequences: np.ndarray, start_tokens: int, eos_token_ids: list[int], pad_token_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens of each row [B * R, T] were generated, up to the first EOS with it, and whether there is one.

    A row without an EOS ends where its padding begins: a stop string ended it, or there was no room for more.
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
