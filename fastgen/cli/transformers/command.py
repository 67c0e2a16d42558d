"""fastgen-generate-for-transformers: generate text for every line of a file with a Hugging Face model.

The counterpart of fastseq-generate-for-transformers, with its flags. Whatever can be wrong with the flags and the
files, and with going on, is found before torch and transformers are imported.

Tests: tests/cli/transformers/test_cli_generate.py, tests/cli/transformers/test_cli_bad_input.py
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from logging import LogRecord
from pathlib import Path
from typing import Any

import fastgen
from fastgen.cli.errors import FAILED, INTERRUPTED, UNUSABLE, InputError, RunError
from fastgen.cli.signals import Stopped, interruptible, stoppable
from fastgen.cli.threads import set_openmp_variables
from fastgen.cli.transformers import metrics
from fastgen.cli.transformers.args import PROG, STREAM, RunConfig, completed, parse_arguments
from fastgen.cli.transformers.files import beside, check_writable, write_whole
from fastgen.cli.transformers.journal import Journal, StreamOutput
from fastgen.cli.transformers.lines import Line, Survey, is_stream, is_url, raw_lines, read_chunks, survey
from fastgen.cli.transformers.records import (
    LONGEST_RECORD,
    RecordError,
    first_text,
    is_openai,
    name_of,
    parse,
    read_input,
    read_references,
)
from fastgen.cli.transformers.signature import signature, with_commit
from fastgen.cli.transformers.tasks import Task, task_for


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status; what a user can do something about is one line on stderr.

    0 all done, 1 some inputs failed or the run could not go on, 2 flags, files or a model that cannot be used, 130
    interrupted, 143 ended by SIGTERM.
    """
    set_openmp_variables()
    try:
        with interruptible():
            args = parse_arguments(sys.argv[1:] if argv is None else argv)
            if missing := [name for name in ("transformers", "tqdm", "filelock") if find_spec(name) is None]:
                raise InputError(f"needs the package {' and '.join(missing)}: pip install {' '.join(missing)}")
            return _run(args)
    except InputError as error:
        return _stop(f"error: {error}", UNUSABLE)
    except BrokenPipeError:
        return _stop("error: nobody reads the standard output any more; what was written is complete records", FAILED)
    except (OSError, RunError) as error:
        return _stop(f"error: {error}", FAILED)
    except Stopped as stopped:
        return _stop("interrupted", stopped.status)
    except KeyboardInterrupt:
        return _stop("interrupted", INTERRUPTED)


def _stop(message: str, status: int) -> int:
    with suppress(OSError):  # nobody may read it
        print(f"{PROG}: {message}", file=sys.stderr)
    return status


@dataclass(frozen=True)
class Files:
    """survey: of INPUT, None where it can be read only once. references: of the lines that are generated for."""

    survey: Survey | None
    references: list[str] | None

    def total(self, n_obs: int | None) -> int | None:
        """How many lines are to be generated for, None where nobody knows."""
        if self.survey is None:
            return n_obs
        return self.survey.lines if n_obs is None else min(n_obs, self.survey.lines)


def _run(args: RunConfig) -> int:
    """Whatever does not need the model comes first: flags, files, and whether there is something to do at all."""
    args = _recognized(args)
    task = task_for(args)
    files = check_files(args)
    streams = is_stream(args.output)
    output = StreamOutput(args.output) if streams else Journal(args.output, args.resume, args.overwrite)
    try:
        task.args = args = _as_before(args, output.signature or (output.completed or {}).get("signature") or {})
        if not streams and output.check(signature(args, files.survey)):
            return _already_complete(args, files, output.completed or {})
        if not args.quiet:
            print(f"loading {args.model}", file=sys.stderr, flush=True)
        # Workers are what runs beside the model; threads that a tokenizer starts by itself would take cores from it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        fastgen.enable()  # not `enabled()`, which would win over a caller's `disabled()`
        stock = fastgen.disabled() if args.without_fastgen_opt else nullcontext()
        only_records = redirect_stdout(sys.stderr) if args.output == STREAM else nullcontext()
        with _said_once(args.quiet), stock, only_records:
            return _generate(task, files, output)
    finally:
        output.release()


def _recognized(args: RunConfig) -> RunConfig:
    """Records of OpenAI's batch format need no flag where INPUT is a file."""
    if args.input_format != "jsonl" or args.text_field != "text" or is_stream(args.input):
        return args
    with suppress(RecordError):
        record = parse(next(map(bytes.decode, raw_lines("INPUT", args.input)), "{}").removeprefix("\ufeff"))
        if "text" not in record and is_openai(record):
            return completed(replace(args, input_format="openai"))
    return args


