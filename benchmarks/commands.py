"""The commands from start to end, against the loop that a user would write and against fairseq's own command.

`pipeline`: lines of 4 to 122 tokens, drawn from the demo model's sample, beam 4, batches of 32: the loop (tokenizer,
generate, batch_decode, batches as the lines stand in the file) without fastgen and with it, and the command.

`fairseq_command`: short lines with Moses and BPE in batches of 64. The data are random words through Moses, a stand-in
for BPE and fairseq-preprocess, and the model is trained for some updates, so that sentences end. `--cpu_time` counts
the process that runs the model; set OMP_NUM_THREADS=1 with it, as threads that wait for each other take CPU time.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import Options, in_turns, statistics_of

import fastgen
from fastgen.models.demo import demo_path, sample_path

BS = 32
FLAGS = ("--bs", str(BS), "--beam", "4", "--quiet", "--overwrite")
FAIRSEQ_COMMAND = "import sys; from fastgen.cli.fairseq.command import generate; sys.exit(generate())"
# fairseq's commands as they are under torch before 2.6, one after the other.
STOCK_FAIRSEQ = """
import argparse, importlib, json, sys, torch
torch.serialization.add_safe_globals([argparse.Namespace])
for command, *sys.argv[1:] in json.loads(sys.argv[1]):
    importlib.import_module(f"fairseq_cli.{command}").cli_main()
"""
# With these the model of `fairseq_command` ends sentences.
TRAINING_LINES = 3000
UPDATES = 40
# The CPU time of the process, without those it has started, in the last line of stderr.
CPU_TIME = "import atexit, sys, time; atexit.register(lambda: print(time.process_time(), file=sys.stderr))\n"


@dataclass(frozen=True)
class Case:
    workload: str
    lines: int


CASES = {
    "pipeline": {"loop": Case("2,000 lines of 4 to 122 tokens, the demo model, beam 4, batches of 32", 2000)},
    "fairseq_command": {"command": Case("2,000 short sentences, Moses and BPE, beam 4, batches of 64", 2000)},
}


def measure(kind: str, name: str, case: Case, options: Options) -> dict[str, Any]:
    measured = measure_loop if kind == "pipeline" else measure_fairseq
    with tempfile.TemporaryDirectory() as folder:
        return {"case": name, "lines": case.lines, **measured(Path(folder), case.lines, options)}


def write_input(path: Path, lines: int) -> Path:
    sample = sample_path().read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(random.Random(1).choices(sample, k=lines)) + "\n", encoding="utf-8")
    return path


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def user_loop(source: Path, output: Path, device: str) -> None:
    """Generates as a user would without the command."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    model = AutoModelForSeq2SeqLM.from_pretrained(demo_path()).eval().to(device)
    lines = read_lines(source)
    with output.open("w", encoding="utf-8") as file:
        for start in range(0, len(lines), BS):
            batch = tokenizer(lines[start : start + BS], padding=True, return_tensors="pt").to(device)
            sequences = model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, num_beams=4)
            for text in tokenizer.batch_decode(sequences, skip_special_tokens=True):
                file.write(text + "\n")


def run_command(source: Path, output: Path) -> None:
    """Runs the command in this process."""
    from fastgen.cli.transformers.command import main

    if status := main(["demo", str(source), str(output), *FLAGS]):
        raise SystemExit(f"the command ended with status {status}")


