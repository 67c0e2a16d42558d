"""A run: from the lines of INPUT to the records of OUTPUT, with --resume, shards and scores.

Mistakes in settings and files, and about the run to resume, are reported before torch and transformers are imported.

Tests: tests/batch/test_run.py, tests/batch/test_bad_input.py
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import fastgen
from fastgen.batch import files, records, shards
from fastgen.batch.config import STREAM, BatchConfig
from fastgen.batch.errors import InputError, RunError, Stop
from fastgen.batch.journal import Entry, Journal, StreamOutput
from fastgen.batch.metrics import references_of, scores_of_output
from fastgen.batch.planner import Item
from fastgen.batch.retry import Retry
from fastgen.batch.signature import signature, with_commit
from fastgen.batch.task import Task, task_for
from fastgen.config import CONFIG

if TYPE_CHECKING:
    from fastgen.batch.workers import Workers


@dataclass(frozen=True)
class Outcome:
    """The result of a run. scores: by name, if there are references."""

    records: int
    failures: int
    scores: dict[str, Any] | None


class Progress(Protocol):
    """The receiver of a run's progress, which may display it.

    start: the run has `total` inputs (None: unknown), `done` of them written; amounts are in `unit`. finished: counts a
    batch with its failed lines and their errors. say: reports problems. note: reports messages for the user. line:
    reports what the run does. close: stops counting. end: reports amounts and speed. details: returns additional text
    for lines about the speed.
    """

    details: Callable[[], str] = str

    def start(self, total: int | None, done: int, unit: str) -> None: ...
    def finished(self, inputs: int, amount: float, failures: list[tuple[int, str]]) -> None: ...
    def say(self, message: str) -> None: ...
    def note(self, message: str) -> None: ...
    def line(self, message: str) -> None: ...
    def close(self) -> None: ...
    def end(self) -> None: ...


def run(args: BatchConfig, stop: Stop, progress: Progress) -> Outcome:
    """Generates for every line of INPUT and writes OUTPUT; everything that does not need the model comes first.

    Raises InputError for settings, files or a model that cannot be used, RunError or OSError if the run cannot
    continue, KeyboardInterrupt if it was stopped.
    """
    args = shards.of_launcher(args, os.environ)
    if args.reads_records and not files.is_stream(args.input):
        args = _with_first_line(args)
    task = task_for(args)
    surveyed = check_files(args)
    references = references_of(args, None if surveyed is None else surveyed.lines, task.counts_words)
    kind = Retry if args.retry_failed else Journal
    output = StreamOutput(args.output) if files.is_stream(args.output) else kind(args)
    try:
        earlier = output.completed or {}
        task.args = args = _as_before(args, output.signature or earlier.get("signature") or {})
        signed = signature(args, surveyed)
        if earlier if args.merge else output.check(signed):
            why = "none of its lines failed, so nothing is retried" if args.retry_failed else "the same run wrote it"
            progress.note(f"{args.output} is complete: {why}")
            output.records, output.failures = earlier["records"], earlier["failures"]
        elif args.merge and isinstance(output, Journal):
            shards.merge(args, output)
        elif output.failed is None and not task.speaks and _total(args, surveyed, output) == 0:
            output.begin(signed)
            output.complete()
            progress.line(f"0 lines in {args.input} are for this run: no model is loaded")
        else:
            _generate(task, surveyed, output, stop, progress)
            if output.failed is not None:
                again = f"{len(output.failed)} failed lines were generated again"
                progress.note(f"{again}, {output.failures} of them failed again")
        scores = scores_of_output(args, references, output.records, task.counts_words)
        return Outcome(output.records, output.failures, scores)
    finally:
        output.leave()


def _generate(task: Task, surveyed: files.Survey | None, output: StreamOutput, stop: Stop, progress: Progress) -> None:
    """Sets up what runs in parallel to the model, and processes INPUT."""
    from transformers.utils import logging as library_logging

    args = task.args
    progress.line(f"loading {args.model}")
    # Workers run in parallel to the model; a tokenizer's own threads would take cores from it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    fastgen.enable()  # not `enabled()`, which would override a caller's `disabled()`
    stock = fastgen.disabled() if args.without_fastgen_opt else nullcontext()
    only_records = redirect_stdout(sys.stderr) if args.output == STREAM else nullcontext()
    with stock, only_records, ExitStack() as after:
        # A batch's outputs must not depend on earlier batches, which --resume does not generate again.
        after.callback(fastgen.configure, repeatable=CONFIG.repeatable)
        fastgen.configure(repeatable=True)
        after.callback(library_logging.set_verbosity, library_logging.get_verbosity())
        library_logging.set_verbosity_error()  # it would repeat messages for every batch
        workers = None
        if args.workers is not None:  # --ray needs it
            from fastgen.batch.workers import started

            workers = after.enter_context(started(args, stop, progress.say))
        _go_through(task, surveyed, output, stop, workers, progress)


def _go_through(
    task: Task,
    surveyed: files.Survey | None,
    output: StreamOutput,
    stop: Stop,
    workers: Workers | None,
    progress: Progress,
) -> None:
    """Loads, generates and writes. Raises KeyboardInterrupt after an early end."""
    from fastgen.batch.pipeline import Pipeline, Prefetcher, SplitOnOOM

    asked = task.args
    if workers is None:
        task.load()
    else:
        workers.load(task)
    args, total = task.args, _total(task.args, surveyed, output)
    for note in task.loaded.notes:
        progress.line(note)
    signed = with_commit(signature(replace(args, prefix=asked.prefix), surveyed), task.loaded.model.config)
    output.begin(signed, task.sounds)
    if args.resume:
        progress.note(f"resuming: {output.records} of {total} lines are already done")
    if output.changes:
        progress.note(f"flags differ from those of the run that made OUTPUT: {'; '.join(output.changes)}")
    notes, planner = task.notes()
    for note in notes:
        progress.note(note)
    progress.start(total, output.records, task.unit)
    copied = 0

    def write(items: list[Item], amount: float) -> None:
        nonlocal copied
        copied += sum(item.first is not None for item in items)
        output.write([_entry(item, args) for item in items])
        failures = [(item.line.number, records.name_of(item, args) + item.error) for item in items if item.error]
        progress.finished(len(items), amount, failures)

    try:
        generate = SplitOnOOM(task, progress.say, args.seed)
        ahead = Prefetcher(_chunks(task, output), task, planner, output.entry, collates=workers is None)
        elsewhere = None if workers is None else partial(workers.run, ahead=ahead, stop=stop)
        if workers is not None and args.verbose:
            progress.details = workers.rates
        Pipeline(task, generate, write, stop, elsewhere, output.failed is None).drain(ahead)
        _complete(args, surveyed, output, total)
    finally:
        progress.close()
        if left := output.leave(resumable=not files.is_stream(args.input)):
            progress.say(left)
    if task.sounds is not None:
        progress.note(f"the sounds are in {task.sounds.folder}")
    if unused := sorted(getattr(task.input, "unused", ())):
        progress.note(f"fields of request bodies were ignored: {', '.join(unused)}")
    if args.bs != asked.bs or args.batch_tokens != asked.batch_tokens:
        sizes = " ".join(filter(None, map(args.setting, ("bs", "batch_tokens"))))
        progress.line(f"batches, chosen for MODEL and this machine: {sizes}")
    if copied:
        progress.line(f"{copied} inputs equal earlier ones, and were not generated again")
    progress.end()


def _complete(args: BatchConfig, surveyed: files.Survey | None, output: StreamOutput, total: int | None) -> None:
    """Completes OUTPUT. Raises InputError or RunError if INPUT has changed, or all inputs failed."""
    if surveyed is not None and output.records != total:
        had = f"it had {total} lines, and {output.records} could be read"
        raise InputError(f"INPUT changed while it was read: {had}")
    is_new = output.failed is None and not files.is_stream(args.output)
    if output.failures and not output.generated and is_new:
        raise RunError(f"every input failed ({output.failures}), so no OUTPUT is written")
    output.complete()


def _entry(item: Item, args: BatchConfig) -> Entry:
    """Returns an item's entry, with the length by which its batch is planned: 0 for a copy, which is in no batch."""
    length, key = (item.length, item.key) if item.first is None else (0, None)
    return Entry(item.line.number, length, item.group, key, item.error is not None, records.record_of(item, args))


