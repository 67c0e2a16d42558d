"""--num_shards N --shard_id I: a run for a part of INPUT, on any machine; --merge: the records of all shards in order.

    window of lines  0  1  2  3  4  5        windows share no batch, see planner.py
    shard            0  1  2  0  1  2        three shards, each with its own OUTPUT and journal

All shards together make the batches of a single run, with the same numbers, and so write the same records.

Tests: tests/batch/test_shards.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, cycle, groupby, islice
from textwrap import shorten
from typing import Any

from fastgen.batch import files
from fastgen.batch.config import BatchConfig
from fastgen.batch.errors import InputError, RunError
from fastgen.batch.journal import Journal
from fastgen.batch.planner import lines_per_window
from fastgen.batch.signature import differences

# Variables with the number of a process and the number of processes: of torchrun and accelerate, and of Slurm's srun.
IN_A_JOB = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
ARRAY = tuple(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT"))  # this task's, and the array's
INDEX_OF_JOB = "JOB_COMPLETION_INDEX"
ON_THIS_MACHINE = ("LOCAL_RANK", "SLURM_LOCALID")
LONGEST_LIST = 1000  # characters of names of files in a message


def of_launcher(args: BatchConfig, environ: Mapping[str, str]) -> BatchConfig:
    """Returns the arguments with numbers in place of auto, and the shard's OUTPUT. Raises InputError for mistakes."""
    if "auto" in (args.num_shards, args.shard_id):
        args = _with_numbers(args, environ)
    merge, shards, shard = args.named("merge", True), args.named("num_shards"), args.named("shard_id")
    if args.merge and (args.num_shards is None or args.shard_id is not None):
        raise InputError(f"{merge} needs {shards} N without {shard}")
    if not args.merge and (args.num_shards is None) != (args.shard_id is None):
        raise InputError(f"{shards} and {shard} need each other (accepted: both, or {shards} with {merge})")
    if args.num_shards is None:
        return args
    for name, path in (("INPUT", args.input), ("OUTPUT", args.output)):
        if files.is_stream(path):
            raise InputError(f"{name} {path} does not go with {args.setting('num_shards')} (accepted: a file)")
    if args.merge:
        return args
    if args.shard_id >= args.num_shards:
        raise InputError(f"{args.setting('shard_id')} (accepted: 0 to {args.num_shards - 1})")
    for scored in filter(None, map(args.setting, ("reference_path", "reference_field", "score_path"))):
        why = f"{shard}, which has a part of the output (accepted: with {merge})"
        raise InputError(f"{scored} does not go with {why}")
    seed = args.seed or 0  # the same for all shards
    return replace(args, output=output_of(args.output, args.shard_id, args.num_shards), seed=seed)


def _with_numbers(args: BatchConfig, environ: Mapping[str, str]) -> BatchConfig:
    """Returns the arguments with the launcher's numbers in place of auto. Raises InputError if there are none."""
    if (launched := place(environ)) is None:
        launchers = "torchrun, accelerate, Slurm, an indexed job of Kubernetes"
        raise InputError(f"auto: no variables of a launcher are set (accepted: numbers, or auto under {launchers})")
    index, count = launched
    said = ", ".join(f"{name}={environ[name]}" for name in (*ARRAY, INDEX_OF_JOB, *chain(*IN_A_JOB)) if name in environ)
    if args.num_shards == "auto" and count is None:
        why = f"{said} does not say how many shards there are"
        whole = f"{args.named('num_shards')} N, or a whole Slurm array, --array=0-M"
        raise InputError(f"{args.setting('num_shards')}: {why} (accepted: {whole})")
    shards = count if args.num_shards == "auto" else args.num_shards
    if args.shard_id == "auto" and shards is not None and index >= shards:
        why = f"auto takes it from {said}; an array of Slurm counts from 0 on with --array=0-{shards - 1}"
        raise InputError(f"{args.named('shard_id', index)} (accepted: 0 to {shards - 1}): {why}")
    import torch

    if (gpus := torch.cuda.device_count()) > 1:  # assigns each process of a machine one of its visible GPUs
        torch.cuda.set_device(next((int(environ[name]) for name in ON_THIS_MACHINE if name in environ), 0) % gpus)
    return replace(args, num_shards=shards, shard_id=index if args.shard_id == "auto" else args.shard_id)