def run_process(code: str, *arguments: object) -> subprocess.CompletedProcess:
    """Runs `python -c code arguments…`; raises if it fails."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"exit status {process.returncode}: {process.stderr[-2000:]}")
    return process


def measure_loop(folder: Path, lines: int, options: Options) -> dict[str, Any]:
    source = write_input(folder / "in.txt", lines)
    outputs = {way: folder / f"{way}.out" for way in ("stock", "loop with fastgen", "fastgen")}
    stock = fastgen.disabled()(user_loop)
    ways: dict[str, Callable[[], None]] = {
        "stock": lambda: stock(source, outputs["stock"], options.device),
        "loop with fastgen": lambda: user_loop(source, outputs["loop with fastgen"], options.device),
        "fastgen": lambda: run_command(source, outputs["fastgen"]),
    }
    turns = [{way: seconds[way] for way in ways} for seconds, _ in in_turns(ways, options.repeats, options, {})]
    same = sum(len(set(texts)) == 1 for texts in zip(*map(read_lines, outputs.values()), strict=True))
    return {**statistics_of(turns), "same": same, "equal": same == lines}


def make_fairseq_data(folder: Path, lines: int) -> list[str]:
    """Makes data and a model in `folder`, which takes half a minute; returns the arguments of fairseq-generate."""
    from sacremoses import MosesTokenizer

    draw = random.Random(0)
    letters = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    words = ["".join(draw.choices(letters, k=draw.randint(1, 4))) for _ in range(1500)]
    moses = {language: MosesTokenizer(language) for language in ("de", "en")}
    for split, number in (("train", TRAINING_LINES), ("valid", 100), ("test", lines)):
        files = {language: (folder / f"{split}.{language}").open("w", encoding="utf-8") for language in moses}
        for _ in range(number):
            sentence = draw.choices(words, k=draw.randint(3, 12))
            sentence[0] = sentence[0].capitalize()
            sentence[-1] += draw.choice(["'s.", ".", "!", " (yes)?"])
            for language, file in files.items():
                file.write(" ".join(map(_pieces, moses[language].tokenize(" ".join(sentence)))) + "\n")
        for file in files.values():
            file.close()
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    languages = ["-s", "de", "-t", "en"]
    preprocess = ["preprocess", *languages, "--joined-dictionary", *prefixes, "--destdir", str(folder / "bin")]
    sizes = "--encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 "
    sizes += "--decoder-layers 2 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4"
    training = "--arch transformer --share-all-embeddings --cpu --optimizer adam --lr 0.003 --max-tokens 2000 "
    training += f"--max-update {UPDATES} --dropout 0 --no-epoch-checkpoints --no-progress-bar"
    save = ["--save-dir", str(folder / "model")]
    train = ["train", str(folder / "bin"), *languages, *training.split(), *sizes.split(), *save]
    run_process(STOCK_FAIRSEQ, json.dumps([preprocess, train]))
    model = str(folder / "model" / "checkpoint_last.pt")
    flags = "--batch-size 64 --beam 4 --min-len 8 --max-len-b 15 --remove-bpe --tokenizer moses"
    return [str(folder / "bin"), "--path", model, *languages, *flags.split()]


def _pieces(word: str) -> str:
    return f"{word[:4]}@@ {word[4:]}" if len(word) > 5 and word.isalpha() else word


def words_of(text: str) -> list[list[str]]:
    """Returns the fields of lines but scores, whose last digits may differ."""
    return [line.split("\t")[::2] for line in text.splitlines() if line[:2] != "P-"]


def measure_fairseq(folder: Path, lines: int, options: Options) -> dict[str, Any]:
    arguments = make_fairseq_data(folder, lines) + ["--cpu"] * (options.device == "cpu")
    ways = {
        "stock": lambda: run_process(CPU_TIME + STOCK_FAIRSEQ, json.dumps([["generate", *arguments]])),
        "fastgen": lambda: run_process(CPU_TIME + FAIRSEQ_COMMAND, *arguments),
    }
    turns, equal = [], True
    for seconds, processes in in_turns(ways, options.repeats, replace(options, cpu_time=False), {}):
        cpu = {way: float(processes[way].stderr.splitlines()[-1]) for way in ways}
        turns.append({way: (cpu if options.cpu_time else seconds)[way] for way in ways})
        equal = equal and words_of(processes["stock"].stdout) == words_of(processes["fastgen"].stdout)
    return {**statistics_of(turns), "equal": equal}
