"""fastgen-generate-for-transformers: generate text for every line of a file with a Hugging Face model.

The counterpart of fastseq-generate-for-transformers, with its flags. Whatever can be wrong with the flags and the
files, and with going on, is found before torch and transformers are imported.

Tests: tests/cli/transformers/test_cli_generate.py, tests/cli/transformers/test_cli_bad_input.py
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import fastgen
from fastgen.cli.exits import FAILED, SIGNALS, UNUSABLE, InputError, RunError, Stop, check_packages, stoppable
from fastgen.cli.threads import set_openmp_variables
from fastgen.cli.transformers import files, records, shards
from fastgen.cli.transformers.args import PROG, STREAM, RunConfig, completed, parse_arguments
from fastgen.cli.transformers.batching import Item
from fastgen.cli.transformers.journal import Entry, Journal, StreamOutput
from fastgen.cli.transformers.metrics import references_of, score_output
from fastgen.cli.transformers.retry import Retry
from fastgen.cli.transformers.signature import signature, with_commit
from fastgen.cli.transformers.tasks import Task, task_for
from fastgen.config import CONFIG

if TYPE_CHECKING:
    from fastgen.cli.transformers.workers import Workers


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status; what a user can do something about is one line on stderr.

    0 all done, 1 some inputs failed or the run could not go on, 2 flags, files or a model that cannot be used, 130
    interrupted, 143 ended by SIGTERM.
    """
    set_openmp_variables()
    stop = Stop()
    try:
        with stoppable(*SIGNALS) as stop:
            args = parse_arguments(sys.argv[1:] if argv is None else argv)
            check_packages("transformers", "tqdm", "filelock")
            if args.workers is not None:  # --ray needs it
                check_packages("ray", "accelerate", flag=args.given("ray") or args.given("workers"))
            return _run(args, stop)
    except InputError as error:
        message, status = f"error: {error}", UNUSABLE
    except BrokenPipeError:
        message = "error: the standard output was closed (broken pipe); what was written is complete records"
        status = FAILED
    except (OSError, RunError) as error:
        message, status = f"error: {error}", FAILED
    except KeyboardInterrupt:  # Ray raises one of its own, which has no status
        message, status = "interrupted", stop.status
    with suppress(OSError):  # nobody may read it
        print(f"{PROG}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _run(args: RunConfig, stop: Stop) -> int:
    """Whatever does not need the model comes first: flags, files, and whether there is something to do at all."""
    args = _with_first_record(shards.of_launcher(args, os.environ))
    task = task_for(args)
    surveyed = check_files(args)
    references = references_of(args, None if surveyed is None else surveyed.lines, task.counts_words)
    journal = not files.is_stream(args.output)
    kind = Retry if args.retry_failed else Journal
    output = kind(args.output, args.resume, args.overwrite) if journal else StreamOutput(args.output)
    try:
        made = output.completed or {}
        task.args = args = _as_before(args, output.signature or made.get("signature") or {})
        signed = signature(args, surveyed)
        if made if args.merge else output.check(signed):
            if not args.quiet:
                why = (
                    "none of its lines failed, so nothing is retried"
                    if args.retry_failed
                    else "the same command has made it"
                )
                print(f"{PROG}: {args.output} is complete: {why}", file=sys.stderr)
            output.records, output.failures = made["records"], made["failures"]
        elif args.merge and isinstance(output, Journal):
            shards.merge(args, output)
        elif (
            surveyed is not None and output.failed is None and shards.is_empty(surveyed.lines, args) and not task.speaks
        ):
            output.begin(signed)
            output.complete()
            if not args.quiet:
                print(f"0 lines in {args.input} are for this run: no model is loaded", file=sys.stderr)
        else:
            _generate(task, surveyed, output, stop)
            if output.failed is not None and not args.quiet:
                again = f"{len(output.failed)} lines that had failed were generated again"
                print(f"{PROG}: {again}, {output.failures} of them failed again", file=sys.stderr)
        score_output(args, references, output.records, task.counts_words)
        if output.failures:
            print(f"{PROG}: {output.failures} of {output.records} inputs failed", file=sys.stderr)
        return FAILED if output.failures else 0
    finally:
        output.leave()


def _generate(task: Task, surveyed: files.Survey | None, output: StreamOutput, stop: Stop) -> None:
    """Sets up what runs beside the model, and goes through INPUT."""
    from transformers.utils import logging as library_logging

    args = task.args
    if not args.quiet:
        print(f"loading {args.model}", file=sys.stderr, flush=True)
    # Workers are what runs beside the model; threads that a tokenizer starts by itself would take cores from it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    fastgen.enable()  # not `enabled()`, which would win over a caller's `disabled()`
    stock = fastgen.disabled() if args.without_fastgen_opt else nullcontext()
    only_records = redirect_stdout(sys.stderr) if args.output == STREAM else nullcontext()
    with stock, only_records, ExitStack() as after:
        # What is generated for a batch does not depend on those before it, which --resume does not generate again.
        after.callback(fastgen.configure, repeatable=CONFIG.repeatable)
        fastgen.configure(repeatable=True)
        after.callback(library_logging.set_verbosity, library_logging.get_verbosity())
        library_logging.set_verbosity_error()  # it would log the same for every batch
        workers = None
        if args.workers is not None:  # --ray needs it
            from fastgen.cli.transformers.workers import started

            workers = after.enter_context(started(args, stop))
        _go_through(task, surveyed, output, stop, workers)


def _with_first_record(args: RunConfig) -> RunConfig:
    """Returns the arguments with OpenAI's batch format, which needs no flag if INPUT's first record has it.

    One bad record is that line's failure; a file that begins with one is not in this format, or has other fields.
    """
    if files.is_stream(args.input) or not args.reads_records:
        return args
    for line in next(files.read_chunks(args.input, 1, longest=records.LONGEST_RECORD), []):
        try:
            if not line.cut:  # that is a failed input
                records.read_input(line, args)
        except records.RecordError as error:
            if isinstance(error, records.OpenAIRequestError) and args.text_field == "text":
                return _with_first_record(completed(replace(args, input_format="openai")))
            hint = "--input_format, --text_field, --id_field"
            raise InputError(f"INPUT {args.input}: line 1 {error} ({hint})") from error
    return args


def _with_first_checked(chunks: Iterator[list[files.Line]], args: RunConfig) -> Iterator[list[files.Line]]:
    """Yields the lines of a stream; raises InputError if the first is of a kind that is not read."""
    for lines in chunks:
        if lines and lines[0].number == 1:
            _check_first(lines[0], args)
        yield lines


def _check_first(line: files.Line, args: RunConfig) -> None:
    """Raises InputError where INPUT's first line is of a kind that is not read; what else is wrong fails that line."""
    try:
        records.read_input(line, args)
    except records.WrongKindError as error:
        raise InputError(f"INPUT {args.input}: line 1 {error}") from error
    except records.RecordError:
        pass


def _as_before(args: RunConfig, before: dict[str, Any]) -> RunConfig:
    """Returns the arguments with what an earlier run has chosen or drawn, where the flags leave it open."""
    if args.bs is None and args.batch_tokens is None:
        args = replace(args, bs=before.get("--bs"), batch_tokens=before.get("--batch_tokens"))
    return args if args.seed is not None else replace(args, seed=before.get("--seed", secrets.randbits(31)))


def _go_through(
    task: Task, surveyed: files.Survey | None, output: StreamOutput, stop: Stop, workers: Workers | None
) -> None:
    """Loads, generates and writes; raises KeyboardInterrupt where that was ended early."""
    from fastgen.cli.transformers.pipeline import Pipeline, Prefetcher, SplitOnOOM
    from fastgen.cli.transformers.progress import Progress

    asked = task.args
    if workers is None:
        task.load()
    else:
        workers.load(task)
    args = task.args
    total = _total(args, surveyed, output)
    signed = with_commit(signature(replace(args, prefix=asked.prefix), surveyed), task.loaded.model.config)
    output.begin(signed, task.sounds)
    progress = Progress(total, output.records, args.quiet, task.unit)

    def write(items: list[Item], amount: float) -> None:
        output.write(
            [
                Entry(item.line.number, item.length, item.group, item.error is not None, records.record_of(item, args))
                for item in items
            ]
        )
        failures = [(item.line.number, records.name_of(item, args) + item.error) for item in items if item.error]
        progress.finished(len(items), amount, failures)

    try:
        if args.resume:
            progress.note(f"goes on after {output.records} of {total} lines")
        if output.changes:
            progress.note(f"flags differ from those of the run that made OUTPUT: {'; '.join(output.changes)}")
        notes, planner = task.notes()
        for note in notes:
            progress.note(note)
        progress.begin()
        chunks = _chunks(task, output)
        generate = SplitOnOOM(task, progress.say, args.seed)
        ahead = Prefetcher(chunks, task, planner, args.preprocess_workers, output.entry, collates=workers is None)
        elsewhere = None if workers is None else partial(workers.run, ahead=ahead, stop=stop, progress=progress)
        complete = Pipeline(task, generate, write, stop, elsewhere, output.failed is None).drain(ahead)
        if complete:
            if surveyed is not None and output.records != total:
                had = f"it had {total} lines, and {output.records} could be read"
                raise InputError(f"INPUT changed while it was read: {had}")
            is_new = output.failed is None and not files.is_stream(args.output)
            if output.failures and not output.generated and is_new:
                raise RunError(f"every input failed ({output.failures}), so no OUTPUT is written")
            output.complete()
    finally:
        progress.close()
        if left := output.leave(resumable=not files.is_stream(args.input)):
            progress.say(left)
    if not complete:
        raise KeyboardInterrupt
    if task.sounds is not None:
        progress.note(f"the sounds are in {task.sounds.folder}")
    if unused := sorted(getattr(task.input, "unused", ())):
        progress.note(f"what bodies of requests have besides was not used: {', '.join(unused)}")
    if not args.quiet:
        if args.bs != asked.bs or args.batch_tokens != asked.batch_tokens:
            tokens = "" if args.batch_tokens is None else f" --batch_tokens {args.batch_tokens}"
            print(f"batches, chosen for MODEL and this machine: --bs {args.bs}{tokens}", file=sys.stderr)
        print(progress.summary(), file=sys.stderr)


def _total(args: RunConfig, surveyed: files.Survey | None, output: StreamOutput) -> int | None:
    """How many lines this run has; None where INPUT can be read only once."""
    if output.failed is not None:
        return len(output.failed)
    return args.n_obs if surveyed is None else shards.own_lines(surveyed.lines, args)


def _chunks(task: Task, output: StreamOutput) -> Iterator[list[files.Line]]:
    """The lines of this run."""
    args, failed = task.args, output.failed
    chunks = files.read_chunks(args.input, args.n_obs, task.lines_at_once, longest=task.input.line_bytes)
    if files.is_stream(args.input):
        chunks = _with_first_checked(chunks, args)
    if failed is None:
        return shards.own_chunks(chunks, args)
    return filter(None, ([line for line in chunk if line.number in failed] for chunk in chunks))


def check_files(args: RunConfig) -> files.Survey | None:
    """The survey of INPUT, None where it can be read only once.

    Raises InputError where a file cannot be used, or where INPUT does not hold what the task reads.
    """
    for name, path in (("INPUT", args.input), ("OUTPUT", args.output)):
        if (flag := args.given("retry_failed") or args.given("resume")) and files.is_stream(path):
            why = f"{flag} needs {name} to be a file, and {path} can be gone through only once"
            raise InputError(f"{name} {path}: {why}")
    surveyed = None if files.is_stream(args.input) else files.survey(args.input)
    if surveyed is not None and not args.reads_records:  # the first record was checked by `_with_first_record`
        for line in next(files.read_chunks(args.input, 1, longest=records.LONGEST_RECORD), []):
            _check_first(line, args)
    sources = {"INPUT": args.input, "--reference_path": args.reference_path}
    files.check_writable("OUTPUT", args.output, sources)
    if args.score_path is not None:
        if files.is_url(args.score_path):
            raise InputError(f"--score_path {args.score_path}: is a URL (accepted: a local file)")
        files.check_writable("--score_path", args.score_path, sources | {"OUTPUT": args.output})
        # A run that --resume finds complete leaves the scores as they are, too.
        is_there = os.path.exists(args.score_path)
        if is_there and not (args.overwrite or args.retry_failed) and not (args.resume and os.path.exists(args.output)):
            raise InputError(f"--score_path {args.score_path} already exists (accepted: another, or --overwrite)")
    return surveyed


if __name__ == "__main__":
    sys.exit(main())