def _as_before(args: RunConfig, before: dict[str, Any]) -> RunConfig:
    """With what an earlier run has chosen or drawn, where the flags leave it open."""
    if args.bs is None and args.batch_tokens is None:
        args = replace(args, bs=before.get("--bs"), batch_tokens=before.get("--batch_tokens"))
    return args if args.seed is not None else replace(args, seed=before.get("--seed", secrets.randbits(31)))


def _generate(task: Task, files: Files, output: Journal | StreamOutput) -> int:
    """Loads, generates, writes and scores; returns the exit status."""
    from fastgen.cli.transformers.audio import SoundFolder
    from fastgen.cli.transformers.pipeline import Finished, Pipeline, Prefetcher, WithinMemory, drained
    from fastgen.cli.transformers.progress import Progress

    asked = task.args
    task.load()
    args, total = task.args, files.total(asked.n_obs)
    output.begin(with_commit(signature(replace(args, prefix=asked.prefix), files.survey), task.loaded.model.config))
    before = output.records
    progress = Progress(total, before, args.quiet, task.unit)
    sounds = task.output if isinstance(task.output, SoundFolder) else None

    def write(finished: Finished) -> None:
        output.write(finished.entries)
        failures = [(item.line.number, name_of(item, args) + item.error) for item in finished.items if item.error]
        progress.finished(len(finished.items), finished.amount, failures)

    try:
        if args.resume:
            progress.note(f"goes on after {before} of {total} lines")
        notes, planner = task.notes()
        for note in notes:
            progress.note(note)
        if sounds is not None:
            sounds.begin(resumes=before > 0)
        progress.begin()
        chunks = read_chunks(args.input, args.n_obs, task.lines_at_once, longest=task.input.line_bytes)
        with stoppable() as stop:
            generate = WithinMemory(task, progress.say, args.seed)
            pipeline = Pipeline(task, generate, write, stop)
            complete = drained(pipeline, Prefetcher(chunks, task, planner, args.preprocess_workers, output.entry), stop)
        if complete:
            _check_all_is_there(args, files, total, output)
    except BaseException:
        _leave(args, output, progress, sounds)
        raise
    if not complete:
        _leave(args, output, progress, sounds)
        progress.say("interrupted")
        return stop.status
    records = output.records
    output.complete(records, None if sounds is None else lambda: sounds.complete(args.overwrite))
    output.leave()
    progress.close()
    if sounds is not None:
        progress.note(f"the sounds are in {sounds.folder}")
    if unused := sorted(getattr(task.input, "unused", ())):
        progress.note(f"what bodies of requests have besides was not used: {', '.join(unused)}")
    _score(args, files, records)
    if not args.quiet:
        if args.bs != asked.bs or args.batch_tokens != asked.batch_tokens:
            tokens = "" if args.batch_tokens is None else f" --batch_tokens {args.batch_tokens}"
            print(f"batches, chosen for MODEL and this machine: --bs {args.bs}{tokens}", file=sys.stderr)
        print(progress.summary(), file=sys.stderr)
    return _status(output.failures, records)


def _check_all_is_there(args: RunConfig, files: Files, total: int | None, output: Journal | StreamOutput) -> None:
    """Raises where OUTPUT would not be that of INPUT, or would have nothing but failures in it."""
    if files.survey is not None and output.records != total:
        raise InputError(f"INPUT changed while it was read: it had {total} lines, and {output.records} could be read")
    if output.failures and not output.generated and not is_stream(args.output):
        raise RunError(f"every input failed ({output.failures}), so no OUTPUT is written")


def _leave(args: RunConfig, output: Journal | StreamOutput, progress: Any, sounds: Any) -> None:
    """Keeps what is written, and says what can be done with it; a journal of nothing but failures is no use."""
    progress.close()
    if isinstance(output, StreamOutput) or not output.generated:
        output.leave(keep=False)
        if sounds is not None:
            sounds.discard()
    elif is_stream(args.input):
        where = output.leave_records()
        progress.say(f"{output.records} records are in {where}; INPUT can be read only once, so no run can go on")
    else:
        output.leave()
        done = f"{output.records} lines are complete in {output.path}"
        progress.say(f"{done}; the same command with --resume goes on after them")


def _already_complete(args: RunConfig, files: Files, made: dict[str, Any]) -> int:
    if args.audio_out:
        from fastgen.cli.transformers.audio import sound_folders

        if not (folder := sound_folders(args.output)[0]).is_dir():
            raise InputError(
                f"OUTPUT {args.output}: is there, but its sounds in {folder} are gone (accepted: --overwrite)"
            )
    if not args.quiet:
        print(f"{PROG}: {args.output} is complete: the same command has made it", file=sys.stderr)
    _score(args, files, made["records"])
    return _status(made["failures"], made["records"])


