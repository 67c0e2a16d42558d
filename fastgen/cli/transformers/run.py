"""One run of the command, from the model to the scores."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, TextIO

import torch

from fastgen.cli.errors import FAILED, InputError
from fastgen.cli.transformers import metrics
from fastgen.cli.transformers.compare import SideBySide
from fastgen.cli.transformers.files.lines import raw_lines, read_chunks
from fastgen.cli.transformers.files.paths import Files, check_same_length
from fastgen.cli.transformers.files.sound_folder import SoundFolder, check_sounds_are_there
from fastgen.cli.transformers.files.standard_output import StandardOutput
from fastgen.cli.transformers.files.whole_file import write_whole
from fastgen.cli.transformers.flags.argument_types import STREAM
from fastgen.cli.transformers.flags.arguments import PROG
from fastgen.cli.transformers.flags.run_config import RunConfig
from fastgen.cli.transformers.model.default_batch import with_batch_size
from fastgen.cli.transformers.model.limits import check_settings
from fastgen.cli.transformers.model.loading import LoadedModel, choose_device, load_model
from fastgen.cli.transformers.model.settings import SCORES, generate_arguments, task_settings
from fastgen.cli.transformers.model.speaking import sampling_rate
from fastgen.cli.transformers.plan import make_stages
from fastgen.cli.transformers.resume.part_file import PartFile, failures_if_complete
from fastgen.cli.transformers.resume.run_state import RunState, restore_random_state
from fastgen.cli.transformers.resume.signature import signature
from fastgen.cli.transformers.stages.generation import Model, WithinMemory
from fastgen.cli.transformers.stages.pipeline import run_stages
from fastgen.cli.transformers.stages.postprocess import first_text
from fastgen.cli.transformers.stages.progress import Progress
from fastgen.cli.transformers.stop import stoppable

NOTICE = "finishing the batch in flight; a second Ctrl-C or SIGTERM stops at once"


def run(args: RunConfig, files: Files) -> int:
    """Loads, generates, writes and scores; returns the exit status."""
    device = choose_device(args)
    loaded = load_model(args, device)
    task = task_settings(args, loaded.model.config)
    settings = generate_arguments(args, loaded, task)
    asked, args = args, with_batch_size(args, loaded, settings)
    if not loaded.speaks:
        check_settings(args, loaded, settings)
    model = _model(args, loaded, settings, device)
    signed = None if args.output == STREAM else signature(args, loaded, files.survey)
    failures = failures_if_complete(args.output, signed, args.overwrite) if args.resume else None
    if failures is not None:
        if args.speaks:
            check_sounds_are_there(args.output)
        if not args.quiet:
            print(f"{PROG}: {args.output} is complete: the same command has made it", file=sys.stderr)
        _score(args, files, loaded, files.total(args.n_obs))
        return _status(failures, files.total(args.n_obs))
    output = _open_output(args, signed)
    written_before = output.records
    progress = _progress(args, files, written_before)
    try:
        state = RunState(**(output.state or {}))
        left = loaded.tokenizer.padding_side == "left"
        generate = WithinMemory(model, left, progress.say, state.cells)
        sounds = _sound_folder(args, loaded, output.records)
        stages = make_stages(args, loaded, settings, task, model, generate, sounds, progress.say)
        if state.random is not None:
            restore_random_state(state.random, device)
        elif args.seed is not None:
            torch.manual_seed(args.seed)
        if not output.records:
            output.keep_state(asdict(stages.state()))
        chunks = read_chunks(args.input, output.records, args.n_obs, stages.lines_at_once, longest=stages.line_bytes)
        with stoppable(NOTICE) as stop:
            complete = run_stages(chunks, stages, output, state.failures, progress, stop)
        if complete:
            _check_all_read(files.total(args.n_obs), files, output.records)
    except BaseException:
        _leave(args, output, written_before, progress)
        raise
    if not complete:
        _leave(args, output, written_before, progress)
        progress.say("interrupted")
        return stop.status
    failures = state.failures + progress.failures
    if sounds is not None:
        sounds.complete()
    output.complete(failures)
    if sounds is not None:
        sounds.remove_replaced()
        if not args.quiet:
            progress.say(f"the sounds are in {sounds.folder}")
    progress.close()
    if isinstance(model, SideBySide):
        print(model.report(), file=_stdout(args))
    _score(args, files, loaded, output.records)
    if not args.quiet:
        if args is not asked:
            tokens = "" if args.batch_tokens is None else f" --batch_tokens {args.batch_tokens}"
            print(f"batches, chosen for MODEL and this machine: --bs {args.bs}{tokens}", file=sys.stderr)
        print(progress.summary(), file=sys.stderr)
    return _status(failures, output.records)


def _sound_folder(args: RunConfig, loaded: LoadedModel, records: int) -> SoundFolder | None:
    return SoundFolder(args.output, sampling_rate(loaded.model), records, args.overwrite) if args.speaks else None


def _status(failures: int, inputs: int) -> int:
    """The exit status; says how many inputs failed."""
    if failures:
        print(f"{PROG}: {failures} of {inputs} inputs failed", file=sys.stderr)
    return FAILED if failures else 0


def _progress(args: RunConfig, files: Files, written_before: int) -> Progress:
    total = files.total(args.n_obs)
    unit = "seconds of sound" if args.speaks else "tokens"
    progress = Progress(total, written_before, args.quiet, args.verbose, unit)
    if args.resume and not args.quiet:
        progress.say(f"goes on at line {written_before + 1} of {total}")
    return progress


def _check_all_read(total: int | None, files: Files, records: int) -> None:
    if files.survey is not None and records != total:
        raise InputError(f"INPUT changed while it was read: it had {total} lines, and {records} could be read")


def _open_output(args: RunConfig, signed: dict[str, Any] | None) -> PartFile | StandardOutput:
    if signed is None:
        return StandardOutput()
    return (PartFile.resume if args.resume else PartFile.create)(args.output, signed, args.overwrite)


def _model(args: RunConfig, loaded: LoadedModel, settings: dict, device: torch.device) -> Model | SideBySide:
    """What turns a batch into tokens: one generate call, or with --compare two."""
    model = Model(loaded, settings, device)
    if not args.compare:
        return model
    tokens_only = {name: value for name, value in settings.items() if name not in SCORES}
    return SideBySide(Model(loaded, tokens_only, device), model)


def _leave(args: RunConfig, output: PartFile | StandardOutput, written_before: int, progress: Progress) -> None:
    """Keeps what is written, and says what can be done with it."""
    progress.close()
    output.leave()
    if args.output == STREAM:
        return
    if output.records:
        done = f"{output.records} lines are complete in {args.output}.part"
        progress.say(f"{done}; the same command with --resume goes on after them")
    again = progress.inputs - (output.records - written_before)
    if again > 0:
        progress.say(f"{again} lines were generated before earlier ones and are not kept (--window 0 keeps the order)")


def _stdout(args: RunConfig) -> TextIO:
    return sys.stderr if args.output == STREAM else sys.stdout


def _score(args: RunConfig, files: Files, loaded: LoadedModel, lines: int) -> None:
    """Prints the scores of each line's first output, also to a --score_path that may be written."""
    if files.references is None:
        return
    check_same_length(args, len(files.references), lines)
    outputs = [first_text(record, args) for record in raw_lines("OUTPUT", args.output)]
    scores = metrics.score(outputs, files.references, args.hears)
    print(metrics.report(scores), file=_stdout(args))
    if args.score_path is not None and (args.overwrite or not args.score_path.exists()):
        write_whole(args.score_path, (json.dumps(scores, indent=2) + "\n").encode("utf-8"))
