"""Outputs become the texts, scores and token counts of a plain loop, a record in each line."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fastgen.batch.config import BatchConfig
from fastgen.batch.files import Line
from fastgen.batch.planner import GeneratedBatch, Item
from fastgen.batch.records import ADDED_FIELDS, first_text, name_of, record_of
from fastgen.batch.text import TextInput, TextOutput

EOS, PAD = 2, 1


@pytest.fixture(scope="module")
def tokenizer(bart):
    """A tokenizer in which word1 is token 5, word2 token 6, …"""
    return AutoTokenizer.from_pretrained(bart)


def asked(**flags: Any) -> BatchConfig:
    formats = {"input_format": "text", "output_format": "text"}
    return BatchConfig("model", "in", "out", **formats | flags)


JSONL = asked(output_format="jsonl")
BOTH_JSONL = asked(output_format="jsonl", input_format="jsonl")


class Finished(NamedTuple):
    """The written records of a batch, and its counts."""

    records: list[tuple[int, bytes]]
    amount: float
    failures: list[tuple[int, str]]


def finish(
    tokenizer: Any, args: BatchConfig, eos_token_ids: set[int], pad_token_id: int | None, start_tokens: int = 1
) -> Callable[[GeneratedBatch], Finished]:
    """Finishes a batch as the workers after the model do."""
    output = TextOutput(tokenizer, args, [*eos_token_ids], pad_token_id, start_tokens)

    def finish_batch(batch: tuple[GeneratedBatch, list[Item]]) -> Finished:
        generated = replace(batch[0], items=[replace(item, outputs=[]) for item in batch[0].items])
        others = batch[1]
        amount = output.finish(generated)
        items = [*generated.items, *others]
        failures = [(item.line.number, name_of(item, args) + item.error) for item in items if item.error]
        return Finished([(item.line.number, record_of(item, args)) for item in items], amount, failures)

    return finish_batch


def generated(
    raw: list[str | bytes], sequences: list[list[int]], scores: list[float] | None = None, others: tuple[Item, ...] = ()
) -> tuple[GeneratedBatch, list[Item]]:
    lines = [Line(number, each.encode() if isinstance(each, str) else each) for number, each in enumerate(raw, start=1)]
    return GeneratedBatch([Item(line, length=4) for line in lines], np.array(sequences, np.int64), scores), list(others)


def parsed(finished: Finished) -> list[dict[str, Any]]:
    """Returns the records in order, each of them one line."""
    for _, record in finished.records:
        assert record.endswith(b"\n")
        assert len(record.decode().splitlines()) == 1
    return [json.loads(record) for _, record in sorted(finished.records)]


@pytest.mark.parametrize(
    ("row", "eos", "pad", "start", "tokens"),
    [
        ([0, 5, 6, 2, 1, 1], {2}, 1, 1, 3),
        ([2, 5, 6, 2, 1, 1], {2}, 1, 1, 3),  # BART starts with its EOS
        ([1, 5, 6, 2, 1, 1], {2}, 1, 1, 3),  # T5 starts with its padding
        ([5, 6, 2, 2, 2, 2], {2}, 2, 0, 3),  # GPT-2 pads with its EOS
        ([5, 6, 7, 7, 7, 7], {2}, 2, 0, 6),  # as long as allowed
        ([5, 6, 1, 7, 1, 1], {2}, 1, 0, 4),  # a stop string ended it, and a pad token was generated
        ([5, 6, 8, 7, 2, 1], {2, 8}, 1, 0, 3),
        ([5, 6, 7, 1, 1, 1], set(), 1, 0, 3),
        ([5, 6, 7, 1, 1, 1], set(), None, 0, 6),
        ([1, 1, 1, 1, 1, 1], {2}, 1, 1, 0),
        ([2, 2, 2, 2, 2, 2], {2}, 2, 0, 1),
        ([3], {2}, 1, 1, 0),
    ],
)
def test_tokens_are_counted_up_to_the_first_end(tokenizer, row, eos, pad, start, tokens):
    form = asked(output_format="jsonl")
    finished = finish(tokenizer, form, eos, pad, start)(generated(["a"], [row]))
    assert parsed(finished)[0]["outputs"][0]["tokens"] == finished.amount == tokens


def test_text_is_one_line_per_input(tokenizer):
    batch = generated(["a", "b"], [[0, 5, 6, 2], [0, 7, 2, 1]], others=(Item(Line(3, b"")),))
    finished = finish(tokenizer, asked(), {EOS}, PAD)(batch)
    assert sorted(finished.records) == [(1, b"word1 word2\n"), (2, b"word3\n"), (3, b"\n")]
    assert (finished.amount, finished.failures) == (5, [])
    finished = finish(tokenizer, asked(include_special_tokens=True), {EOS}, PAD)(batch)
    assert sorted(finished.records)[1] == (2, b"<s> word3 </s> <pad>\n")


@pytest.mark.parametrize(("scores", "shown"), [([-0.5, -1.25], b"-0.500000####-1.250000"), (None, b"NA####NA")])
def test_scores_and_several_outputs_stand_in_a_line_of_text(tokenizer, scores, shown):
    form = asked(output_sequence_scores=True, join_outputs=True)
    batch = generated(["a"], [[0, 5, 2], [0, 6, 2]], scores, (Item(Line(2, b"")),))
    records = sorted(finish(tokenizer, form, {EOS}, PAD)(batch).records)
    assert records == [(1, shown + b"\tword1####word2\n"), (2, b"NA\t\n")]
    assert [first_text(record, form) for _, record in records] == ["word1", ""]


class Decoder:
    """A tokenizer that returns its own texts, and raises those that are exceptions."""

    def __init__(self, texts: list[str | Exception]) -> None:
        self.texts = texts
        self.calls: list[int] = []
        self.settings: dict[str, Any] = {}

    def batch_decode(self, sequences: np.ndarray, **settings: Any) -> list[str]:
        self.calls.append(len(sequences))
        self.settings = settings
        texts = [self.texts[row[0]] for row in sequences]
        for text in texts:
            if isinstance(text, Exception):
                raise text
        return texts


AWKWARD = "a\r\nb\nc\rd\te \u2028\x85\x0c####\ud800"


def test_every_record_is_one_line_for_any_text():
    batch = generated(["a"], [[0]])
    (record,) = parsed(finish(Decoder([AWKWARD]), JSONL, {EOS}, PAD)(batch))
    assert record["outputs"][0]["text"] == AWKWARD
    finished = finish(Decoder([AWKWARD]), asked(), {EOS}, PAD)(batch)
    assert finished.records == [(1, "a b c d\te \u2028\x85\x0c####\\ud800\n".encode())]


def test_all_rows_are_decoded_in_one_call_with_the_settings():
    decoder, batch = Decoder(["a", "b"]), generated(["x", "y"], [[0], [1]])
    finish(decoder, JSONL, {EOS}, PAD)(batch)
    assert (decoder.calls, decoder.settings) == ([2], {"skip_special_tokens": True})
    form = asked(output_format="jsonl", clean_up_tokenization_spaces=True, include_special_tokens=True)
    finish(decoder, form, {EOS}, PAD)(batch)
    assert decoder.settings == {"skip_special_tokens": False, "clean_up_tokenization_spaces": True}


def test_an_undecodable_output_fails_its_line_only():
    decoder = Decoder(["a", ValueError("no\nword"), "c", "d"])
    batch = generated(["x", "y"], [[0], [1], [2], [3]])
    finished = finish(decoder, JSONL, {EOS}, PAD)(batch)
    error = "the generated tokens cannot be decoded (ValueError: no word)"
    assert parsed(finished)[0] == {"line": 1, "outputs": [], "error": error}
    assert [one["text"] for one in parsed(finished)[1]["outputs"]] == ["c", "d"]
    assert finished.failures == [(1, error)]


def test_records_of_text_are_numbered(tokenizer):
    batch = generated(
        ["a"],
        [[0, 5, 2], [0, 6, 1]],
        [-0.5, float("-inf")],
        (Item(Line(2, b" ")), Item(Line(3, b"\xff"), error="is not UTF-8 text")),
    )
    finished = finish(tokenizer, JSONL, {EOS}, PAD)(batch)
    outputs = [{"text": "word1", "score": -0.5, "tokens": 2}, {"text": "word2", "score": None, "tokens": 1}]
    assert parsed(finished) == [
        {"line": 1, "input_tokens": 4, "outputs": outputs},
        {"line": 2, "input_tokens": 0, "outputs": []},
        {"line": 3, "outputs": [], "error": "is not UTF-8 text"},
    ]
    assert finished.failures == [(3, "is not UTF-8 text")]


FIELDS = [
    (
        '{"text": "a", "id": 7, "b": [1.0, 0.10000000000000000001], "c": "\\u00e9é\\ud800"}',
        '{"text": "a", "id": 7, "b": [1.0, 0.1], "c": "éé\\ud800"}',
    ),
    (' {"text":"a","number":' + "9" * 4000 + ',"a":[]} ', '{"text": "a", "number": ' + "9" * 4000 + ', "a": []}'),
    ('{"line": 5, "text": "a\u2028\x85",\r"z": 1e2}', '{"line": 5, "text": "a\\u2028\\u0085", "z": 100.0}'),
    # Only fields of earlier runs get a number.
    ('{"outputs": [], "text": 1, "error": "a"}', '{"outputs_1": [], "text": 1, "error_1": "a"}'),
    (
        '{"outp\\u0075ts": 1.0, "outputs_1": 2, "input_tokens_x": 3}',
        '{"outputs_2": 1.0, "outputs_1": 2, "input_tokens_x": 3}',
    ),
    ('{"a": {"outputs": 1}, "outputs": 9, "error_1": 1}', '{"a": {"outputs": 1}, "outputs_2": 9, "error_1": 1}'),
]


@pytest.mark.parametrize(("own", "fields"), FIELDS)
def test_fields_of_a_record_come_before_its_outputs(own, fields):
    ((_, record),) = finish(Decoder(["x"]), BOTH_JSONL, {EOS}, PAD)(generated([own + "\r"], [[0]])).records
    assert record.decode() == fields[:-1] + ', "input_tokens": 4, "outputs": [{"text": "x", "tokens": 0}]}\n'
    assert first_text(record, BOTH_JSONL) == "x"


def test_a_record_that_cannot_be_written_has_its_line_number():
    for depth in range(940, 1000):
        own = '{"a": ' + "[" * depth + "]" * depth + "}"
        (record,) = parsed(finish(Decoder(["x"]), BOTH_JSONL, {EOS}, PAD)(generated([own], [[0]])))
        assert record["outputs"] == [{"text": "x", "tokens": 0}] and ("a" in record or record["line"] == 1)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner, max_size=3),
    max_leaves=8,
)


# With some that one or two earlier runs may have left.
NAMES = [*ADDED_FIELDS, "outputs_1", "error_1", "error_2"]


@given(
    own=st.dictionaries(st.text(st.characters()) | st.sampled_from(NAMES), VALUES, max_size=6),
    text=st.text(st.characters()),
    escaped=st.booleans(),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\r", "\t: ")]),
)
def test_any_record_is_kept(own, text, escaped, separators):
    written = json.dumps(own | {"text": "a"}, ensure_ascii=escaped, separators=separators)
    lines = generated([written.encode("utf-8", "backslashreplace")], [[0]])
    (record,) = parsed(finish(Decoder([text]), BOTH_JSONL, {EOS}, PAD)(lines))
    assert record.pop("outputs") == [{"text": text, "tokens": 0}]
    assert record.pop("input_tokens") == 4
    own["text"] = "a"
    number = next(n for n in (1, 2, 3) if not own.keys() & {f"{name}_{n}" for name in ADDED_FIELDS})
    renamed = {f"{name}_{number}" if name in ADDED_FIELDS else name: value for name, value in own.items()}
    assert record == renamed
    assert list(record) == list(renamed)


def test_failed_records_keep_their_fields(tokenizer):
    raw = [
        '{"id": "a1", "body": 1}',
        "{}",
        "[1]",
        "",
        '{"id": 2, "outputs": 3, "error_1": 4}',
        '{"id": 3, "text": "too long"}',
    ]
    lines = [Line(number, text.encode()) for number, text in enumerate(raw, start=1)]
    form = asked(output_format="jsonl", input_format="jsonl", text_field="text", id_field="id")
    prepared = TextInput(tokenizer, replace(form, id_field=None), most=(3, "positions")).prepare(lines)
    finished = finish(tokenizer, form, {EOS}, PAD)(generated([], np.empty((0, 0)), others=tuple(prepared)))
    errors = [each.error for each in prepared]
    assert parsed(finished) == [
        {"id": "a1", "body": 1, "outputs": [], "error": errors[0]},
        {"outputs": [], "error": errors[1]},
        {"line": 3, "outputs": [], "error": errors[2]},
        {"line": 4, "input_tokens": 0, "outputs": []},
        {"id": 2, "outputs_2": 3, "error_1": 4, "outputs": [], "error": errors[4]},
        {"id": 3, "text": "too long", "outputs": [], "error": errors[5]},
    ]
    assert finished.failures == [
        (1, f'id "a1": {errors[0]}'),
        (2, errors[1]),
        (3, errors[2]),
        (5, f"id 2: {errors[4]}"),
        (6, f"id 3: {errors[5]}"),
    ]
    text = finish(tokenizer, asked(input_format="jsonl"), {EOS}, PAD)
    assert text(generated(raw[:1], [[0, 5, 2]])).records == [(1, b"word1\n")]


@pytest.mark.parametrize("form", [JSONL, BOTH_JSONL, asked(), asked(output_sequence_scores=True)])
def test_the_first_text_of_a_record_is_that_of_its_first_output(form):
    text = "a #### b\tc é"
    batch = generated(['{"text": "x", "outputs_of_others": 1}'], [[0]], [-0.5], (Item(Line(2, b"")),))
    records = finish(Decoder([text]), form, {EOS}, PAD)(batch).records
    assert [first_text(record, form) for _, record in sorted(records)] == [text, ""]
