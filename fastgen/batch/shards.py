"""--num_shards N --shard_id I: a run for a part of INPUT, on any machine; --merge: the records of all shards in order.

    window of lines  0  1  2  3  4  5  6          windows share no batch, see planner.py
    shard            0  1  2  0  1  2  0 1 2      three shards, each with its own OUTPUT and journal

All shards together make the batches of a single run, with the same numbers, and so write the same records. Windows go
to the shards in turn, the same number to each. The rest, no more windows than shards, is divided by batches: the
shards that share a window plan all of it, and each generates its own batches.

Tests: tests/batch/test_shards.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from textwrap import shorten
from typing import Any

from fastgen.batch import files
from fastgen.batch.config import RECORDS, BatchConfig, names_of
from fastgen.batch.errors import InputError, RunError
from fastgen.batch.journal import Journal, in_order, numbered
from fastgen.batch.planner import Batch, Item, Plan, lines_per_window
from fastgen.batch.signature import differences
from fastgen.reasons import counted

# Variables with the number of a process and the number of processes: of torchrun and accelerate, and of Slurm's srun.
IN_A_JOB = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
ARRAY = tuple(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT"))  # this task's, and the array's
INDEX_OF_JOB = "JOB_COMPLETION_INDEX"
ACCELERATE = "ACCELERATE_MIXED_PRECISION"  # `accelerate launch` sets it always, and RANK only for several processes
ON_THIS_MACHINE = ("LOCAL_RANK", "SLURM_LOCALID")
LONGEST_LIST = 1000  # characters of names of files in a message


def of_launcher(args: BatchConfig, environ: Mapping[str, str]) -> BatchConfig:
    """Returns the arguments with numbers in place of auto, and the shard's OUTPUT. Raises InputError for mistakes."""
    if "auto" in (args.num_shards, args.shard_id):
        args = _with_numbers(args, environ)
    merge = args.named("merge", True)
    shards = args.named("num_shards")
    shard = args.named("shard_id")
    if args.merge and (args.num_shards is None or args.shard_id is not None):
        raise InputError(f"{merge} needs {shards} N without {shard}")
    if not args.merge and (args.num_shards is None) != (args.shard_id is None):
        raise InputError(f"{shards} and {shard} need each other (accepted: both, or {shards} with {merge})")
    if args.num_shards is None:
        return args
    streams = files.is_stream(args.input), files.is_output_stream(args.output)
    for name, path, is_stream in zip(("INPUT", "OUTPUT"), (args.input, args.output), streams):
        if is_stream:
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
    if (launched := rank_and_world_size(environ)) is None:
        launchers = "torchrun, accelerate, Slurm, an indexed job of Kubernetes"
        raise InputError(f"auto: no variables of a launcher are set (accepted: numbers, or auto under {launchers})")
    index, count = launched
    names = filter(environ.get, (*ARRAY, INDEX_OF_JOB, *chain(*IN_A_JOB), ACCELERATE))
    said = ", ".join(f"{name}={environ[name]}" for name in names)
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
        numbers = [_number(environ, name) for name in ON_THIS_MACHINE if environ.get(name)]
        torch.cuda.set_device(numbers[0] % gpus if numbers else 0)
    return replace(args, num_shards=shards, shard_id=index if args.shard_id == "auto" else args.shard_id)


def rank_and_world_size(environ: Mapping[str, str]) -> tuple[int, int | None] | None:
    """Returns the index of this process and their number from a launcher's variables; None for what is missing.

    Empty variables count as unset. Raises InputError for other variables without a number.

    The index is the launcher's own: a part of an array (--array=3,6) means the shards with these numbers. Jobs of an
    array, of Slurm or Kubernetes, may have several processes each.
    """
    environ = {name: value for name, value in environ.items() if value}
    processes = [(_number(environ, rank), _number(environ, size, 1)) for rank, size in IN_A_JOB if rank in environ]
    processes += [(0, 1)] * (ACCELERATE in environ)
    index, count = processes[0] if processes else (0, 1)
    if ARRAY[0] in environ:
        task, first, last, tasks = (_number(environ, name, -1) for name in ARRAY)
        is_whole = (first, last) == (0, tasks - 1)
        return task * count + index, tasks * count if is_whole else None
    if INDEX_OF_JOB in environ:
        return _number(environ, INDEX_OF_JOB) * count + index, None
    return (index, count) if processes else None


def _number(environ: Mapping[str, str], name: str, unset: int = 0) -> int:
    """Returns the number in a variable. Raises InputError if it holds something else."""
    if (value := environ.get(name)) is None:
        return unset
    if not value.isdecimal():
        raise InputError(f"auto: {name}={value} is not a number (accepted: a whole number from 0 on)")
    return int(value)


def output_of(output: str, shard: int, shards: int) -> str:
    """Returns a shard's OUTPUT: out.jsonl.gz, 3, 8 -> out-00003-of-00008.jsonl.gz."""
    return re.sub(r"((\.\w+)?(\.(gz|bz2|xz|zst))?)$", rf"-{shard:05}-of-{shards:05}\1", output, count=1)


