"""Tables as INPUT: the rows of CSV, TSV, Parquet and Arrow files as JSON Lines, which are read like other records.

Python reads CSV and TSV, where all values are texts: to guess types would turn 007 into 7. pyarrow reads Parquet and
Arrow; dates, decimals and other values that JSON lacks become texts.

Tests: tests/batch/test_tables.py
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any

from fastgen.batch.errors import InputError, check_packages, reason

DELIMITERS = {"CSV": ",", "TSV": "\t"}
LONGEST_FIELD = 1 << 24  # characters; a quote that is not closed extends to the end of the file
ROWS_AT_ONCE = 1024


class JsonLines:
    """A file of JSON Lines with an object for each row of a table, by the names of its columns.

    kind: the format, as `config.kind_of_records` names it. name: INPUT or a flag, and the path, for messages.
    """

    def __init__(self, table: Any, kind: str, name: str) -> None:
        if kind not in DELIMITERS:
            check_packages("pyarrow", needed_by=name)
        self._kind, self._name = kind, name
        self._rows = _rows_of_text(table, DELIMITERS[kind]) if kind in DELIMITERS else _rows_of_arrow(table, kind)

    def read(self, size: int) -> bytes:
        """Returns the next lines, `size` bytes or more. Raises InputError if the table cannot be read."""
        block = bytearray()
        try:
            for row in self._rows:
                block += json.dumps(row, default=_as_text).encode() + b"\n"
                if len(block) >= size:
                    break
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InputError(f"{self._name}: cannot be read as {self._kind} ({reason(error)})") from error
        return bytes(block)


def _rows_of_text(table: Any, delimiter: str) -> Iterator[dict[str, str]]:
    """Yields the rows of a table in text, whose first line has the names. Raises ValueError."""
    csv.field_size_limit(LONGEST_FIELD)
    lines = csv.reader(TextIOWrapper(table, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(lines, [])
        if len(set(names)) < len(names):
            raise ValueError("two columns have the same name")
        for row in lines:
            if row and len(row) != len(names):
                raise ValueError(f"line {lines.line_num} has {len(row)} fields, and line 1 has {len(names)}")
            if row:
                yield dict(zip(names, row))
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num}: {error}") from error


def _rows_of_arrow(table: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a Parquet file, or of an Arrow file or stream. Raises what pyarrow raises."""
    from pyarrow import ipc, parquet

    batches: Any
    if kind == "Parquet":
        batches = parquet.ParquetFile(table).iter_batches(ROWS_AT_ONCE)
    elif _is_arrow_file(table):
        file = ipc.open_file(table)
        batches = map(file.get_batch, range(file.num_record_batches))
    else:
        batches = ipc.open_stream(table)
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            yield from batch.slice(start, ROWS_AT_ONCE).to_pylist()


def _is_arrow_file(table: Any) -> bool:
    """Whether it is a file that can be read from any position, such as pandas' Feather; `datasets` writes streams."""
    mark = table.read(6)
    table.seek(0)
    return mark == b"ARROW1"


def _as_text(value: Any) -> str:
    """Returns a value that JSON lacks as text. Raises TypeError for bytes."""
    if isinstance(value, bytes):
        raise TypeError("a column holds bytes, which are not text; accepted: a table without such columns")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
