"""fastgen-generate-for-fairseq against fairseq-generate, alternately, and its pipeline against the model alone.

    python benchmarks/bench_fairseq_command.py [--repeats 3] [--lines 2000] [--floors FILE] [--json FILE]

command: wall time of both from start to end on short lines with Moses and BPE in batches of 64, and their ratio.
cpu: the same of the CPU time of the process that runs the model, which a busy machine changes little, without the
workers beside it. Set OMP_NUM_THREADS=1: threads that wait for each other take CPU time.
pipeline: where the model call is a sleep of the same length, the length of these sleeps by the wall time from the first
batch to the last written line.
--floors takes a file of the ratios to reach (floors.json); the status is 1 where one is missed, or where words differ.
The data are random words through Moses, a stand-in for BPE and fairseq-preprocess; the model is trained for some
updates, so that sentences end. Everything is made in a temporary folder, which takes half a minute.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import below, finish, parse_flags, parser_of
from machine import describe_cpu

CASES = ("command", "cpu", "pipeline")
COMPARED_WITH = {"command": "stock", "cpu": "stock", "pipeline": "sleep alone"}

# The CPU time of the process, without those it has started, in the last line of stderr.
CPU_TIME = "import atexit, sys, time; atexit.register(lambda: print(time.process_time(), file=sys.stderr))\n"

# fairseq's commands as they are under torch before 2.6.
STOCK = (
    "import argparse, importlib, sys, torch; torch.serialization.add_safe_globals([argparse.Namespace]); "
    "importlib.import_module('fairseq_cli.' + sys.argv.pop(1)).cli_main()"
)
FASTGEN = "import sys; from fastgen.cli.fairseq.command import generate; sys.exit(generate())"

# The first run records the model's hypotheses of each batch, and how long they took; the second sleeps as long.
SLEEPING = """
import json, os, sys, time
from contextlib import redirect_stdout
from fastgen.cli.fairseq.command import generate
from fastgen.cli.fairseq.pipeline import GenerateRun
inference_step, result_string = GenerateRun.inference_step, GenerateRun.result_string
answers, ends = [], []

def recorded(run, original, *args, **options):
    def timed(*args, **options):
        start = time.perf_counter()
        answer = original(*args, **options)
        answers.append((answer, time.perf_counter() - start))
        return answer
    return inference_step(run, timed, *args, **options)

def replayed(run, original, *args, **options):
    ends.append(time.perf_counter())
    def sleeping(*unused, **more):
        answer, seconds = left.pop()
        time.sleep(seconds)
        return answer
    return inference_step(run, sleeping, *args, **options)

def written(run):
    text = result_string(run)
    ends.append(time.perf_counter())
    return text

arguments = sys.argv[1:]
with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
    GenerateRun.inference_step = recorded
    generate(arguments)
