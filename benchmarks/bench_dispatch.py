"""One driver and many workers: what it can read, plan, hand out and write in a second, with workers that only sleep.

    python benchmarks/bench_dispatch.py [--workers 1 16 256] [--seconds 1.0] [--bs 32] [--lines 20000] [--floors FILE]

The command runs as it is, with the demo model's tokenizer and plan, Ray's transport and the journal. In the place of
each worker's process is one of a few actors of asyncio, which sleep `--seconds` for each batch, for many workers at
once, and send back outputs of usual size. d: inputs in a second where they do not sleep, which is what the driver can.
formula: seconds of n inputs on W workers, max(n / (W × bs / seconds), n / d).
journal: batches and records in a second that are written to a journal, by itself.
--floors takes a file of the parts of the formula's speed to reach, by the number of workers (floors.json); the status
is 1 where one is missed. --json writes all of this.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from bench_pipeline import write_input
from harness import below, finish, parse_flags, parser_of
from machine import describe_cpu

from fastgen.batch import workers
from fastgen.batch.config import BatchConfig
from fastgen.batch.journal import Entry, Journal
from fastgen.batch.planner import Batch
from fastgen.cli.transformers.command import main

WORKERS = [1, 16, 64, 256]
PROCESSES = 2
OUTPUT = {"text": "Wendy sold thirty one books for seven dollars fifty.", "score": -0.5123456789, "tokens": 16}
JOURNAL_BATCHES = 2000


def outputs(batch: Batch) -> list[tuple[list[dict[str, Any]], None]]:
    """Of each item another text, so that none is sent for all."""
    return [([{**OUTPUT, "text": f"{OUTPUT['text']} {item.line.number}"}], None) for item in batch.items]


class Sleeper:
    """In the place of many workers."""

    def __init__(self, args: BatchConfig, seconds: float) -> None:
        self._args, self._seconds = args, seconds

    async def load(self) -> BatchConfig:
        return self._args

    async def generate(self, batch: Batch, start: int) -> Any:
        await asyncio.sleep(self._seconds)
        return outputs(batch), 16.0 * len(batch.items), []


class Sleeping(workers.Workers):
    """Workers of which each is one of a few actors. sent, returned: bytes of a batch, and of what comes back."""

    seconds = 0.0
    sent = returned = 0
    _actors: tuple[Any, ...] = ()

    def _load(self, place: int) -> None:
        if not self._actors:
            kind: Any = ray.remote(num_cpus=0)(Sleeper)
            self._actors = tuple(kind.remote(self._worker_args, self.seconds) for _ in range(PROCESSES))
        self._workers[place] = self._actors[place % PROCESSES]
        self._running[self._workers[place].load.remote()] = place, None

    def _start(self, place: int, part: workers.Part) -> None:
        if not Sleeping.sent:
            batch = part.sent()
            Sleeping.sent = len(ray.cloudpickle.dumps(batch))
            Sleeping.returned = len(ray.cloudpickle.dumps(outputs(batch)))
        super()._start(place, part)


def simulate(count: int, seconds: float, source: Path, bs: int) -> tuple[float, float]:
    """Seconds of a run of the command from the first batch to the last record, and of its start."""
    own_ray = workers.own_ray
    command = ["demo", str(source), f"{source}.out", "--bs", str(bs), "--workers", str(count), "--overwrite"]
    with (
        mock.patch.object(Sleeping, "seconds", seconds),
        mock.patch.object(workers, "Workers", Sleeping),
        mock.patch.object(workers, "own_ray", lambda cpus: own_ray(PROCESSES)),
        redirect_stderr(StringIO()) as said,
    ):
        begun = time.perf_counter()
        status = main(command)
    if status:
        raise SystemExit(said.getvalue())
    generating = float(re.findall(r"lines in ([\d.]+) s", said.getvalue())[-1])
    return generating, time.perf_counter() - begun - generating


def journal_writes(folder: Path, bs: int) -> float:
    """Batches in a second."""
    journal = Journal(str(folder / "journal"), resume=False, overwrite=True)
    journal.begin({})
    record = f'{{"line": 1, "input_tokens": 21, "outputs": [{json.dumps(OUTPUT)}]}}\n'.encode()
    begun = time.perf_counter()
    for batch in range(JOURNAL_BATCHES):
        journal.write([Entry(batch * bs + row + 1, 21, None, False, record) for row in range(bs)])
    seconds = time.perf_counter() - begun
    journal.leave(resumable=False)
    return JOURNAL_BATCHES / seconds


def benchmark(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, repeats=None)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a batch")
    parser.add_argument("--bs", type=int, default=32)
    parser.add_argument("--lines", type=int, default=20000, help="at most; a run has 10 batches for each worker")
    args = parse_flags(parser, argv, "dispatch", (), [str(count) for count in WORKERS])
    print(describe_cpu())
    results: list[dict[str, Any]] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = journal_writes(folder, args.bs)
        print(f"journal: {journal:.0f} batches/s, {journal * args.bs:.0f} records/s", flush=True)
        source = write_input(folder / "in.txt", args.lines)
        simulate(1, 0.0, write_input(folder / "first.txt", args.bs), args.bs)  # imports
        seconds, _ = simulate(max(args.workers), 0.0, source, args.bs)
        d = args.lines / seconds
        print(f"d: {d:.0f} inputs/s; bytes of a batch: {Sleeping.sent}, back: {Sleeping.returned}", flush=True)
        for count in args.workers:
            lines = min(args.lines, 10 * args.bs * count)
            seconds, start = simulate(count, args.seconds, write_input(folder / "in.txt", lines), args.bs)
            formula = max(lines / (count * args.bs / args.seconds), lines / d)
            row = {"workers": count, "lines": lines, "seconds": seconds, "formula": formula, "start": start}
            print({key: round(value, 2) for key, value in row.items()}, flush=True)
            results.append({"case": str(count), **row, "ratio": formula / seconds})
            missed += below(str(count), {"the formula": formula / seconds}, args.floors)
    return finish(args, results, missed, d=d, journal=journal)


if __name__ == "__main__":
    sys.exit(benchmark())
