"""`make demo`: the model inside the package on a sample of 500 lines, with fastgen and without, in about a minute."""

from __future__ import annotations

import io
import itertools
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

import fastgen
from fastgen.cli.exits import FAILED, INTERRUPTED
from fastgen.cli.transformers.command import main as command
from fastgen.models.demo import demo_path, sample_path

BS = 32


def user_loop(source: Path, output: Path) -> None:
    """Generates as a user would with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    model = AutoModelForSeq2SeqLM.from_pretrained(demo_path()).eval()
    lines = source.read_text(encoding="utf-8").splitlines()
    with output.open("w", encoding="utf-8") as file:
        for start in tqdm(range(0, len(lines), BS), leave=False, mininterval=1):
            batch = tokenizer(lines[start : start + BS], padding=True, return_tensors="pt")
            sequences = model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
            file.writelines(text + "\n" for text in tokenizer.batch_decode(sequences, skip_special_tokens=True))


def plain_loop(source: Path, output: Path) -> None:
    with fastgen.disabled():
        user_loop(source, output)


fastgen_loop = fastgen.enabled()(user_loop)


def run_command(source: Path, output: Path) -> None:
    if status := command(["demo", str(source), str(output), "--bs", str(BS), "--device", "cpu"]):
        sys.exit(status)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "the loop that you would write": plain_loop,
    "the same with `import fastgen`": fastgen_loop,
    "fastgen-generate-for-transformers": run_command,
}


def main(source: Path, output: Path) -> int:
    """Runs all three ways, prints their seconds, leaves the command's outputs in `output`; returns a status."""
    logging.disable_progress_bar()
    lines = source.read_text(encoding="utf-8").splitlines()
    print(f"{len(lines)} lines of written English into spoken English, on the CPU, in batches of {BS}:", flush=True)
    seconds, outputs = [], []
    with tempfile.TemporaryDirectory() as folder:
        first, written = Path(folder, "first.txt"), Path(folder, "output.txt")
        first.write_text("\n".join(lines[:BS]), encoding="utf-8")
        for name, way in WAYS.items():
            print(f"running {name}", file=sys.stderr, flush=True)
            with redirect_stderr(io.StringIO()):
                way(first, Path(folder, "warm-up.txt"))
            Path(folder, "warm-up.txt").unlink()
            begun = time.perf_counter()
            way(source, written)
            seconds.append(time.perf_counter() - begun)
            outputs.append(written.read_text(encoding="utf-8").splitlines())
            print(f"  {name:<34}{seconds[-1]:6.1f} s {len(lines) / seconds[-1]:8.1f} lines/s", flush=True)
            shutil.move(written, output)
    equal = sum(len(set(texts)) == 1 for texts in itertools.zip_longest(*outputs))
    plain, loop, whole = seconds
    gained = (
        f"The command was {plain / whole:.1f} times as fast as the loop around transformers alone, and that loop was "
        f"{plain / loop:.1f} times as fast with `import fastgen`; large models gain more, because one as small as this "
        "spends most of its time between the products, and not on the keys and values that fastgen keeps once per "
        "input instead of once per beam."
    )
    pairs = [f"{line}\n  → {text}" for line, text in zip(lines[:3], outputs[-1])]
    sections = [f"{equal} of {len(lines)} outputs are equal in all three.", *pairs, textwrap.fill(gained, 80)]
    print("\n\n".join([*sections, f"All outputs are in {output}."]))
    return 0 if all(texts == outputs[0] for texts in outputs) else FAILED


if __name__ == "__main__":
    try:
        sys.exit(main(sample_path(), Path("demo-output.txt")))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