def _with_first_line(args: BatchConfig) -> BatchConfig:
    """Returns the arguments adapted to INPUT's first line: see `_checked_first`."""
    lines = next(files.read_chunks(args.input, 1, longest=records.LONGEST_RECORD), [])
    return _checked_first(lines[0], args) if lines else args


def _checked_first(line: files.Line, args: BatchConfig) -> BatchConfig:
    """Returns the arguments with OpenAI's batch format, which needs no flag if INPUT's first record has it.

    Raises InputError if the line cannot be used. One bad record is only that line's failure, but a file that begins
    with one is not in this format, or has other fields.
    """
    is_record_of_file = args.reads_records and not files.is_stream(args.input)
    try:
        if not (is_record_of_file and line.cut):  # a cut line is only a failed input
            records.read_input(line, args)
    except records.RecordError as error:
        if is_record_of_file and isinstance(error, records.OpenAIRequestError) and args.text_field == "text":
            return _checked_first(line, replace(args, input_format="openai"))
        if is_record_of_file or isinstance(error, records.WrongKindError):
            names = ", ".join(map(args.named, ("input_format", "text_field", "id_field")))
            hint = f" ({names})" if is_record_of_file else ""
            raise InputError(f"INPUT {args.input}: line 1 {error}{hint}") from error
    return args


