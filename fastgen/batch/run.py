"""A run: from the lines of INPUT to the records of OUTPUT, with --resume, shards and scores.

Mistakes in settings and files, and about the run to resume, are reported before torch and transformers are imported.

Tests: tests/batch/test_run.py, tests/batch/test_bad_input.py
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import fastgen
from fastgen.batch import files, records, shards
from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError, Stop, check_device
from fastgen.batch.journal import Journal, StreamOutput
from fastgen.batch.metrics import references_of, scores_of_output
from fastgen.batch.part import Entry
from fastgen.batch.planner import Item, Plan, Planner
from fastgen.batch.signature import signature, with_commit
from fastgen.batch.task import Task, task_for
from fastgen.batch.values import TODAY
from fastgen.config import CONFIG
from fastgen.reasons import counted

if TYPE_CHECKING:
    from fastgen.batch.pipeline import Runner

logger = logging.getLogger(__name__)


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


def run(args: BatchConfig, stop: Stop, progress: Progress) -> tuple[int, dict[str, Any]]:
    """Generates for every line of INPUT and writes OUTPUT; everything that does not need the model comes first.

    Returns how many inputs failed, and the scores by name, if there are references. Raises InputError for settings,
    files or a model that cannot be used, RunError or OSError if the run cannot continue, KeyboardInterrupt if it was
    stopped.
    """
    args = shards.of_launcher(args, os.environ)
    if args.reads_records and not files.is_stream(args.input):
        args = _with_first_line(args)
    task = task_for(args)
    surveyed = check_files(args)
    references = references_of(args, None if surveyed is None else surveyed.lines)
    is_stream = files.is_output_stream(args.output)
    output = StreamOutput(args.output) if is_stream else Journal(args, progress.say)
    try:
        completed = output.completed or {}
        task.args = args = _as_before(args, output.signature or completed.get("signature") or {})
        signed = signature(args, surveyed)
        if completed if args.merge else output.check(signed):
            why = "none of its lines failed, so nothing is retried" if args.retry_failed else "the same run wrote it"
            progress.note(f"{args.output} is complete: {why}")
            output.records, output.failures = completed["records"], completed["failures"]
        elif args.merge and isinstance(output, Journal):
            shards.merge(args, output)
            merged = f"{counted(output.records, 'record')} of {counted(args.num_shards, 'shard')}"
            progress.line(f"{merged} merged into {args.output}, {output.failures} failed")
        elif output.failed is None and not args.speaks and _lines(args, surveyed) == 0:
            output.begin(signed)
            output.complete()
            progress.line(f"0 lines in {args.input} are for this run: no model is loaded")
        else:
            _generate(task, surveyed, output, stop, progress)
            if output.failed is not None:
                again = f"{counted(len(output.failed), 'failed line')} generated again"
                progress.note(f"{again}, {output.failures} failed again")
        if args.shard_id is not None and not output.records:
            why = f"INPUT has fewer batches than there are shards ({counted(_lines(args, surveyed) or 0, 'line')})"
            progress.say(f"shard {args.shard_id} of {args.num_shards} is empty: {why}")
        scores = scores_of_output(args, references, output.records)
        if output.failures:
            can_retry = not (surveyed is None or is_stream or args.speaks)
            hint = f" ({args.named('retry_failed')} reruns only these)" if can_retry else ""
            progress.say(f"{output.failures} of {output.records} inputs failed{hint}")
        return output.failures, scores or {}
    finally:
        output.leave()


def _generate(task: Task, surveyed: files.Survey | None, output: StreamOutput, stop: Stop, progress: Progress) -> None:
    """Sets up the library and what runs the batches, and processes INPUT."""
    args = task.args
    if args.ray is None:  # a cluster has its own devices
        check_device(args.setting("device"), args.device)
    from transformers.utils import logging as library_logging

    from fastgen.batch.pipeline import SplitOnOOM

    progress.line(f"loading {args.model}")
    # Threads run in parallel to the model; a tokenizer's own threads would take cores from it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    fastgen.enable()  # not `enabled()`, which would override a caller's `disabled()`
    stock = fastgen.disabled() if args.without_fastgen_opt else nullcontext()
    only_records = redirect_stdout(sys.stderr) if files.descriptor_of(args.output) == 1 else nullcontext()
    with stock, only_records, ExitStack() as stack:
        # A batch's outputs must not depend on earlier batches, which --resume does not generate again.
        stack.callback(fastgen.configure, repeatable=CONFIG.repeatable)
        fastgen.configure(repeatable=True)
        stack.callback(library_logging.set_verbosity, library_logging.get_verbosity())
        library_logging.set_verbosity_error()  # it would repeat messages for every batch
        runner: Runner = SplitOnOOM(task, progress.say, args.seed)
        if args.workers is not None:
            from fastgen.batch.workers import started

            runner = stack.enter_context(started(args, stop, progress.say))
        _go_through(task, surveyed, output, runner, stop, progress)


def _go_through(
    task: Task,
    surveyed: files.Survey | None,
    output: StreamOutput,
    runner: Runner,
    stop: Stop,
    progress: Progress,
) -> None:
    """Loads the model, and passes INPUT through all stages. Raises KeyboardInterrupt after an early end."""
    from fastgen.batch.pipeline import Pipeline, Prefetcher

    before_loading = task.args
    runner.load(task)
    args = task.args
    lines = _lines(args, surveyed)
    share = shards.share_of(args, lines) if output.failed is None else None
    for note in (*([] if share is None else [str(share)]), *task.loaded.notes):
        progress.line(note)
    signed = signature(replace(args, prefix=before_loading.prefix), surveyed)
    output.begin(with_commit(signed, task.loaded.model.config), task.sounds)
    plan: Plan = _begin(task, output, None if share else lines, progress)
    chunks = _chunks(task, output, lines)
    if share is not None:
        chunks, plan = share.chunks(chunks), partial(share.batches, plan)
    copied = 0  # items with the outputs of an earlier, equal one

    def write(items: list[Item], amount: float) -> None:
        nonlocal copied
        copied += sum(item.first is not None for item in items)
        output.write([_entry(item, args) for item in items])
        failures = [(item.line.number, records.name_of(item, args) + item.error) for item in items if item.error]
        progress.finished(len(items), amount, failures)

    try:
        batches = Prefetcher(chunks, task, plan, output.entry, runner.collates)
        if args.verbose:
            progress.details = runner.rates
        Pipeline(runner, write, stop, args.postprocess_workers, output.failed is None).drain(batches)
        output.complete()
    finally:
        progress.close()
        if left := output.leave(resumable=not files.is_stream(args.input)):
            progress.say(left)
    _say_what_was_done(task, before_loading, copied, progress)
    progress.end()


def _begin(task: Task, output: StreamOutput, lines: int | None, progress: Progress) -> Planner:
    """Says how the run begins, and returns its planner. lines: how many the run has; None if that is not known yet."""
    total = lines if output.failed is None else len(output.failed)
    if task.args.resume:
        progress.note(f"resuming: {output.records}{'' if total is None else f' of {total}'} lines are already done")
    if output.changes:
        progress.note(f"flags differ from those of the run that made OUTPUT: {'; '.join(output.changes)}")
    notes, planner = task.notes()
    for note in notes:
        progress.note(note)
    progress.start(total, output.records, "seconds of sound" if task.args.speaks else "tokens")
    return planner


def _say_what_was_done(task: Task, requested: BatchConfig, copied: int, progress: Progress) -> None:
    """Says what a user may want to know after a run. `requested`: the settings before MODEL was loaded."""
    args = task.args
    if task.sounds is not None:
        progress.note(f"the sounds are in {task.sounds.folder}")
    if unused := sorted(getattr(task.input, "unused", ())):
        progress.say(f"fields of request bodies were ignored: {', '.join(unused)}")
    if args.bs != requested.bs or args.batch_tokens != requested.batch_tokens:
        sizes = " ".join(filter(None, map(args.setting, ("bs", "batch_tokens"))))
        progress.line(f"batches, chosen for MODEL and this machine: {sizes}")
    if copied:
        progress.line(f"not generated again, because an earlier one is equal: {counted(copied, 'input')}")


def _entry(item: Item, args: BatchConfig) -> Entry:
    """Returns an item's entry, with the length by which its batch is planned: 0 for a copy, which is in no batch."""
    length, key = (item.length, item.key) if item.first is None else (0, None)
    return Entry(item.line.number, length, item.group, key, item.error is not None, records.record_of(item, args))


