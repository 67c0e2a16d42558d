"""Tables and JSON under other names are read as records; files of other formats are refused at their first line."""

import datetime
import decimal
import gzip
import json
import logging
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import soundfile
from cli_loop import command, write_lines
from pyarrow import feather, ipc, parquet

from fastgen.batch import errors
from fastgen.batch.errors import InputError
from fastgen.batch.files import opened, read_chunks, survey

TEXTS = ["word1 word2", 'word3, "word4"', "", "word5\nword6"]
NAMES = ["007", "b", "c", "d"]
KINDS = ["csv", "csv.gz", "tsv", "parquet", "arrow", "stream.arrow", "feather"]


def save(path: Path, table: pyarrow.Table) -> Path:
    """Writes a table in the format of the path's name."""
    name = path.name
    if name.endswith(".parquet"):
        parquet.write_table(table, path, row_group_size=3)
    elif name.endswith((".csv", ".csv.gz", ".tsv")):
        between = "\t" if name.endswith("tsv") else ","
        rows = [table.column_names, *([row[name] for name in table.column_names] for row in table.to_pylist())]
        quoted = [['"' + value.replace('"', '""') + '"' for value in row] for row in rows]
        data = "\r\n".join(map(between.join, quoted)).encode("utf-8-sig")
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    elif name.endswith("feather"):
        feather.write_feather(table, path)
    else:
        new = ipc.new_stream if "stream" in name else ipc.new_file
        with path.open("wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return path


def records_of(path: Path) -> list[dict]:
    return [json.loads(line.raw) for chunk in read_chunks(str(path), as_records=True) for line in chunk]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_table_are_records(tmp_path, kind):
    table = pyarrow.table({"id": NAMES * 1000, "text": TEXTS * 1000})
    path = save(tmp_path / f"in.{kind}", table)
    assert records_of(path) == table.to_pylist()
    assert survey(str(path), as_records=True).lines == 4000


@pytest.mark.parametrize("kind", ["csv", "parquet", "ndjson", "json"])
def test_a_run_reads_a_table_as_jsonl(tmp_path, gpt2, kind):
    table = pyarrow.table({"id": NAMES, "question": TEXTS, "target": ["word1"] * 4})
    lines = list(map(json.dumps, table.to_pylist()))
    expected, output = tmp_path / "expected.jsonl", tmp_path / "out.jsonl"
    flags = ("--causal_lm", "--text_field", "question", "--reference_field", "target")
    assert command(gpt2, write_lines(tmp_path / "in.jsonl", lines), expected, *flags) == 0
    source = tmp_path / f"in.{kind}"
    write_lines(source, lines) if kind.endswith("json") else save(source, table)
    assert command(gpt2, source, output, *flags) == 0
    assert output.read_bytes() == expected.read_bytes()
    assert command(gpt2, source, output, *flags, "--resume") == 0


def test_values_without_a_form_in_json_become_texts(tmp_path):
    values = {"day": datetime.date(2024, 2, 29), "price": decimal.Decimal("1.50"), "n": 7, "none": None, "l": [1.5]}
    path = save(tmp_path / "in.parquet", pyarrow.table({name: [value] for name, value in values.items()}))
    assert records_of(path) == [values | {"day": "2024-02-29", "price": "1.50"}]
    path = save(tmp_path / "in.parquet", pyarrow.table({"text": [b"word1"]}))
    with pytest.raises(InputError, match=f"INPUT {path}: cannot be read as Parquet .*a column holds bytes"):
        survey(str(path), as_records=True)


BAD_TABLES = [
    ("in.csv", b"id,text\n1,a\n2,b,c\n", "line 3 has 3 fields, and line 1 has 2"),
    ("in.csv", b"text,text\na,b\n", "two columns have the same name"),
    ("in.csv", b'id,text\n1,"a\n2,b\n', "line 3: unexpected end of data"),
    ("in.tsv", b'id\ttext\n1\t"a" b\n', "line 2: '\t' expected after '\"'"),
    ("in.csv", "id,text\n1,ä\n".encode("latin-1"), "'utf-8' codec can't decode"),
    ("in.parquet", b"id,text\n1,a\n", "Parquet magic bytes not found"),
    ("in.arrow", b"id,text\n1,a\n", "ArrowInvalid"),
]


@pytest.mark.parametrize(("name", "data", "message"), BAD_TABLES)
def test_a_table_that_cannot_be_read_is_one_line(tmp_path, capsys, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    assert command("/no/such/model", path, tmp_path / "out.jsonl", "--quiet") == 2
    said = capsys.readouterr().err
    kind = {".csv": "CSV", ".tsv": "TSV", ".parquet": "Parquet", ".arrow": "Arrow"}[path.suffix]
    assert f"INPUT {path}: cannot be read as {kind} (" in said and message.replace("\t", " ") in said
    assert said.count("\n") == 1


def test_a_missing_pyarrow_is_named(tmp_path, monkeypatch):
    path = save(tmp_path / "in.parquet", pyarrow.table({"text": ["word1"]}))
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    needs = f"INPUT {path} needs the package pyarrow: pip install pyarrow$"
    with pytest.raises(InputError, match=needs), opened("INPUT", str(path), as_records=True):
        pass


def test_tables_are_not_written(tmp_path, capsys):
    path = save(tmp_path / "in.csv", pyarrow.table({"text": ["word1"]}))
    assert command("/no/such/model", path, tmp_path / "out.csv", "--quiet") == 2
    assert f"OUTPUT {tmp_path / 'out.csv'}: records are written as JSON (accepted: a .jsonl)" in capsys.readouterr().err


def test_a_csv_is_text_if_a_flag_says_so(tmp_path, gpt2):
    source = write_lines(tmp_path / "in.csv", ['word1,"word2', "word3"])
    flags = ("--causal_lm", "--input_format", "text")
    assert command(gpt2, source, tmp_path / "out.csv", *flags) == 0
    assert command(gpt2, write_lines(tmp_path / "in", ['word1,"word2', "word3"]), tmp_path / "out", *flags) == 0
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "out").read_bytes()


def test_files_of_other_formats_are_refused(tmp_path, capsys):
    table = pyarrow.table({"text": ["word1 word2"] * 100})
    for name in ("a.parquet", "a.arrow", "a.stream.arrow"):
        save(tmp_path / name, table)
    soundfile.write(tmp_path / "a.wav", np.zeros(100), 16000)
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as archive:
        archive.writestr("sheet.xml", "word1")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"word1\n"))
    kinds = {"parquet": "a Parquet table", "arrow": "an Arrow table", "gz": "a compressed file", "wav": "a sound"}
    for path in list(tmp_path.glob("a.*")):
        source = path.rename(tmp_path / f"{path.stem}.{path.suffix[1:]}.txt")
        assert command("/no/such/model", source, tmp_path / "out", "--quiet") == 2
        said = capsys.readouterr().err
        what = kinds.get(path.suffix[1:], "a ZIP archive or an Excel table")
        assert f"INPUT {source}: line 1 begins like {what} (accepted: " in said and said.count("\n") == 1


def test_text_that_looks_like_json_is_noted(tmp_path, gpt2, caplog):
    for first, is_json in (('{"text": "word1"}', True), ("[", True), ('[{"text": 1}]', True), ("{word1}", False)):
        caplog.clear()
        source = write_lines(tmp_path / "in.txt", [first, "word1"])
        assert command(gpt2, source, tmp_path / "out.txt", "--causal_lm", "--overwrite", "--quiet") == 0
        said = f"INPUT {source}: line 1 looks like JSON, and is read as text (--input_format jsonl reads it)"
        warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings == [said] * is_json


def test_json_over_several_lines_is_named(tmp_path, capsys):
    source = write_lines(tmp_path / "in.json", ["[", '{"text": "word1"}', "]"])
    assert command("/no/such/model", source, tmp_path / "out.jsonl", "--quiet") == 2
    assert "accepted: an object per line, as jq -c writes them" in capsys.readouterr().err
