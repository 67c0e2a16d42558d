"""Lines of INPUT become the tokens of a plain call of the tokenizer; a bad line is an error of its own only."""

import json
from typing import Any

import numpy as np
import pytest
import transformers
from cli_models import sentences

from fastgen.batch.config import BatchConfig
from fastgen.batch.files import Line
from fastgen.batch.planner import Item
from fastgen.batch.text import SHORTEST_LONG_TEXT, TextInput
from fastgen.cli.transformers.args import as_flag
from fastgen.models.demo import demo_path

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }} {{ message.content }} {{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}word7{% endif %}"
)
TEXTS = sentences(20)


@pytest.fixture(scope="module")
def tokenizer(bart):
    """A tokenizer that puts <s> and </s> around every text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def prepare(tokenizer):
    """Prepares lines of text or bytes, by default as plain text."""

    def prepare_lines(
        lines: list[str | bytes],
        with_tokenizer: Any = None,
        max_tokenizer_length: int | None = None,
        limit: tuple[int, str] | None = None,
        **flags: Any,
    ) -> list[Item]:
        raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
        numbered = [Line(number, each) for number, each in enumerate(raw, start=1)]
        texts = TextInput(with_tokenizer or tokenizer, asked(**flags), max_tokenizer_length, limit)
        return texts.prepare(numbered)

    return prepare_lines


def asked(jsonl: bool = False, **flags: Any) -> BatchConfig:
    formats = {"input_format": "jsonl" if jsonl else "text", "text_field": "text"}
    decoder = {"causal_lm": True} if "chat" in flags else {}  # --chat needs it
    return BatchConfig("model", "in", "out", **formats | decoder | flags, named=as_flag)


def are_empty(prepared: list[Item]) -> bool:
    """Returns whether these lines are empty and without errors."""
    return all((each.arrays, each.length, each.error) == (None, 0, None) for each in prepared)


def ids(prepared: list[Item]) -> list[list[int]]:
    assert [each.error for each in prepared] == [None] * len(prepared)
    return [each.arrays["input_ids"].tolist() for each in prepared]


def records(texts: list[Any], **fields: Any) -> list[str]:
    return [json.dumps({"text": text} | fields) for text in texts]


@pytest.mark.parametrize("length", [None, 5])
def test_text_is_tokenized_as_by_a_plain_call(prepare, tokenizer, length):
    truncation = {} if length is None else {"truncation": True, "max_length": length}
    expected = tokenizer(["word1 " + text for text in TEXTS], **truncation)["input_ids"]
    items = prepare(TEXTS, prefix="word1 ", max_tokenizer_length=length)
    assert ids(items) == expected
    assert {each.arrays["input_ids"].dtype for each in items} == {np.dtype(np.int64)}
    assert ids(prepare(records(TEXTS), jsonl=True, prefix="word1 ", max_tokenizer_length=length)) == expected


def test_byte_order_mark_and_line_ends_are_no_text(prepare, tokenizer):
    lines = [b"\xef\xbb\xbfword1 word2\r", b"word3\r", b"word4"]
    assert ids(prepare(lines)) == tokenizer(["word1 word2", "word3", "word4"])["input_ids"]
    lines = [b"\xef\xbb\xbf" + records(TEXTS)[0].encode() + b"\r", *records(TEXTS[1:])]
    assert ids(prepare(lines, jsonl=True)) == tokenizer(TEXTS)["input_ids"]


def test_nothing_is_generated_for_lines_without_text(prepare):
    assert are_empty(prepare([b"\xef\xbb\xbf", "", " \t", "\r"], prefix="word1 "))
    lines = [*records(["", " \n\t"]), "", " "]
    assert are_empty(prepare(lines, jsonl=True, prefix="word1 "))
    assert are_empty(prepare(lines, jsonl=True, chat=True, system="word1"))


def test_nothing_is_generated_for_text_without_tokens(prepare, gpt2):
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt2)

    def dropping(texts: list[str], **settings: Any) -> Any:
        return tokenizer([text.replace("\x00", "") for text in texts], **settings)

    assert are_empty(prepare(["\x00", "word1"], dropping)[:1])


KINDS = {"17": "a number", "null": "null", "false": "true or false", "{}": "an object", '["a"]': "a list"}
KINDS |= {'"text"': "a string"}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"text": "\xff"}', "is not UTF-8 text (invalid start byte at byte 11)"),
        ('{"text": "a"', "is not JSON that can be read (Expecting ',' delimiter: line 1 column 13 (char 12))"),
        ('{"text": "a\tb"}', "is not JSON that can be read (Invalid control character at: line 1 column 12 (char 11))"),
        *((value, f"is {kind} (accepted: a JSON object)") for value, kind in KINDS.items() if kind != "an object"),
        ("[" * 100_000, "is not JSON that can be read (maximum recursion depth exceeded"),
        ('{"id": 1, "article": "a"}', 'has no field "text" (its fields: "id", "article")'),
        ("{}", 'has no field "text" (its fields: none)'),
        (json.dumps(dict.fromkeys(map(str, range(100)))), '(its fields: "0", "1", "2", '),
        *(
            (f'{{"text": {value}}}', f'has {kind} in its field "text" (accepted: a string')
            for value, kind in KINDS.items()
            if kind != "a string"
        ),
        ('{"text": [{"role": "user", "content": "a"}]}', "(accepted: a string; messages with --causal_lm --chat)"),
    ],
)
def test_errors_of_bad_records_quote_them(prepare, line, error):
    good = records(["word1"])[0]
    before, bad, after = prepare([good, line, good], jsonl=True)
    assert error in bad.error
    assert bad.arrays is None
    assert ids([before, after]) == [[0, 5, 2]] * 2


NESTED = {
    "article": {"title": "word1", "parts": ["word2", "word3"]},
    "a.b": "word4",
    "a": {"b": "word5", "c.d": {"e": "word6"}},
    "none": [],
    "outputs": [{"text": "word7"}],
}


def test_a_path_reaches_fields_inside_of_fields(prepare):
    words = {"article.title": 1, "article.parts.1": 3, "a.b": 4, "a.c.d.e": 6, "outputs.0.text": 7}
    for path, word in words.items():  # the name "a.b" comes before the field b of a
        assert ids(prepare([json.dumps(NESTED)], jsonl=True, text_field=path)) == [[0, 4 + word, 2]]
    assert are_empty(prepare([json.dumps(NESTED)], jsonl=True, text_field="none.0.text"))


def test_a_path_to_a_missing_field_names_the_part_that_exists(prepare):
    paths = {
        "article.name": 'in "article": "title", "parts"',
        "article.parts.2": 'in "article.parts": "0", "1"',
        "article.title.first": 'in "article.title": none',
        "outputs.-1.text": 'in "outputs": "0"',
        "b.a": 'its fields: "article", "a.b", "a", "none", "outputs"',
    }
    for path, reached in paths.items():
        (item,) = prepare([json.dumps(NESTED)], jsonl=True, text_field=path)
        assert item.error == f'has no field "{path}" ({reached})'
    (item,) = prepare(records(["word1"], key="a"), jsonl=True, id_field="id")
    assert item.error == 'has no field "id" (its fields: "text", "key")'


def test_numbers_too_long_for_python_fail_their_line(prepare):
    lines = [f'{{"text": "word1", "a": [{number}]}}' for number in ("-0.0", "9" * 4000, "9" * 5000)]
    *good, bad = prepare(lines, jsonl=True)
    assert ids(good) == [[0, 5, 2]] * 2
    assert bad.error.startswith("is not JSON that can be read (Exceeds the limit (4300 digits)") and bad.arrays is None


def test_an_error_of_the_tokenizer_fails_its_line_only(prepare, tokenizer):
    # Half a surrogate pair, which JSON can write and no tokenizer can read.
    good, bad, other = prepare(['{"text": "word1"}', '{"text": "\\ud800"}', '{"text": "word2"}'], jsonl=True)
    assert bad.error.startswith("cannot be tokenized (TypeError: ")
    assert ids([good, other]) == tokenizer(["word1", "word2"])["input_ids"]

    def raising(texts: list[str], **settings: Any) -> Any:
        if any("word9" in text for text in texts):
            raise RuntimeError("what\nis\tthis")
        return tokenizer(texts, **settings)

    items = prepare(["word1", "word9 word1", "", "word2"], raising)
    assert [each.error for each in items] == [None, "cannot be tokenized (RuntimeError: what is this)", None, None]
    assert ids([items[0], items[3]]) == tokenizer(["word1", "word2"])["input_ids"]


def test_input_beyond_the_limit_fails_its_line(prepare):
    limit = (5, "MODEL's positions")
    lines = ["word1 word2 word3", "word1 word2 word3 word4"]
    good, bad = prepare(lines, limit=limit)
    assert bad.error == "has 6 tokens, the limit is 5 (MODEL's positions; --truncation truncates)"
    assert ids([good]) == [[0, 5, 6, 7, 2]]
    assert [len(row) for row in ids(prepare(lines, limit=limit, max_tokenizer_length=5))] == [5, 5]


LONG = SHORTEST_LONG_TEXT + 1
ODD_TEXTS = [
    "word1 word2 " * LONG,
    "日本語のテキスト、" * LONG,
    "a" * LONG,
    ("x" * 999 + " word7 ") * 2000,
    "ö" * LONG,
    "e\u0301\u0302 " * LONG,
    "  word1\t\t  word2" * LONG,
]


@pytest.mark.parametrize("kind", ["words", "demo", "bytes"])
@pytest.mark.parametrize("text", ODD_TEXTS, ids=range(len(ODD_TEXTS)))
def test_a_long_text_has_the_tokens_of_a_plain_call_or_fails(prepare, tokenizer, kind, text):
    """The plain call gets so many characters that the cut is far away."""
    if kind == "demo":
        tokenizer = transformers.AutoTokenizer.from_pretrained(demo_path())
    elif kind == "bytes":
        tokenizer = transformers.ByT5Tokenizer()
    seen = []

    def watched(texts: list[str], **settings: Any) -> Any:
        seen.extend(map(len, texts))
        return tokenizer(texts, **settings)

    watched.truncation_side = "right"
    settings = {"truncation": True, "max_length": 64}
    [item] = prepare([text], watched, max_tokenizer_length=64)
    assert max(seen) <= SHORTEST_LONG_TEXT
    expected = tokenizer(text[: 2 * SHORTEST_LONG_TEXT], **settings)["input_ids"]
    if len(expected) == 64:
        assert ids([item]) == [expected]
    else:
        assert item.error.startswith("has more than 262144 characters, and half of these give other first 64")
    assert (len(expected) == 64) == (kind == "bytes" or " " in text.strip() or kind == "demo"), len(expected)


def test_a_long_text_that_cannot_be_cut_is_never_tokenized(prepare, tokenizer):
    def never(texts: list[str], **settings: Any) -> Any:
        assert max(map(len, texts)) < LONG
        return tokenizer(texts, **settings)

    long, why = "word1 " * LONG, "has more than 262144 characters, the most that are tokenized"
    good, bad = prepare(["word1", long], never, limit=(60, "positions"))
    assert (ids([good]), bad.error) == ([[0, 5, 2]], f"{why} (--max_tokenizer_length N truncates to N tokens)")
    assert TextInput(tokenizer, asked()).characters == 1 << 20
    assert TextInput(tokenizer, asked(), None, (70_000, "positions")).characters == 16 * 70_000
    turns = [{"role": "user", "content": long[:LONG]}]
    [bad] = prepare(records([turns]), tokenizer, jsonl=True, chat=True, max_tokenizer_length=60)
    assert bad.error == why
    never.truncation_side = "left"  # its end is kept
    [bad] = prepare([long], never, max_tokenizer_length=60)
    assert bad.error == why


def test_a_cut_line_ends_before_a_character(tokenizer):
    plain, cut = asked(), 5
    most = TextInput(tokenizer, plain, cut).line_bytes
    raw = ("word1 ö " * SHORTEST_LONG_TEXT).encode()
    for size in range(most - 3, most + 1):
        [item] = TextInput(tokenizer, plain, cut).prepare([Line(1, raw[:size], cut=True)])
        assert ids([item]) == [[0, 5, 3, 5, 2]]
    blank = Line(1, b" " * most, cut=True)
    assert "has more than 262144 characters" in TextInput(tokenizer, plain, cut).prepare([blank])[0].error
    of_records = asked(jsonl=True)
    begins = b'{"text": "' + b"a" * TextInput(tokenizer, of_records).line_bytes
    [item] = TextInput(tokenizer, of_records).prepare([Line(1, begins, cut=True)])
    assert "the most that are read of a record" in item.error


def chat(tokenizer: transformers.PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Returns the tokens of a plain call: text of the template, without further special tokens."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("system", [None, "word5 word6"])
def test_text_becomes_a_users_message(prepare, tokenizer, system):
    first = [] if system is None else [{"role": "system", "content": system}]
    expected = [chat(tokenizer, [*first, {"role": "user", "content": "word1 " + text}]) for text in TEXTS]
    assert ids(prepare(TEXTS, chat=True, system=system, prefix="word1 ")) == expected
    assert ids(prepare(records(TEXTS), jsonl=True, chat=True, system=system, prefix="word1 ")) == expected
    # Only the template's special tokens, and the start of the answer.
    assert expected[0].count(tokenizer.bos_token_id) == 1
    assert expected[0][-1] == tokenizer.convert_tokens_to_ids("word7")


def test_records_may_hold_conversations(prepare, tokenizer):
    turns = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2"}]
    turns.append({"role": "user", "content": "word3 word4"})
    own = {"role": "system", "content": "word8"}
    system = {"role": "system", "content": "word9"}
    lines = records([turns, [own, *turns]])
    assert ids(prepare(lines, jsonl=True, chat=True)) == [chat(tokenizer, turns), chat(tokenizer, [own, *turns])]
    tokens = ids(prepare(lines, jsonl=True, chat=True, system="word9"))
    assert tokens == [chat(tokenizer, [system, *turns]), chat(tokenizer, [own, *turns])]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], 'has an empty list in its field "text" (accepted: a string or a list of messages)'),
        (17, 'has a number in its field "text" (accepted: a string or a list of messages)'),
        (["word1"], 'has a string as message 1 in its field "text" (accepted: an object)'),
        ([{"role": "user"}], 'has no text as "content" of message 1 in its field "text"'),
        ([{"content": "word1"}], 'has no text as "role" of message 1 in its field "text"'),
        ([{"role": "tool", "content": "word1"}], "cannot be tokenized (TemplateError: no tools here)"),
    ],
)
def test_only_the_bad_conversation_fails(prepare, tokenizer, messages, error):
    before, bad, after = prepare(records(["word1", messages, "word2"]), jsonl=True, chat=True)
    assert bad.error == error
    expected = [chat(tokenizer, [{"role": "user", "content": text}]) for text in ("word1", "word2")]
    assert ids([before, after]) == expected


def test_a_conversation_is_never_cut_before_the_answer(prepare):
    short, long = prepare(["word1", "word1 word2 word3"], chat=True, max_tokenizer_length=6, limit=(7, "positions"))
    assert ids([short]) == [[0, 3, 5, 2, 11]]
    assert long.error.startswith(
        "has 7 tokens, the limit is 6 (--max_tokenizer_length; a conversation is not truncated"
    )