def _with_first_line(args: BatchConfig) -> BatchConfig:
    """Returns the arguments adapted to INPUT's first line: see `_checked_first`."""
    lines = next(files.read_chunks(args.input, 1, longest=records.LONGEST_RECORD, as_records=args.reads_records), [])
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
        if not args.reads_records and records.BEGINS_AS_JSON.match(records.decode(line)):
            flag = args.named("input_format", "jsonl")
            logger.warning("INPUT %s: line 1 looks like JSON, and is read as text (%s reads it)", args.input, flag)
    except records.RecordError as error:
        if is_record_of_file and isinstance(error, records.OpenAIRequestError) and args.text_field == "text":
            return _checked_first(line, replace(args, input_format="openai"))
        if is_record_of_file or isinstance(error, records.WrongKindError):
            names = ", ".join(map(args.named, ("input_format", "text_field", "id_field")))
            hint = f" ({names})" if is_record_of_file else ""
            raise InputError(f"INPUT {args.input}: line 1 {error}{hint}") from error
    return args


def _as_before(args: BatchConfig, old_signature: dict[str, Any]) -> BatchConfig:
    """Returns the arguments with the values that an earlier run has chosen or drawn, for flags that are not set."""
    if args.bs is None and args.batch_tokens is None:
        bs, batch_tokens = (old_signature.get(args.named(name)) for name in ("bs", "batch_tokens"))
        args = replace(args, bs=bs, batch_tokens=batch_tokens)
    if args.chat and args.date in (None, TODAY):
        args = replace(args, date=old_signature.get(args.named("date")) if old_signature else TODAY)
    seed = old_signature.get(args.named("seed"), secrets.randbits(31))
    return args if args.seed is not None else replace(args, seed=seed)


