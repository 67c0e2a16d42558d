"""`make demo`: the model inside the package on a sample of 500 lines, with fastgen and without, in about a minute.

On a busy machine it takes fewer lines, and says what other programs took. All ways have the OpenMP settings of the
commands (fastgen/batch/threads.py): with libgomp's own, threads that spin make each of them take many times as long if
other programs use the cores.
"""

from __future__ import annotations

import io
import itertools
import math
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

from fastgen.batch.threads import set_openmp_variables

set_openmp_variables()  # before torch is imported

from tqdm import tqdm  # noqa: E402
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

import fastgen  # noqa: E402
from fastgen.cli.exits import FAILED, INTERRUPTED  # noqa: E402
from fastgen.cli.transformers.command import main as command  # noqa: E402
from fastgen.models.demo import demo_path, sample_path  # noqa: E402
from fastgen.optimizer.decoding.timing import Load  # noqa: E402

BS = 32
# The loop around transformers alone begins no batch later; the other ways get the lines that it has done.
SECONDS = 30.0
# Seconds are not compared if other programs took a larger share of the CPUs.
QUIET = 0.15


def user_loop(source: Path, output: Path, seconds: float = math.inf) -> None:
    """Generates as a user would with transformers alone; begins no batch but the first after so many seconds."""
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    model = AutoModelForSeq2SeqLM.from_pretrained(demo_path()).eval()
    lines, end = source.read_text(encoding="utf-8").splitlines(), time.perf_counter() + seconds
    with output.open("w", encoding="utf-8") as file:
        for start in tqdm(range(0, len(lines), BS), leave=False, mininterval=1):
            if start and time.perf_counter() > end:
                break
            batch = tokenizer(lines[start : start + BS], padding=True, return_tensors="pt")
            sequences = model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
            file.writelines(text + "\n" for text in tokenizer.batch_decode(sequences, skip_special_tokens=True))


def plain_loop(source: Path, output: Path) -> None:
    with fastgen.disabled():
        user_loop(source, output, SECONDS)


fastgen_loop = fastgen.enabled()(user_loop)


def run_command(source: Path, output: Path) -> None:
    if status := command(["demo", str(source), str(output), "--bs", str(BS), "--device", "cpu"]):
        sys.exit(status)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "the loop that you would write": plain_loop,
    "the same with `import fastgen`": fastgen_loop,
    "fastgen-generate-for-transformers": run_command,
}


@dataclass(frozen=True)
class Run:
    """The outputs of a way, its seconds, and the share of the CPUs that other programs took; None if not known."""

    outputs: list[str]
    seconds: float
    others: float | None

    def __str__(self) -> str:
        others = "" if self.others is None else f"   other programs: {self.others:.0%} of the CPUs"
        return f"{self.seconds:6.1f} s {len(self.outputs) / self.seconds:8.1f} lines/s{others}"


def measured(way: Callable[[Path, Path], None], lines: list[str], output: Path) -> Run:
    """Calls a way for the first batch, whose time does not count, and for all lines."""
    with tempfile.TemporaryDirectory() as folder:
        first, source, written = (Path(folder, name) for name in ("first.txt", "source.txt", "output.txt"))
        first.write_text("\n".join(lines[:BS]), encoding="utf-8")
        source.write_text("\n".join(lines), encoding="utf-8")
        with redirect_stderr(io.StringIO()):
            way(first, Path(folder, "warm-up.txt"))
        load, begun = Load(), time.perf_counter()
        way(source, written)
        seconds, others = time.perf_counter() - begun, load.share()
        shutil.move(written, output)
    return Run(output.read_text(encoding="utf-8").splitlines(), seconds, others)


def verdict(runs: list[Run]) -> str:
    """Returns what the seconds say: how many times as fast fastgen was, or that they cannot be compared."""
    busy = max(run.others or 0.0 for run in runs)
    if busy > QUIET:
        return (
            f"Other programs took up to {busy:.0%} of the CPUs, so these seconds do not say how much faster fastgen "
            "is. Run it again when the machine is quiet."
        )
    plain, loop, whole = (run.seconds for run in runs)
    return (
        f"The command was {plain / whole:.1f} times as fast as the loop around transformers alone, and that loop was "
        f"{plain / loop:.1f} times as fast with `import fastgen`. docs/benchmarks.md has models of other sizes."
    )


def main(source: Path, output: Path) -> int:
    """Runs all three ways, prints their seconds, leaves the command's outputs in `output`; returns a status."""
    logging.disable_progress_bar()
    lines = source.read_text(encoding="utf-8").splitlines()
    total, runs = len(lines), []
    print(f"{total} lines of written English into spoken English, on the CPU, in batches of {BS}:", flush=True)
    for name, way in WAYS.items():
        print(f"running {name}", file=sys.stderr, flush=True)
        runs.append(measured(way, lines, output))
        print(f"  {name:<34}{runs[-1]}", flush=True)
        if len(runs) == 1 and len(runs[0].outputs) < total:
            lines = lines[: len(runs[0].outputs)]
            print(f"  That was slow: all ways get these {len(lines)} of the {total} lines only.", flush=True)
    outputs = [run.outputs for run in runs]
    equal = sum(len(set(texts)) == 1 for texts in itertools.zip_longest(*outputs))
    pairs = [f"{line}\n  → {text}" for line, text in zip(lines[:3], outputs[-1])]
    sections = [f"{equal} of {len(lines)} outputs are equal in all three.", *pairs, textwrap.fill(verdict(runs), 80)]
    print("\n\n".join([*sections, f"All outputs are in {output}."]))
    return 0 if all(texts == outputs[0] for texts in outputs) else FAILED


if __name__ == "__main__":
    try:
        sys.exit(main(sample_path(), Path("demo-output.txt")))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
