"""fastgen.TextGenerator returns the records of the command in order; from a list, from columns, from a stream."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from cli_loop import command, plain_loop, write_lines
from cli_models import WORDS, copy_with_template, sentences
from python_process import run_code

import fastgen
from fastgen.batch.errors import InputError
from fastgen.batch.generator import _chunks

LINES = sentences(23)


def texts(records: list[dict]) -> list[str]:
    return [output["text"] for record in records for output in record["outputs"]]


def test_an_old_transformers_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(InputError, match=r"wanted transformers 5\.0\.0 or newer, found 4\.57\.1"):
        fastgen.TextGenerator("demo")


def test_a_list_has_the_records_of_the_command_in_order(bart, tmp_path):
    lines = [*LINES, "", " ".join(WORDS * 2)]
    source, output = write_lines(tmp_path / "in", lines), tmp_path / "out.jsonl"
    assert command(bart, source, output, "--beam", 2, "--bs", 4) == 1
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record.pop("line") for record in written] == [*range(1, len(lines) + 1)]
    generator = fastgen.TextGenerator(str(bart), num_beams=2, batch_size=4)
    records = generator(lines)
    assert "truncation=True truncates" in records[-1]["error"]  # a setting as users write it here
    records[-1]["error"] = records[-1]["error"].replace("truncation=True", "--truncation")
    assert records == written
    assert generator([]) == [] and texts(generator(LINES[:2])) == texts(written[:2])


def test_a_generator_leaves_fastgen_disabled():
    fastgen.disable()
    try:
        generator = fastgen.TextGenerator("demo", num_beams=4)
        assert texts(generator(LINES[:2])) and {state.state for state in fastgen.status()}.isdisjoint({"applied"})
    finally:
        fastgen.enable()


def test_columns_are_returned_with_their_outputs(bart):
    generator = fastgen.TextGenerator(str(bart), text_field="article", typical_p=0.9, renormalize_logits=True)
    columns = {"article": np.array(LINES[:5]), "id": [5, 4, 3, 2, 1]}
    batch = generator(columns)
    assert list(batch) == ["article", "id", "input_tokens", "outputs", "error"] and batch["id"] == columns["id"]
    assert [outputs[0]["text"] for outputs in batch["outputs"]] == plain_loop(bart, LINES[:5], 5)


def test_tables_are_columns(bart):
    datasets, pandas, pyarrow = map(pytest.importorskip, ("datasets", "pandas", "pyarrow"))
    generator = fastgen.TextGenerator(bart, bs=4)
    columns = {"text": [*LINES[:4], None], "id": [5, 4, 3, 2, 1]}
    expected = generator(columns)
    frame = pandas.DataFrame(columns)
    tables = pyarrow.table(columns), pyarrow.RecordBatch.from_pydict(columns), datasets.Dataset.from_dict(columns)
    for table in (frame, frame.convert_dtypes(), *tables):
        batch = generator(table)
        assert list(batch) == list(expected) and list(batch["id"]) == columns["id"]
        assert batch["outputs"] == expected["outputs"] and batch["input_tokens"] == expected["input_tokens"]
        assert [error is None for error in batch["error"]] == [True] * 4 + [False]
        assert texts(generator(table["text"])) == texts(generator(columns["text"]))  # a column of it is a list
        with pytest.raises(TypeError, match="inputs is a table"):
            next(generator.iterate(table))
    with pytest.raises(InputError, match=r"^text_field='text' is not a column .accepted: 0, 1.$"):
        generator(pandas.DataFrame([LINES[:2]]))


def test_messages_of_a_table_are_conversations(gpt2, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    folder = copy_with_template(gpt2, tmp_path / "chat", "{{ messages[0]['content'] }}")
    generator = fastgen.TextGenerator(folder, causal_lm=True, chat=True)
    conversations = [[{"role": "user", "content": line}] for line in LINES[:3]]
    expected = plain_loop(gpt2, LINES[:3], 3, causal_lm=True)
    arrays = np.empty(3, object)
    arrays[:] = [np.array(each) for each in conversations]  # as pandas reads them from a file
    for column in (conversations, arrays, pyarrow.array(conversations)):
        assert texts(generator(column)) == expected


def test_a_stream_is_processed_while_it_is_read(bart):
    read: list[int] = []

    def endless() -> Iterator[str]:
        for number in range(1_000_000):
            read.append(number)
            yield LINES[number % len(LINES)]

    generator = fastgen.TextGenerator(str(bart), bs=4, window=8)
    records = generator.iterate(endless())
    answers = [next(records) for _ in range(40)]
    records.close()
    assert texts(answers) == [(plain_loop(bart, LINES, 4) * 2)[number] for number in range(40)]
    assert len(read) < 5000


def test_a_stream_that_pauses_has_its_records_before_it_resumes(bart):
    seen: list[dict] = []

    def conversation() -> Iterator[str]:
        for line in LINES[:3]:
            answered = len(seen)
            yield line
            assert answered == len(seen)

    generator = fastgen.TextGenerator(str(bart), bs=1, window=0)
    for record in generator.iterate(conversation()):
        seen.append(record)
    assert texts(seen) == plain_loop(bart, LINES[:3], 1)


def test_a_loaded_model_is_accepted_with_its_tokenizer(gpt2):
    model = transformers.AutoModelForCausalLM.from_pretrained(gpt2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt2)
    generator = fastgen.TextGenerator(model, tokenizer=tokenizer, causal_lm=True, bs=4, max_new_tokens=5)
    assert texts(generator(LINES)) == plain_loop(gpt2, LINES, 4, causal_lm=True, max_new_tokens=5)
    samples = fastgen.TextGenerator(model, tokenizer=tokenizer, causal_lm=True, do_sample=True, seed=3, bs=4)
    assert samples(LINES) == samples(LINES)
    with pytest.raises(InputError, match="tokenizer: is missing"):
        fastgen.TextGenerator(model)


def test_the_callers_model_and_tokenizer_are_as_before(gpt2):
    model = transformers.AutoModelForCausalLM.from_pretrained(gpt2).train()
    model.transformer.ln_f.eval()  # a part that is not trained
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt2, padding_side="right")

    def state() -> list:
        modes = {name: module.training for name, module in model.named_modules()}
        return [modes, tokenizer.padding_side, tokenizer.pad_token, torch.get_rng_state().tolist()]

    before, settings = state(), {"causal_lm": True, "seed": 3, "max_new_tokens": 5, "max_tokenizer_length": 9, "bs": 4}
    generator = fastgen.TextGenerator(model, tokenizer=tokenizer, **settings)
    assert state() == before
    lines = [line for line in LINES if len(line.split()) < 10]
    expected = plain_loop(gpt2, lines, 4, causal_lm=True, max_new_tokens=5)  # without dropout
    for record, text in zip(generator.iterate(lines), expected, strict=True):
        assert record["outputs"][0]["text"] == text and state() == before
    assert len(tokenizer(" ".join(WORDS[:20]))["input_ids"]) == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beamz": 3}, "did you mean num_beams"),
        ({"resume": True}, "resume: is a flag of the command only"),
        ({"temperature": 0.5}, "has no effect without do_sample"),
        ({"task": "text-to-speech"}, "OUTPUT - does not go with task='text-to-speech'"),
    ],
)
def test_settings_that_cannot_be_used_are_named(bart, settings, message):
    with pytest.raises(InputError, match=message):
        fastgen.TextGenerator(str(bart), **settings)


def test_a_model_may_be_a_path_and_inputs_are_no_single_text(bart):
    generator = fastgen.TextGenerator(bart, bs=4)
    assert generator(LINES[:3]) == fastgen.TextGenerator(str(bart), bs=4)(LINES[:3])
    with pytest.raises(TypeError, match="inputs is one text"):
        generator(LINES[0])
    with pytest.raises(InputError, match=r"^text_field='text' is not a column .accepted: article, id.$"):
        generator({"article": LINES, "id": LINES})


def of_rows(generator: fastgen.TextGenerator, rows: list, size: int) -> list[dict]:
    """Returns the records of rows in batches of a size, as an engine cuts them."""
    columns = [generator({"text": rows[start : start + size]}) for start in range(0, len(rows), size)]
    names = ("input_tokens", "outputs", "error")
    return [dict(zip(names, row, strict=True)) for each in columns for row in zip(*map(each.get, names), strict=True)]


def test_a_value_that_is_no_text_fails_its_row_in_any_batch(bart):
    generator = fastgen.TextGenerator(bart, bs=4)
    bad = [None, 1, np.float64("nan"), np.int64(3), b"word1", Path("word1"), object(), {"a": {1}}, 10**5000, ["word1"]]
    rows = [each for value in bad for each in (value, "word1")]
    expected = of_rows(generator, rows, len(rows))
    assert [record["error"] is None for record in expected] == [False, True] * len(bad)
    assert [output["text"] for record in expected for output in record["outputs"]] == (
        plain_loop(bart, ["word1"] * len(bad), 4)
    )
    assert expected[0]["error"] == "is null (accepted: a string)"
    assert expected[8]["error"] == "is a value of type bytes (accepted: a string)"
    for size in (1, 2, 3):
        assert of_rows(generator, rows, size) == expected
    assert [record.get("error") for record in generator(rows)] == [record["error"] for record in expected]


def test_a_row_that_the_model_fails_for_has_the_error(bart, monkeypatch):
    def refuse(self: object, **_: object) -> None:
        raise ValueError("this cannot be")

    monkeypatch.setattr(transformers.BartForConditionalGeneration, "generate", refuse)
    generator = fastgen.TextGenerator(bart, bs=1, window=0)
    expected = [{"outputs": [], "error": "cannot be generated for (ValueError: this cannot be)"}] * 5
    assert generator(LINES[:5]) == expected == [*generator(LINES[:2]), *generator(LINES[2:5])]


@pytest.mark.parametrize("kind", ["numpy", "pandas", "arrow"])
def test_each_format_of_datasets_is_accepted(bart, kind):
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_dict({"text": LINES[:5]}).with_format(kind)
    generated = plain.map(fastgen.TextGenerator(bart, bs=4), batched=True, batch_size=3, load_from_cache_file=False)
    assert texts(list(generated.with_format(None))) == plain_loop(bart, LINES[:5], 5)


@pytest.mark.parametrize("rows", [["", " ", *LINES[:3]], [*LINES[:3], None, " ".join(WORDS * 2), None, *LINES[3:5]]])
def test_columns_have_one_type_in_all_batches_of_datasets(bart, rows):
    datasets = pytest.importorskip("datasets")
    generator = fastgen.TextGenerator(bart, num_beams=2, bs=4)
    plain = datasets.Dataset.from_dict({"text": rows})
    expected = generator(rows)
    for size in (1, 2, len(rows)):
        rows_of_all = plain.map(generator, batched=True, batch_size=size, load_from_cache_file=False)
        assert [texts([row]) for row in rows_of_all] == [texts([record]) for record in expected]
        assert rows_of_all["error"][:] == [record.get("error") for record in expected]
        assert rows_of_all["input_tokens"][:] == [record.get("input_tokens") for record in expected]
        assert rows_of_all.features["error"] == datasets.Value("string")


def test_paths_are_paths_of_sounds(tmp_path):
    chunks = list(_chunks([tmp_path / "a.wav", "b.wav", b"c.wav"], 4))
    assert [line.value for line in chunks[0]] == [str(tmp_path / "a.wav"), "b.wav", b"c.wav"]


def test_it_is_imported_when_it_is_first_used():
    code = "import sys, fastgen\nassert 'fastgen.cli' not in sys.modules and 'torch' not in sys.modules\n"
    run_code(code + "assert fastgen.TextGenerator.__name__ == 'TextGenerator' and 'torch' in sys.modules")