left = answers[::-1]
GenerateRun.inference_step, GenerateRun.result_string = replayed, written
status = generate(arguments)
json.dump({"asleep": sum(seconds for _, seconds in answers), "seconds": ends[-1] - ends[0]}, sys.stderr)
sys.exit(status)
"""


def make(folder: Path, lines: int) -> list[str]:
    """Data and a model in `folder`; returns the arguments of fairseq-generate."""
    from sacremoses import MosesTokenizer

    draw = random.Random(0)
    letters = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    words = ["".join(draw.choices(letters, k=draw.randint(1, 4))) for _ in range(1500)]
    moses = {language: MosesTokenizer(language) for language in ("de", "en")}
    for split, number in (("train", 3000), ("valid", 100), ("test", lines)):
        files = {language: (folder / f"{split}.{language}").open("w", encoding="utf-8") for language in moses}
        for _ in range(number):
            chosen = draw.choices(words, k=draw.randint(3, 12))
            chosen[0] = chosen[0].capitalize()
            chosen[-1] += draw.choice(["'s.", ".", "!", " (yes)?"])
            for language, file in files.items():
                file.write(" ".join(map(_pieces, moses[language].tokenize(" ".join(chosen)))) + "\n")
        for file in files.values():
            file.close()
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    languages = ["-s", "de", "-t", "en"]
    run(STOCK, "preprocess", *languages, "--joined-dictionary", *prefixes, "--destdir", str(folder / "bin"))
    sizes = "--encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 "
    sizes += "--decoder-layers 2 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4"
    training = "--arch transformer --share-all-embeddings --cpu --optimizer adam --lr 0.003 --max-tokens 2000 "
    training += "--max-update 40 --dropout 0 --no-epoch-checkpoints --no-progress-bar"
    save = ["--save-dir", str(folder / "model")]
    run(STOCK, "train", str(folder / "bin"), *languages, *training.split(), *sizes.split(), *save)
    model = str(folder / "model" / "checkpoint_last.pt")
    flags = "--batch-size 64 --beam 4 --min-len 8 --max-len-b 15 --remove-bpe --tokenizer moses"
    return [str(folder / "bin"), "--path", model, *languages, *flags.split()]


def _pieces(word: str) -> str:
    return f"{word[:4]}@@ {word[4:]}" if len(word) > 5 and word.isalpha() else word


def run(code: str, *args: str) -> subprocess.CompletedProcess:
    """`python -c code args...`, which must end well."""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-2000:]}")
    return done


def same_words(stock: str, fastgen: str) -> bool:
    """Whether the lines are the same where they are not scores, whose last digits the faster model may change."""
    texts = [[line.split("\t")[::2] for line in text.splitlines() if line[:2] != "P-"] for text in (stock, fastgen)]
    return texts[0] == texts[1]


def turn_of(arguments: list[str], first: int) -> dict[str, Any]:
    """Seconds and CPU time of both commands, what they wrote, and seconds of the pipeline and of its sleeps."""
    turn: dict[str, Any] = {}
    for kind in ("stock", "fastgen")[:: -1 if first else 1]:
        code = [CPU_TIME + STOCK, "generate"] if kind == "stock" else [CPU_TIME + FASTGEN]
        begun = time.perf_counter()
        done = run(*code, *arguments)
        turn[kind] = {"seconds": time.perf_counter() - begun, "cpu": float(done.stderr.splitlines()[-1])}
        turn[kind]["text"] = done.stdout
    turn["pipeline"] = json.loads(run(SLEEPING, *arguments).stderr.rpartition("\n")[2])
    return turn


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, repeats="pairs of runs")
    parser.add_argument("--lines", type=int, default=2000, help="lines to translate (default 2000)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parse_flags(parser, argv, "fairseq_command", (), CASES)
    print(describe_cpu())
    turns, equal = [], True
    with tempfile.TemporaryDirectory() as folder:
        arguments = make(Path(folder), args.lines) + ["--cpu"] * (args.device == "cpu")
        for repeat in range(args.repeats):
            turn = turn_of(arguments, repeat % 2)
            texts = [turn[kind].pop("text") for kind in ("stock", "fastgen")]
            equal = equal and same_words(*texts)
            turns.append(turn)
            print(turn, flush=True)
    ratios = {
        "command": [turn["stock"]["seconds"] / turn["fastgen"]["seconds"] for turn in turns],
        "cpu": [turn["stock"]["cpu"] / turn["fastgen"]["cpu"] for turn in turns],
        "pipeline": [turn["pipeline"]["asleep"] / turn["pipeline"]["seconds"] for turn in turns],
    }
    results = [{"case": case, "ratio": statistics.median(found)} for case, found in ratios.items()]
    missed = [] if equal else ["words differ"]
    for result in results:
        print(f"{result['case']}: {result['ratio']:.2f} times as fast as {COMPARED_WITH[result['case']]}")
        missed += below(result["case"], {COMPARED_WITH[result["case"]]: result["ratio"]}, args.floors)
    return finish(args, results, missed, lines=args.lines, turns=turns, equal=equal)


if __name__ == "__main__":
    raise SystemExit(main())