def _status(failures: int, inputs: int) -> int:
    """The exit status; says how many inputs failed."""
    if failures:
        print(f"{PROG}: {failures} of {inputs} inputs failed", file=sys.stderr)
    return FAILED if failures else 0


def check_files(args: RunConfig) -> Files:
    """Raises InputError where a file cannot be used, or where INPUT does not hold what the task reads."""
    surveyed = None if is_stream(args.input) else survey(args.input)
    for name, path in (("INPUT", args.input), ("OUTPUT", args.output)):
        if args.resume and is_stream(path):
            raise InputError(f"--resume needs {name} to be a file, and {path} can be gone through only once")
    if surveyed is not None and args.reads_records:
        _check_first_record(args)
    references = _references(args, surveyed)
    sources = {"INPUT": args.input, "--reference_path": args.reference_path}
    check_writable("OUTPUT", args.output, sources)
    if args.audio_out:
        from fastgen.cli.transformers.audio import sound_folders

        folder, output = sound_folders(args.output)[0], os.path.realpath(args.output)
        known = os.path.lexists(output) or os.path.lexists(f"{output}.part")
        if folder.exists() and not known and not args.overwrite:
            raise InputError(
                f"OUTPUT {args.output}: {folder} is there already (accepted: another name, or --overwrite)"
            )
    if args.score_path is not None:
        if is_url(args.score_path):
            raise InputError(f"--score_path {args.score_path}: is a URL (accepted: a local file)")
        check_writable("--score_path", args.score_path, sources | {"OUTPUT": args.output})
        # A run that --resume finds complete leaves the scores as they are, too.
        is_there = os.path.exists(args.score_path)
        if is_there and not args.overwrite and not (args.resume and os.path.exists(args.output)):
            raise InputError(f"--score_path {args.score_path}: is there already (accepted: another, or --overwrite)")
    return Files(surveyed, None if references is None else references[: args.n_obs])


def _check_first_record(args: RunConfig) -> None:
    """One bad record is that line's failure; a file that begins with one is not in this format, or has other fields."""
    raw = next(raw_lines("INPUT", args.input, LONGEST_RECORD), b"")
    try:
        if len(raw) <= LONGEST_RECORD:  # else it is a failed input
            read_input(Line(1, raw), args)
    except RecordError as error:
        hint = "--input_format, --text_field, --id_field"
        raise InputError(f"INPUT {args.input}: line 1 {error} ({hint})") from error


def _references(args: RunConfig, surveyed: Survey | None) -> list[str] | None:
    """Those of --reference_path, or else of the records of INPUT; None where nothing is to be scored."""
    if args.reference_path is None and args.reference_field is None:
        return None
    metrics.check_installed(args.audio_in)
    if args.reference_path is not None:
        references = read_references("--reference_path", args.reference_path, args.reference_field)
        if surveyed is not None:
            _check_same_length(args, len(references), surveyed.lines)
        return references
    if surveyed is None:
        raise InputError(
            f"--reference_field {args.reference_field} needs INPUT to be a file, or --reference_path, "
            f"and {args.input} can be read only once"
        )
    return read_references("INPUT", args.input, args.reference_field)


def _check_same_length(args: RunConfig, references: int, lines: int) -> None:
    if references != lines:
        raise InputError(
            f"--reference_path {args.reference_path}: has {references} lines, but INPUT {args.input} has {lines}"
        )


def _score(args: RunConfig, files: Files, lines: int) -> None:
    """Prints the scores of each line's first output, also to a --score_path that may be written."""
    if files.references is None:
        return
    _check_same_length(args, len(files.references), lines)
    outputs = [first_text(record, args) for record in raw_lines("OUTPUT", args.output)]
    scores = metrics.score(outputs, files.references, args.audio_in)
    print(metrics.report(scores), file=sys.stdout)
    if args.score_path is not None and (args.overwrite or not os.path.exists(args.score_path)):
        path = Path(os.path.realpath(args.score_path))
        write_whole(path, (json.dumps(scores, indent=2) + "\n").encode(), beside(path, f".{os.getpid()}.new"))


@contextmanager
def _said_once(quiet: bool) -> Iterator[None]:
    """What transformers logs while a run goes on: each message once, and errors only with --quiet.

    A warning about a batch would be logged for every batch.
    """
    from transformers.utils import logging

    handlers, verbosity = logging.get_logger().handlers, logging.get_verbosity()
    said: set[str] = set()

    def once(record: LogRecord) -> bool:
        before = len(said)
        said.add(record.getMessage())
        return len(said) > before

    for handler in handlers:
        handler.addFilter(once)
    if quiet:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        for handler in handlers:
            handler.removeFilter(once)


if __name__ == "__main__":
    sys.exit(main())