def place(environ: Mapping[str, str]) -> tuple[int, int | None] | None:
    """Returns the index of this process and their number from a launcher's variables; None for what is missing.

    The index is the launcher's own: a part of an array (--array=3,6) means the shards with these numbers. Jobs of an
    array, of Slurm or Kubernetes, may have several processes each.
    """
    processes = [(int(environ[one]), int(environ.get(all, 1))) for one, all in IN_A_JOB if one in environ]
    index, count = processes[0] if processes else (0, 1)
    if ARRAY[0] in environ:
        task, first, last, tasks = (int(environ.get(name, -1)) for name in ARRAY)
        is_whole = (first, last) == (0, tasks - 1)
        return task * count + index, tasks * count if is_whole else None
    if INDEX_OF_JOB in environ:
        return int(environ[INDEX_OF_JOB]) * count + index, None
    return (index, count) if processes else None


def output_of(output: str, shard: int, shards: int) -> str:
    """Returns a shard's OUTPUT: out.jsonl.gz, 3, 8 -> out-00003-of-00008.jsonl.gz."""
    return re.sub(r"((\.\w+)?(\.(gz|bz2|xz|zst))?)$", rf"-{shard:05}-of-{shards:05}\1", output, count=1)


def own_chunks(chunks: Iterator[list[files.Line]], args: BatchConfig) -> Iterator[list[files.Line]]:
    """Returns the lines of this shard's windows."""
    if args.num_shards is None:
        return chunks
    windows = (
        (window, list(lines))
        for chunk in chunks
        for window, lines in groupby(chunk, key=lambda line: (line.number - 1) // lines_per_window(args))
    )
    return (lines for window, lines in windows if window % args.num_shards == args.shard_id)


def own_lines(total: int, args: BatchConfig) -> int | None:
    """Returns this run's number of lines, of `total` and up to --n_obs; None if the window size is not known yet."""
    total = total if args.n_obs is None else min(total, args.n_obs)
    if args.num_shards is None:
        return total
    if args.bs is None and args.batch_tokens is None:
        return None
    window = lines_per_window(args)
    starts = range(args.shard_id * window, total, args.num_shards * window)
    return sum(min(window, total - start) for start in starts)


def merge(args: BatchConfig, output: Journal) -> None:
    """Completes OUTPUT with the records of all shards in the order of INPUT, one window in memory at a time.

    Raises InputError with the shards that are not complete, or were made differently.
    """
    asked, per_shard = args.setting("merge"), [args.named(name) for name in ("num_shards", "shard_id", "device")]
    names = [output_of(args.output, shard, args.num_shards) for shard in range(args.num_shards)]
    runs = {name: run for name in names if (run := _completed(args, name)) is not None}
    if missing := [name for name in names if name not in runs]:
        some = shorten(", ".join(missing), LONGEST_LIST, placeholder=" …")
        raise InputError(f"{asked}: {len(missing)} of {args.num_shards} shards are not complete: {some}")
    whole = runs[names[0]]["signature"] | dict.fromkeys(per_shard[:2])
    for name, run in runs.items():
        if changes := differences(whole, run["signature"] | {each: whole[each] for each in per_shard}):
            raise InputError(f"{asked}: {name} was made differently from {names[0]}: {'; '.join(changes)}")
    sizes = {name: whole[args.named(name)] for name in ("bs", "batch_tokens", "window")}
    output.signature = whole
    output.records, output.failures = (sum(run[name] for run in runs.values()) for name in ("records", "failures"))
    failed = {int(number): int(number) - 1 for run in runs.values() for number in run.get("failed", ())}
    output.complete(_in_turns(names, lines_per_window(replace(args, **sizes)), output.records), failed)


def _completed(args: BatchConfig, name: str) -> dict[str, Any] | None:
    """Returns the run.json of a shard that is complete and not being written, otherwise None."""
    shard = Journal(replace(args, output=name, resume=True, overwrite=True))
    try:
        return shard.completed
    finally:
        shard.leave()


def _in_turns(names: list[str], window: int, total: int) -> Iterator[bytes]:
    """Yields the records of all shards, one window of each in turn."""
    taken = 0
    for records in cycle([files.raw_lines("OUTPUT", name) for name in names]):
        yield from (lines := [line + b"\n" for line in islice(records, window)])
        taken += len(lines)
        if not lines or taken == total:
            break
    if taken != total:
        raise RunError(f"the shards have {taken} records in order, and {total} altogether")
