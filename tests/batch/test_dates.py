"""A chat template that shows the date shows the date of the run, also when it is resumed or retried on another day."""

import json
from datetime import datetime
from pathlib import Path

import pytest
import transformers
from cli_loop import command, interrupted_after, plain_loop, write_lines
from cli_models import copy_with_template, sentences

import fastgen
from fastgen.batch import model
from fastgen.batch.errors import InputError
from fastgen.batch.task import Task

LINES = sentences(24)
# In front of each message stands a word for the day of the month.
TEMPLATE = "word{{ strftime_now('%-d') }} {{ messages[0]['content'] }}"
FLAGS = ("--causal_lm", "--chat", "--bs", 4, "--quiet")
FIFTH, SIXTH = datetime(2026, 10, 5, 23, 59), datetime(2026, 10, 6, 0, 1)
OF_THE_FIFTH = [f"word5 {line}" for line in LINES]


@pytest.fixture(scope="module")
def dated(gpt2, tmp_path_factory):
    return copy_with_template(gpt2, tmp_path_factory.mktemp("dated"), TEMPLATE)


@pytest.fixture
def on_day(monkeypatch):
    """Sets the day on which the next run starts."""

    def set_day(day: datetime) -> None:
        clock = type("Clock", (datetime,), {"now": classmethod(lambda cls: day)})
        monkeypatch.setattr(model, "datetime", clock)

    return set_day


@pytest.fixture
def run(dated, tmp_path):
    """Runs the command on LINES; OUTPUT is in `tmp_path`."""
    source = write_lines(tmp_path / "in.txt", LINES)
    return lambda output, *flags: command(dated, source, tmp_path / output, *FLAGS, *flags)


def lines_of(output: Path) -> list[str]:
    return output.read_text().splitlines()


def test_a_run_resumed_on_another_day_keeps_its_date(run, dated, tmp_path, on_day):
    on_day(FIFTH)
    with interrupted_after(batches=3):
        assert run("out.txt") == 130
    on_day(SIXTH)
    assert run("out.txt", "--resume") == 0 and run("other.txt") == 0
    assert lines_of(tmp_path / "out.txt") == plain_loop(dated, OF_THE_FIFTH, 4, causal_lm=True)
    assert lines_of(tmp_path / "out.txt") != lines_of(tmp_path / "other.txt")
    assert run("out.txt", "--resume") == 0  # it is complete
    assert json.loads((tmp_path / "out.txt.run.json").read_text())["signature"]["--date"] == "2026-10-05T23:59:00"


def test_lines_retried_on_another_day_have_the_runs_date(run, dated, tmp_path, on_day, monkeypatch):
    generate = Task.generate

    def fails(self: Task, batch):
        if len(batch.items) > 1 or batch.items[0].line.number % 8 == 0:
            raise RuntimeError("the model is tired")
        return generate(self, batch)

    on_day(FIFTH)
    with monkeypatch.context() as tired:
        tired.setattr(Task, "generate", fails)
        assert run("out.txt") == 1
    on_day(SIXTH)
    assert run("out.txt", "--retry_failed") == 0
    assert lines_of(tmp_path / "out.txt") == plain_loop(dated, OF_THE_FIFTH, 4, causal_lm=True)


def test_shards_of_a_dated_template_need_the_date(run, dated, tmp_path, on_day, capsys):
    on_day(SIXTH)
    shards = [("--num_shards", 2, "--shard_id", shard) for shard in range(2)]
    assert run("out.txt", *shards[0]) == 2
    assert "(accepted: with --date 2026-10-06)" in capsys.readouterr().err
    for shard in shards:
        assert run("out.txt", "--window", 8, "--date", "2026-10-05", *shard) == 0
    assert run("out.txt", "--window", 8, "--num_shards", 2, "--merge") == 0
    assert lines_of(tmp_path / "out.txt") == plain_loop(dated, OF_THE_FIFTH, 4, causal_lm=True)


def test_a_date_for_a_template_without_one_is_refused(gpt2, tmp_path, capsys):
    plain = copy_with_template(gpt2, tmp_path / "plain", "{{ messages[0]['content'] }}")
    source = write_lines(tmp_path / "in.txt", LINES[:3])
    assert command(plain, source, tmp_path / "out.txt", *FLAGS, "--date", "2026-10-05") == 2
    assert f"--date 2026-10-05T00:00:00: the chat template of MODEL {plain} has no date" in capsys.readouterr().err
    # Without a date, all shards are alike, also one without lines.
    for last in (("--shard_id", 0), ("--shard_id", 1), ("--merge",)):
        assert command(plain, source, tmp_path / "out.txt", *FLAGS, "--num_shards", 2, *last) == 0


def test_a_generator_reads_the_clock_unless_it_has_a_date(dated):
    settings = {"causal_lm": True, "chat": True, "bs": 4}
    generator = fastgen.TextGenerator(dated, **settings, date=FIFTH.date())
    assert [record["outputs"][0]["text"] for record in generator(LINES)] == (
        plain_loop(dated, OF_THE_FIFTH, 4, causal_lm=True)
    )
    assert fastgen.TextGenerator(dated, **settings)._task.loaded.tokenizer.chat_template == TEMPLATE
    with pytest.raises(InputError, match=r"^date: '5 May' is not a date .accepted: today, or a date such as"):
        fastgen.TextGenerator(dated, **settings, date="5 May")


@pytest.mark.parametrize("code", ["%d %b %Y", "%B %-d, %Y", "%A, %H:%M:%S", "%y%m%dT%I%p", "100%% %%d", "%j %%", ""])
@pytest.mark.parametrize("before", ["", "\n", "\n\n ", "  {% if true %}a{% endif %}\n"])
def test_a_date_is_written_as_strftime_writes_it(dated, code, before):
    tokenizer = transformers.AutoTokenizer.from_pretrained(dated)
    template = before + "{% set date = strftime_now(messages[0]['content']) %}\n{{ date | length }} {{ date }}"
    expected = template.replace("strftime_now(messages[0]['content'])", json.dumps(FIFTH.strftime(code)))
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": code}], chat_template=each, tokenize=False)
        for each in (model._dated(template, FIFTH), expected)
    ]
    assert texts[0] == texts[1]
