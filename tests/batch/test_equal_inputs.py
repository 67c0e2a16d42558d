"""Equal inputs are generated once in a run, and each line has the record that it would have alone."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from cli_loop import command, generate, interrupted_after, plain_loop, write_lines
from cli_models import sentences

from fastgen.batch import planner
from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import Stop
from fastgen.batch.files import Line
from fastgen.batch.pipeline import Pipeline
from fastgen.batch.planner import Batch, Item
from fastgen.batch.records import outputs_of, record_of
from fastgen.batch.task import Task

LINES = sentences(40)
REPEATED = [*LINES, *LINES[:3], LINES[0], "", *LINES[35:]]  # windows of 32 lines at --bs 2
BEAMS = ("--bs", 2, "--beam", 2)


@pytest.fixture
def rows(monkeypatch):
    """Records the number of inputs of each batch."""
    counts: list[int] = []
    original = Task.generate

    def watched(self: Any, batch: Batch) -> Any:
        counts.append(len(batch.items))
        return original(self, batch)

    monkeypatch.setattr(Task, "generate", watched)
    return counts


def test_equal_inputs_of_a_run_are_generated_once(tmp_path, bart, rows, capsys):
    records = [json.loads(line) for line in generate(tmp_path, bart, REPEATED, *BEAMS, "--output_format", "jsonl")]
    assert sum(rows) == len(LINES)
    assert "not generated again, because an earlier one is equal: 9 inputs" in capsys.readouterr().err
    assert [record.pop("line") for record in records] == list(range(1, 51))
    assert records[40:44] == [*records[:3], records[0]] and records[45:] == records[35:40]
    assert records[44]["outputs"] == []
    texts = [record["outputs"][0]["text"] for record in records if record["outputs"]]
    assert texts == plain_loop(bart, [*REPEATED[:44], *REPEATED[45:]], 2, num_beams=2)


def test_samples_of_equal_inputs_differ(tmp_path, bart):
    samples = generate(tmp_path, bart, LINES[:1] * 6, "--do_sample", "--seed", 1)
    assert len(set(samples)) > 1


def test_the_table_forgets_its_oldest_input(tmp_path, bart, rows, monkeypatch):
    monkeypatch.setattr(planner, "MOST_FIRSTS", 2)
    lines = [*LINES[:2], LINES[0], LINES[2], LINES[0], LINES[2]]
    assert generate(tmp_path, bart, lines, "--bs", 4) == plain_loop(bart, lines, 4)
    assert sum(rows) == 4


FORMATS = {
    "text": (),
    "scores": ("--output_sequence_scores", "--num_return_sequences", 2, "--join_outputs"),
    "jsonl": ("--output_format", "jsonl", "--num_return_sequences", 2),
}


@pytest.mark.parametrize("flags", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("batches", (5, 18))
def test_a_resumed_run_copies_records_of_the_first(tmp_path, bart, rows, flags, batches):
    whole = generate(tmp_path, bart, REPEATED, *BEAMS, *flags)
    in_whole = list(rows)
    rows.clear()
    source, output = write_lines(tmp_path / "input", REPEATED), tmp_path / "output"
    with interrupted_after(batches):
        assert command(bart, source, output, *BEAMS, *flags) == 130
    assert command(bart, source, output, *BEAMS, *flags, "--resume") == 0
    assert output.read_text().splitlines() == whole
    assert rows == in_whole  # the same batches, with any copies


def test_copies_wait_for_a_batch_that_arrives_later():
    first = Item(Line(1, b"a"), {}, 3)
    copy, other = Item(Line(2, b"a"), None, 3, first=first), Item(Line(3, b"b"), {}, 3)
    written: list[list[tuple[int, Any]]] = []

    def generated(batches: Any, stop: Stop) -> Any:
        for batch in reversed(list(batches)):
            for item in batch.items:
                item.outputs = [{"text": f"of {item.line.number}"}]
            yield batch, [1.0]

    def write(items: list[Item], amount: float) -> None:
        written.append([(item.line.number, item.outputs[0]["text"]) for item in items])

    pipeline = Pipeline(SimpleNamespace(run=generated, finish=float), write, Stop())
    list(pipeline.run(iter([Batch([first], [], 0), Batch([other], [copy], 1)])))
    pipeline.close()
    assert written == [[(3, "of 3")], [(1, "of 1"), (2, "of 1")]]


def test_copies_of_a_failed_input_fail(tmp_path, bart, monkeypatch):
    lines = [*LINES[:4], LINES[1], LINES[1]]
    original = Task.generate

    def fails(self: Any, batch: Batch) -> Any:
        if any(item.line.number == 2 for item in batch.items):
            raise ValueError("no")
        return original(self, batch)

    monkeypatch.setattr(Task, "generate", fails)
    source, output = write_lines(tmp_path / "input", lines), tmp_path / "output"
    assert command(bart, source, output, "--bs", 2, "--output_format", "jsonl") == 1
    records = list(map(json.loads, output.read_text().splitlines()))
    errors = [record.get("error") for record in records]
    assert errors == [None, "cannot be generated for (ValueError: no)", None, None, errors[1], errors[1]]


OUTPUTS: tuple[list[dict[str, Any]], ...] = (
    [{"text": "a b", "tokens": 3, "ended": True}],
    [{"text": "a####b\tc", "tokens": 3, "ended": False, "score": -0.1234567890123}],
    [{"text": "a", "tokens": 3, "ended": True, "score": -float("inf")}, {"text": "", "tokens": 0, "ended": False}],
    [{"text": "ü\ud800\u2028", "tokens": 2, "ended": True, "segments": [{"start": 0.1, "end": 2.0, "text": "ü"}]}],
    [],
)


@pytest.mark.parametrize("outputs", OUTPUTS, ids=range(len(OUTPUTS)))
@pytest.mark.parametrize("output_format", ("text", "text with scores", "jsonl", "openai"))
def test_outputs_of_a_record_give_it_again(outputs, output_format):
    scored = {"output_sequence_scores": True} if "scores" in output_format else {}
    input_format = "openai" if output_format == "openai" else "text"
    formats = {"input_format": input_format, "output_format": output_format.split()[0]}
    args = BatchConfig("model", input="in", output="out", **formats, **scored)
    item = Item(Line(7, b"x"), None, 5, outputs=outputs, error=None if outputs else "has nothing in it")
    record = record_of(item, args)
    again = Item(Line(7, b"x"), None, 5)
    again.outputs, again.error = outputs_of(record, args)
    if output_format.startswith("text"):
        again.error = item.error
    assert record_of(again, args) == record
