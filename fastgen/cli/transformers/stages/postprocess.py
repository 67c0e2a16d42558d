"""What was generated for a batch to records for OUTPUT: text or JSON, one record a line, one line per line of INPUT."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import transformers

from fastgen.cli.transformers.files import records
from fastgen.cli.transformers.files.sound_folder import SoundFolder
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.stages.items import Finished, Generated, Line, Segment

Tokenizer: TypeAlias = transformers.PreTrainedTokenizerBase
SEPARATOR = "####"
Decode = Callable[[np.ndarray | list[list[int]]], list[str]]
Count = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Text:
    text: str
    score: float | None  # None without beam scores
    tokens: int
    segments: list[dict[str, Any]] | None = None  # of a recording, None without timestamps

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        added: dict[str, Any] = {}
        if self.score is not None:
            added["score"] = self.score if math.isfinite(self.score) else None  # JSON has no infinity
        if self.segments is not None:
            added["segments"] = self.segments
        return {"text": self.text, **added, "tokens": self.tokens}


@dataclass(frozen=True)
class _Sound:
    path: str
    seconds: float
    sampling_rate: int

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Result:
    """What came of one line."""

    line: Line
    input_tokens: int | None  # None where nobody counted them
    outputs: list[Any]  # _Text or _Sound
    error: str | None = None


def finish(
    tokenizer: Tokenizer,
    args: RunConfig,
    eos_token_ids: Collection[int],
    pad_token_id: int | None,
    start_tokens: int = 1,
) -> Callable[[Generated], Finished]:
    """A function that turns what was generated into records; threads may share it.

    start_tokens: how many tokens at the start of a row were given to the decoder and not generated: 1 for an
        encoder-decoder, 0 for a causal LM, and 0 for Whisper, whose generate leaves them out. eos_token_ids: none for
        Whisper, whose generate leaves out the end, too.
    """
    clean_up = {"clean_up_tokenization_spaces": True} if args.clean_up_tokenization_spaces else {}
    decode = partial(tokenizer.batch_decode, skip_special_tokens=not args.include_special_tokens, **clean_up)
    count = partial(count_tokens, start_tokens=start_tokens, eos_token_ids=[*eos_token_ids], pad_token_id=pad_token_id)

    def finish_texts(generated: Generated) -> Finished:
        if generated.segments is None:
            tokens = count(generated.sequences).tolist()
        else:
            tokens = [sum(len(segment.tokens) for segment in output) for output in generated.segments]
        return _finish(_texts(decode, tokens, generated), sum(tokens), generated, args)

    return finish_texts


def finish_sounds(folder: SoundFolder, args: RunConfig) -> Callable[[Generated], Finished]:
    """A function that writes sounds to files, and makes records that name them; threads may share it."""

    def finish(generated: Generated) -> Finished:
        seconds = sum(map(len, generated.sounds or ())) / folder.sampling_rate
        return _finish(_sounds(folder, generated), seconds, generated, args)

    return finish


def first_text(record: bytes, args: RunConfig) -> str:
    """The first output's text of a record, empty where there is none."""
    text = record.decode("utf-8").removesuffix("\n")
    if args.writes_jsonl:
        outputs = records.parse(text)["outputs"]
        return outputs[0]["text"] if outputs else ""
    if args.output_sequence_scores:
        text = text.partition("\t")[2]
    return text.partition(SEPARATOR)[0] if args.join_outputs else text


def count_tokens(
    sequences: np.ndarray, start_tokens: int, eos_token_ids: list[int], pad_token_id: int | None
) -> np.ndarray:
    """How many tokens of each row [B * R, T] were generated, [B * R]: up to the first EOS, and that one included.

    A row without an EOS ends where its padding begins: a stop string ended it, or there was no room for more.
    """
    generated = sequences[:, start_tokens:]
    rows, width = generated.shape
    if width == 0:
        return np.zeros(rows, np.int64)
    is_eos = np.isin(generated, eos_token_ids)
    is_text = np.ones_like(is_eos) if pad_token_id is None else generated != pad_token_id
    unpadded = np.where(is_text.any(axis=1), width - is_text[:, ::-1].argmax(axis=1), 0)
    return np.where(is_eos.any(axis=1), is_eos.argmax(axis=1) + 1, unpadded)


