"""fastgen-generate-for-transformers with two workers of one thread against one process of two threads, in turns.

    python benchmarks/bench_workers.py [demo] [gpt2] [--lines 5000] [--repeats 3] [--floors FILE] [--json FILE]

demo: the demo model, beam 4, batches of 32. gpt2: 12 layers of width 768 with random weights, prompts of 8 to 32 words,
    beam 4, 16 new tokens, batches of 8, a twentieth of the lines.
seconds: of the whole command, start included; generating: from the first batch to the last record, as the summary says.
    start: what is left. MB: the largest sum of the memory that the processes do not share, looked at 4 times a second.
--floors takes a file of the ratios of the seconds to reach (floors.json); the status is 1 where one is missed, or where
the outputs differ in a text.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from bench_pipeline import write_input
from harness import below, finish, parse_flags, parser_of
from machine import describe_cpu

CASES = ("demo", "gpt2")
WAYS = {"process": ({"OMP_NUM_THREADS": "2"}, ()), "workers": ({"OMP_NUM_THREADS": "1"}, ("--workers", "2"))}
COMMAND = (sys.executable, "-m", "fastgen.cli.transformers.command")


def save_gpt2(folder: Path) -> Path:
    """A model of GPT-2's size, with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["</s>", "<unk>", *(f"w{number}" for number in range(5000))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


def job(case: str, folder: Path, lines: int) -> list[str]:
    """MODEL, INPUT and flags of a case."""
    if case == "demo":
        return ["demo", str(write_input(folder / "demo.txt", lines)), "--bs", "32", "--beam", "4"]
    draw, source = random.Random(0), folder / "gpt2.txt"
    prompts = (" ".join(f"w{draw.randrange(5000)}" for _ in range(draw.randint(8, 32))) for _ in range(lines // 20))
    source.write_text("".join(f"{prompt}\n" for prompt in prompts))
    flags = ["--causal_lm", "--bs", "8", "--beam", "4", "--max_new_tokens", "16", "--min_new_tokens", "16"]
    return [str(save_gpt2(folder / "gpt2")), str(source), *flags]


def measure(way: str, arguments: list[str], output: Path) -> dict[str, float]:
    """Seconds and memory of a run."""
    environment, flags = WAYS[way]
    model, source, *others = arguments
    begun, most = time.perf_counter(), 0
    call = [*COMMAND, model, source, str(output), *others, *flags, "--overwrite"]
    with subprocess.Popen(call, env=os.environ | environment, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            most = max(most, _memory(process.pid))
            time.sleep(0.25)
        said = process.stderr.read()
    seconds = time.perf_counter() - begun
    if process.returncode:
        raise SystemExit(said)
    generating = float(re.findall(r"lines in ([\d.]+) s", said)[-1])
    return {"seconds": seconds, "generating": generating, "start": seconds - generating, "MB": most / 2**20}


def _memory(pid: int) -> int:
    found = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            found += process.memory_full_info().uss
    except psutil.Error:  # one that ended in the meantime
        return 0
    return found


def compare(case: str, folder: Path, lines: int, repeats: int) -> dict[str, Any]:
    """Medians and turns of both ways, the median ratios of neighbours, and whether the outputs are equal."""
    arguments, turns = job(case, folder, lines), []
    for repeat in range(repeats):
        turn = {}
        for way in list(WAYS)[:: -1 if repeat % 2 else 1]:
            turn[way] = measure(way, arguments, folder / f"{case}-{way}.txt")
            print(case, way, {key: round(value, 2) for key, value in turn[way].items()}, flush=True)
        turns.append(turn)
    texts = [(folder / f"{case}-{way}.txt").read_text() for way in WAYS]
    middle = {way: {key: statistics.median(turn[way][key] for turn in turns) for key in turns[0][way]} for way in WAYS}
    ratios = {
        key: statistics.median(turn["process"][key] / turn["workers"][key] for turn in turns)
        for key in ("seconds", "generating")
    }
    return {"case": case, "medians": middle, "turns": turns, "ratios": ratios, "equal": texts[0] == texts[1]}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--lines", type=int, default=5000, help="of the demo model (default 5000)")
    args = parse_flags(parser, argv, "workers", CASES)
    print(describe_cpu())
    results, missed = [], []
    with tempfile.TemporaryDirectory() as name:
        for case in args.cases:
            result = compare(case, Path(name), args.lines, args.repeats)
            results.append(result)
            print(f"{case}: {result['ratios']['seconds']:.2f} times as fast as one process", flush=True)
            missed += below(case, {"one process": result["ratios"]["seconds"]}, args.floors)
            missed += [] if result["equal"] else [f"{case}: texts differ"]
    return finish(args, results, missed)


if __name__ == "__main__":
    raise SystemExit(main())