@dataclass(frozen=True)
class Share:
    """A shard's part of INPUT.

    window: the number of lines that are planned together; lines: of INPUT. rows: the inputs of a full batch, if windows
    consist of whole batches; otherwise 1.
    """

    shard: int
    shards: int
    window: int
    lines: int
    rows: int = 1

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.shards}: about {self.lines // self.shards} of {self.lines} lines"

    @property
    def first_shared(self) -> int:
        """The first line, from 0 on, of the windows that do not go to shards in turn."""
        in_turn = self.window * self.shards
        return self.lines // in_turn * in_turn

    def chunks(self, chunks: Iterable[list[files.Line]]) -> Iterator[list[files.Line]]:
        """Yields the lines of the windows in which this shard has batches."""
        for chunk in chunks:
            for window, lines in groupby(chunk, key=lambda line: (line.number - 1) // self.window):
                if self.has(window):
                    yield list(lines)

    def has(self, window: int) -> bool:
        """Whether this shard may have batches of a window."""
        start, stop = self._bounds(window)
        if start < self.first_shared:
            return window % self.shards == self.shard
        return any(self._part(self.shard, start, stop, unit) > 0 for unit in (1, self.rows))

    def batches(self, planner: Plan, items: Iterable[Item]) -> Iterator[Batch]:
        """Yields this shard's batches of the items of its windows.

        The shards that share a window plan it alike: inputs of other windows, which may equal its own, do not count.
        """
        for window, planned in groupby(items, key=self._shared_window):
            batches = planner(planned)
            yield from batches if window is None else self._own(window, list(batches))

    def _bounds(self, window: int) -> tuple[int, int]:
        return window * self.window, min((window + 1) * self.window, self.lines)

    def _shared_window(self, item: Item) -> int | None:
        line = item.line.number - 1
        return None if line < self.first_shared else line // self.window

    def _part(self, shard: int, start: int, stop: int, unit: int) -> int:
        """Returns how many of the lines from `start` to `stop` are in a shard's part of the rest; units stay whole."""
        rest = self.lines - self.first_shared
        units = -(-rest // unit)
        first, last = (min(rest, index * units // self.shards * unit) for index in (shard, shard + 1))
        return min(stop, self.first_shared + last) - max(start, self.first_shared + first)

    def _own(self, window: int, batches: list[Batch]) -> Iterator[Batch]:
        """Yields this shard's batches of a window that several shards have.

        Each batch goes to the shard that lacks most of its part so far, so that all get long and short lines. An item
        that equals an earlier one goes where that is generated.
        """
        start, stop = self._bounds(window)
        sizes = [max(1, len(batch.items)) for batch in batches]
        unit = self.rows if all(size == self.rows for size in sizes[:-1]) else 1
        parts = {shard: self._part(shard, start, stop, unit) for shard in range(self.shards)}
        parts = {shard: part for shard, part in parts.items() if part > 0}
        taken = dict.fromkeys(parts, 0)
        owners = []
        for done, size in zip(accumulate(sizes), sizes):
            lacks = {shard: part * done - taken[shard] * (stop - start) for shard, part in parts.items()}
            owners.append(owner := max(lacks, key=lacks.__getitem__))
            taken[owner] += size
        owner_of = {id(item): owner for batch, owner in zip(batches, owners) for item in batch.items}
        for batch, owner in zip(batches, owners):
            skipped = [item for item in batch.skipped if owner_of.get(id(item.first), owner) == self.shard]
            items = batch.items if owner == self.shard else []
            if items or skipped:
                yield replace(batch, items=items, skipped=skipped)


def share_of(args: BatchConfig, lines: int | None) -> Share | None:
    """Returns the shard's part of INPUT's lines; None for all of them."""
    if args.num_shards in (None, 1) or lines is None:
        return None
    window = lines_per_window(args)
    rows = args.bs if args.bs is not None and window % args.bs == 0 else 1
    return Share(args.shard_id, args.num_shards, window, lines, rows)


def merge(args: BatchConfig, output: Journal) -> None:
    """Completes OUTPUT with the records of all shards in the order of INPUT, one of each shard in memory at a time.

    Raises InputError with the shards that are not complete, or were made differently.
    """
    requested = args.setting("merge")
    per_shard = [args.named(name) for name in names_of(per_shard=True)]
    names = [output_of(args.output, shard, args.num_shards) for shard in range(args.num_shards)]
    runs = {name: run for name in names if (run := _completed(args, name)) is not None}
    if missing := [name for name in names if name not in runs]:
        some = shorten(", ".join(missing), LONGEST_LIST, placeholder=" …")
        raise InputError(f"{requested}: not complete: {len(missing)} of {counted(args.num_shards, 'shard')}, {some}")
    whole = runs[names[0]]["signature"] | dict.fromkeys(map(args.named, names_of(per_shard=True, affects=RECORDS)))
    for name, run in runs.items():
        if changes := differences(whole, run["signature"] | {key: whole[key] for key in per_shard}):
            raise InputError(f"{requested}: {name} was made differently from {names[0]}: {'; '.join(changes)}")
    total = sum(run["records"] for run in runs.values())
    failed = sorted(number for run in runs.values() for number in run["failed"])
    lines = [(1, total)] if total else []
    run_json = {"signature": whole, "records": total, "lines": lines, "failures": len(failed), "failed": failed}
    records = in_order(*(numbered(run, name) for name, run in runs.items()))
    output.put_together(_without_gaps(records, total), run_json)


def _completed(args: BatchConfig, name: str) -> dict[str, Any] | None:
    """Returns the run.json of a shard that is complete and not being written, otherwise None."""
    shard = Journal(replace(args, output=name, resume=True, overwrite=True))
    try:
        return shard.completed
    finally:
        shard.leave()


def _without_gaps(records: Iterable[tuple[int, bytes]], total: int) -> Iterator[tuple[int, bytes]]:
    """Yields the records of all lines. Raises RunError if the numbers of lines are not 1 to `total`."""
    index = 0
    for index, (number, record) in enumerate(records, start=1):
        if number != index:
            raise RunError(f"the shards have no record of line {index}")
        yield number, record
    if index != total:
        raise RunError(f"the shards have records of {counted(index, 'line')}, and {counted(total, 'record')}")