def _lines(args: BatchConfig, surveyed: files.Survey | None) -> int | None:
    """Returns how many lines INPUT has, up to --n_obs; None if it can be read only once, and no --n_obs is set."""
    counts = [args.n_obs, None if surveyed is None else surveyed.lines]
    return min((count for count in counts if count is not None), default=None)


def _chunks(task: Task, output: StreamOutput, lines: int | None) -> Iterator[list[files.Line]]:
    """Yields the lines of this run.

    Raises InputError if the first line of a stream cannot be used, or a file no longer has this number of `lines`.
    """
    args, failed = task.args, output.failed
    is_stream = files.is_stream(args.input)
    number = 0
    longest = task.input.line_bytes
    as_records = args.reads_records
    for chunk in files.read_chunks(args.input, args.n_obs, args.lines_at_once, longest, as_records):
        if is_stream and number == 0:
            _checked_first(chunk[0], args)
        number = chunk[-1].number
        if own := [line for line in chunk if failed is None or line.number in failed]:
            yield own
    if not is_stream and number != lines:
        raise InputError(f"INPUT changed while it was read: it had {lines} lines, and {number} could be read")


def check_files(args: BatchConfig) -> files.Survey | None:
    """Returns the survey of INPUT, None if it can be read only once.

    Raises InputError if a file cannot be used, or INPUT does not hold what the task reads.
    """
    again = args.setting("retry_failed") or args.setting("resume")
    scored = args.setting("reference_path") or args.setting("reference_field")
    needs = {"INPUT": again if files.is_stream(args.input) else ""}
    needs["OUTPUT"] = (again or scored) if files.is_output_stream(args.output) else ""
    for name, path in zip(needs, (args.input, args.output)):
        if flag := needs[name]:
            raise InputError(f"{name} {path}: {flag} needs {name} to be a file, and {path} is a stream")
    surveyed = None if files.is_stream(args.input) else files.survey(args.input, args.reads_records)
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