def _as_before(args: BatchConfig, before: dict[str, Any]) -> BatchConfig:
    """Returns the arguments with the values that an earlier run has chosen or drawn, for flags that are not set."""
    if args.bs is None and args.batch_tokens is None:
        bs, batch_tokens = (before.get(args.named(name)) for name in ("bs", "batch_tokens"))
        args = replace(args, bs=bs, batch_tokens=batch_tokens)
    seed = before.get(args.named("seed"), secrets.randbits(31))
    return args if args.seed is not None else replace(args, seed=seed)


def _total(args: BatchConfig, surveyed: files.Survey | None, output: StreamOutput) -> int | None:
    """Returns how many lines this run has; None if that is not known (yet)."""
    if output.failed is not None:
        return len(output.failed)
    return args.n_obs if surveyed is None else shards.own_lines(surveyed.lines, args)


def _chunks(task: Task, output: StreamOutput) -> Iterator[list[files.Line]]:
    """Yields the lines of this run. Raises InputError if the first line of a stream cannot be used."""
    args, failed = task.args, output.failed
    chunks = files.read_chunks(args.input, args.n_obs, task.lines_at_once, longest=task.input.line_bytes)
    for chunk in chunks if failed is not None else shards.own_chunks(chunks, args):
        if files.is_stream(args.input) and chunk and chunk[0].number == 1:
            _checked_first(chunk[0], args)
        if lines := [line for line in chunk if failed is None or line.number in failed]:
            yield lines


def check_files(args: BatchConfig) -> files.Survey | None:
    """Returns the survey of INPUT, None if it can be read only once.

    Raises InputError if a file cannot be used, or INPUT does not hold what the task reads.
    """
    for name, path in (("INPUT", args.input), ("OUTPUT", args.output)):
        if (flag := args.setting("retry_failed") or args.setting("resume")) and files.is_stream(path):
            why = f"{flag} needs {name} to be a file, and {path} can be read only once"
            raise InputError(f"{name} {path}: {why}")
    surveyed = None if files.is_stream(args.input) else files.survey(args.input)
    if surveyed is not None and not args.reads_records:
        _with_first_line(args)
    sources = {"INPUT": args.input, args.named("reference_path"): args.reference_path}
    files.check_writable("OUTPUT", args.output, sources)
    if args.score_path is not None:
        if files.is_url(args.score_path):
            raise InputError(f"{args.setting('score_path')}: is a URL (accepted: a local file)")
        files.check_writable(args.named("score_path"), args.score_path, sources | {"OUTPUT": args.output})
        # A complete run that is resumed does not write the scores again.
        is_there = os.path.exists(args.score_path)
        if is_there and not (args.overwrite or args.retry_failed) and not (args.resume and os.path.exists(args.output)):
            ways = f"another, or {args.named('overwrite', True)}"
            raise InputError(f"{args.setting('score_path')} already exists (accepted: {ways})")
    return surveyed