def _finish(results: Iterable[_Result], amount: float, generated: Generated, args: RunConfig) -> Finished:
    others = (_Result(each.line, None if each.error else 0, [], each.error) for each in generated.not_generated)
    finished = Finished(records=[], amount=amount, failures=[])
    for result in (*results, *others):
        number = result.line.number
        record = _json_record(result, args) if args.writes_jsonl else _text_record(result, args)
        finished.records.append((number, record))
        if result.error is not None:
            finished.failures.append((number, _name(result.line, args) + result.error))
    return finished


def _sounds(folder: SoundFolder, generated: Generated) -> Iterator[_Result]:
    for line, length, samples in zip(generated.lines, generated.lengths, generated.sounds or (), strict=True):
        if len(samples):
            seconds = len(samples) / folder.sampling_rate
            outputs = [_Sound(folder.write(line.number, samples), seconds, folder.sampling_rate)]
            yield _Result(line, length, outputs)
        else:
            yield _Result(line, length, [], "became a sound of no length")


def _texts(decode: Decode, tokens: list[int], generated: Generated) -> Iterator[_Result]:
    each = len(tokens) // max(1, len(generated.lines))  # R outputs of every line
    scores = generated.scores or [None] * len(tokens)
    texts_of_lines = _decode_lines(decode, generated.sequences, each)
    for index, (line, length) in enumerate(zip(generated.lines, generated.lengths, strict=True)):
        texts = texts_of_lines[index]
        if isinstance(texts, str):
            yield _Result(line, length, [], error=texts)
        else:
            rows = slice(index * each, (index + 1) * each)
            segments = repeat(None) if generated.segments is None else _segments(decode, generated.segments[rows])
            yield _Result(line, length, list(map(_Text, texts, scores[rows], tokens[rows], segments)))


def _segments(decode: Decode, outputs: list[list[Segment]]) -> list[list[dict[str, Any]]]:
    """As JSON, of each output; their texts together are the output's."""

    def described(segment: Segment) -> dict[str, Any]:
        (text,) = decode([segment.tokens])
        return {"start": segment.start, "end": segment.end, "text": text}

    return [list(map(described, segments)) for segments in outputs]


def _decode_lines(decode: Decode, sequences: np.ndarray, each: int) -> list[list[str] | str]:
    """The texts of every line in one call; if that raises, in a call for each, with an error for those that raise."""
    if not len(sequences):
        return []
    starts = range(0, len(sequences), each)
    try:
        texts = decode(sequences)
        return [texts[start : start + each] for start in starts]
    except Exception:
        return [_decode_line(decode, sequences[start : start + each]) for start in starts]


def _decode_line(decode: Decode, sequences: np.ndarray) -> list[str] | str:
    try:
        return decode(sequences)
    except Exception as error:  # a tokenizer may raise anything
        return f"what was generated cannot be decoded ({records.reason(error)})"


def _text_record(result: _Result, args: RunConfig) -> bytes:
    """A line as FastSeq writes it; nothing, or no score and nothing, where there are no outputs."""
    outputs = result.outputs
    if len(outputs) > 1 and not args.join_outputs:
        raise ValueError(f"a line of text has no room for {len(outputs)} outputs (accepted: JSON, or joined outputs)")
    text = SEPARATOR.join(_on_one_line(output.text) for output in outputs)
    if args.output_sequence_scores:
        scores = ["NA" if output.score is None else f"{output.score:f}" for output in outputs]
        text = SEPARATOR.join(scores or ["NA"]) + "\t" + text
    return (text + "\n").encode("utf-8", "backslashreplace")


def _json_record(result: _Result, args: RunConfig) -> bytes:
    added: dict[str, Any] = {} if result.input_tokens is None else {"input_tokens": result.input_tokens}
    added["outputs"] = [output.fields() for output in result.outputs]
    if result.error is not None:
        added["error"] = result.error
    return records.written(result.line, args.reads_jsonl, added)


def _name(line: Line, args: RunConfig) -> str:
    """What a failed record is called by those who wrote it, where it says so."""
    if args.reads_jsonl and args.id_field is not None:
        with suppress(records.RecordError):
            record = records.parse(records.decode(line))
            return f"{args.id_field} {records.quoted(records.field(record, args.id_field))}: "
    return ""


def _on_one_line(text: str) -> str:
    return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
