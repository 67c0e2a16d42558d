"""Draws what the benchmarks have measured, and writes it as tables: docs/benchmarks.md, speed.svg and seamless-*.png.

    python benchmarks/show_results.py

Reads benchmarks/results/generate-*.json, fairseq-*.json, mqa-*.json, constrained-*.json, rollouts-*.json,
prefix-*.json, lm_eval-*.json, peers-*.json and seamless-*.json, one of each for each CPU, as `bench_generate.py --json`
and the others of these names write them (peers-*.json: `peers.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import show_peers
import show_seamless

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

GENERATE = {
    "bart-beam4": "BART-base, 4 × 512 tokens, beam 4, n-gram 3",
    "bart-beam4-one-row": "BART-base, 1 × 64 tokens, beam 4",
    "bart-greedy-short": "BART-base, 1 × 16 tokens, greedy",
    "t5-beam4": "T5-base, 8 × 128 tokens, beam 4",
    "whisper-beam5": "Whisper-tiny, 8 × 30 s, beam 5, 48 new tokens",
    "gpt2-beam4": "GPT-2-small, 4 × 512 tokens, beam 4",
    "gpt2-sample16": "GPT-2-small, 4 × 512 tokens, 16 samples each",
    "gpt2-greedy-one-row": "GPT-2-small, 1 × 16 tokens, greedy, 48 new tokens",
    "gpt2-greedy-short": "GPT-2-small, 1 × 16 tokens, greedy",
    "llama-beam4": "Llama-like, 4 × 512 tokens, beam 4",
    "llama-sample16": "Llama-like, 4 × 512 tokens, 16 samples each",
    "lengths-differ": "the demo model, 32 lines with outputs of 9 to 75 tokens, beam 4",
}
FAIRSEQ = {
    "bart-beam4": "BART-base, 4 × 512 tokens, beam 4",
    "bart-beam4-ngram3": "BART-base, 4 × 512 tokens, beam 4, n-gram 3",
    "bart-batch1": "BART-base, 1 × 512 tokens, beam 4",
    "bart-greedy-short": "BART-base, 1 × 16 tokens, one beam",
    "wmt-beam5": "Transformer-base (WMT), 16 × 32 tokens, beam 5",
    "prophetnet-beam5": "ProphetNet-large, 2 × 256 tokens, beam 5",
    "lm-beam4": "GPT-2-small as fairseq's language model, 4 × 512 tokens, beam 4",
}

# Those of peers.py; others are in GENERATE.
PEER_CASES = {
    "recordings": "Whisper-tiny, 2 recordings of 90 s, beam 5, up to 48 new tokens for each 30 s",
    "prefix-greedy": "Llama-like, 8 × 1,056 tokens of which 1,024 are common, greedy, 16 new tokens",
    "prefix-sample4": "Llama-like, 8 × 1,056 tokens of which 1,024 are common, 4 samples each, 16 new tokens",
}
LEAST_MB = 50  # of memory; less is chance

INTRODUCTION = """# What was measured

Made by `python benchmarks/show_results.py` from `benchmarks/results/`. Models have real sizes and random weights, in
fp32; 32 new tokens where nothing else is said. Stock and fastgen run in turns in one process on 2 cores, seconds are
medians, and their tokens are equal. The first call is a warm-up: GEMM autotuning and graph capture happen there.

| column | meaning |
|---|---|
| *faster* | median over the turns of stock's seconds by fastgen's |
| *limit* | fastgen's seconds by those of the arithmetic or of reading the weights, whichever takes longer |
| *memory* | what one call adds to the process at its peak; memory that calls before have freed is used again |
"""
GENERATE_HEAD = """| workload | stock | fastgen | faster | CTranslate2 | limit | memory, stock → fastgen |
|---|---|---|---|---|---|---|"""
SEAMLESS = """Speech to speech, one input of 10 s, beam 5. Each column switches on one more part of fastgen. Static KV
caches belong to the captured steps and cannot be switched on alone.
"""
MQA = """Microseconds per token, without fastgen → with it; {batch} inputs of 128 tokens, 128 new tokens,
`benchmarks/bench_mqa.py`. Multi-query and grouped models have wider feed-forward layers, so that all have 210 million
parameters (the language models 159). Last column: multi-head attention without fastgen by this model with fastgen.
"""
ROLLOUTS = """Prompts that the caller repeats ([rollouts.md](rollouts.md)); 32 new tokens; completions are equal.
"""
ROLLOUT_CASES = {
    "g8": "rollouts: Llama-like, training mode, 4 prompts of 512 tokens, 8 rows each",
    "g16": "rollouts: Llama-like, training mode, 4 prompts of 512 tokens, 16 rows each",
    "repeats16": "lm-evaluation-harness: 6 questions of about 400 tokens, 16 samples each",
}
PREFIX = """Common prefixes are computed and stored once ([how-it-works.md](how-it-works.md)); tokens, answers and
metrics are equal. `bench_prefix.py`; lm-evaluation-harness: `bench_lm_eval.py`.
"""
PREFIX_CASES = {
    "greedy16": "Llama-like, 16 inputs, prefix 1,024, rest 32, greedy, 16 new tokens",
    "beams8": "Llama-like, 8 inputs, prefix 1,024, rest 32, beam 4, 16 new tokens",
    "samples8": "Llama-like, 8 inputs, prefix 1,024, rest 32, 4 samples each, 16 new tokens",
    "classify16": "GPT-2-small, 16 inputs, prefix 768, rest 32, one new token",
    "short2": "Llama-like, 2 inputs, prefix 16",
    "ragged16": "GPT-2-small, 4 × 512 tokens without a prefix, 16 samples of 1 to 64 tokens each",
    "shots5": "lm-evaluation-harness, 5 examples of about 600 tokens together, 48 questions",
    "choice4": "lm-evaluation-harness, 64 questions of about 300 tokens, 4 options",
    "choice4-shots5": "lm-evaluation-harness, 64 questions with 4 options behind 5 examples",
}
CONSTRAINED = {
    "ids-beam20": "Qwen-like, semantic ids of 4 tokens, 20 beams",
    "ids-beam50": "Qwen-like, semantic ids of 4 tokens, 50 beams",
    "ids-beam200": "Qwen-like, semantic ids of 4 tokens, 200 beams",
    "names-beam10": "T5-base, names of 3 to 12 tokens, 10 beams",
    "names-beam50": "T5-base, names of 3 to 12 tokens, 50 beams",
}
CONSTRAINED_TEXT = """Each output is one of 100,000 sequences ([constrained.md](constrained.md)). transformers uses a
trie of dictionaries, fastgen a `PrefixTrie`. One input (Qwen-like: 300 tokens, T5: 256); all beams are returned.
{seconds}, medians of {repeats} turns, `bench_constrained.py`. *equal*: rows with stock's tokens. Scores agree to 1e-4;
beams whose scores are closer than that may swap.
"""
CONSTRAINED_HEAD = (
    "| workload | stock | fastgen | faster | memory, stock → fastgen | equal |\n|---|---|---|---|---|---|"
)
FAIRSEQ_HEAD = "| workload | stock | fastgen | faster |\n|---|---|---|---|"


def read(kind: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]


def cpu_name(measured: dict[str, Any]) -> str:
    found = measured["cpu"]
    return f"{found['name']} (family {found.get('family', '?')}, model {found.get('model', '?')})"


def generate_row(result: dict[str, Any]) -> str:
    seconds, added = result["seconds"], result["added_mb"]
    memory = f"{added['stock']:.0f} → {added['fastgen']:.0f} MB" if added["stock"] >= LEAST_MB else "–"
    peer = f"{seconds['ctranslate2']:.1f} s" if "ctranslate2" in seconds else "–"
    return (
        f"| {GENERATE[result['case']]} | {seconds['stock']:.1f} s | {seconds['fastgen']:.1f} s "
        f"| **{result['ratios']['stock']:.1f}×** | {peer} | {result['times_limit']:.1f} "
        f"| {memory} |"
    )


def fairseq_row(result: dict[str, Any]) -> str:
    stock, fast = result["stock_seconds"], result["fastgen_seconds"]
    return f"| {FAIRSEQ[result['case']]} | {stock:.1f} s | {fast:.1f} s | **{result['ratio']:.1f}×** |"


def tables() -> str:
    parts = [INTRODUCTION]
    for title, kind, head, row in (
        ("transformers", "generate", GENERATE_HEAD, generate_row),
        ("fairseq", "fairseq", FAIRSEQ_HEAD, fairseq_row),
    ):
        for measured in read(kind):
            rows = [row(result) for result in measured["results"]]
            parts.append("\n".join([f"## {title}, {cpu_name(measured)}", "", head, *rows]) + "\n")
    parts += [show_peers.section(measured, cpu_name(measured), GENERATE | PEER_CASES) for measured in read("peers")]
    parts += [*map(mqa_section, read("mqa")), *map(constrained_section, read("constrained"))]
    parts += sections("Repeated prompts", ROLLOUTS, ROLLOUT_CASES, "rollouts")
    parts += sections("Prompts that begin alike", PREFIX, PREFIX_CASES, "prefix")
    return "\n".join([*parts, *map(seamless_section, seamless_results())])


def mqa_section(measured: dict[str, Any]) -> str:
    results = measured["results"]
    title = f"## Multi-query Transformers, {cpu_name(measured)}\n"
    return "\n".join([title, MQA.format(batch=results[0]["batch"]), mqa_table(results) + "\n"])


def mqa_table(results: list[dict[str, Any]]) -> str:
    """For Markdown: what bench_mqa.py measured of each kind of attention."""
    columns = list(results[0]["microseconds"]["stock"])
    lines = [f"| attention | {' | '.join(columns)} | beam 4, to multi-head |", "|---|" + "---|" * (len(columns) + 1)]
    for result in results:
        stock, fast = result["microseconds"]["stock"], result["microseconds"]["fastgen"]
        cells = " | ".join(f"{stock[name]:,.0f} → {fast[name]:,.0f}" for name in columns)
        lines.append(f"| {result['case']} | {cells} | **{result['ratio']:.2f}×** |")
    return "\n".join(lines)


def sections(title: str, text: str, cases: dict[str, str], kind: str) -> Iterator[str]:
    """For each CPU what a benchmark of this kind and bench_lm_eval.py measured of these cases."""
    evaluations = {cpu_name(one): one["results"] for one in read("lm_eval")}
    for measured in read(kind):
        cpu = cpu_name(measured)
        lines = [f"## {title}, {cpu}\n", text, "| workload | stock | fastgen | faster | memory, stock → fastgen |"]
        lines.append("|---|---|---|---|---|")
        for result in (one for one in measured["results"] + evaluations.get(cpu, []) if one["case"] in cases):
            seconds, added = result["seconds"], result.get("added_mb") or {"stock": 0}
            memory = f"{added['stock']:.0f} → {added['fastgen']:.0f} MB" if added["stock"] >= LEAST_MB else "–"
            lines.append(
                f"| {cases[result['case']]} | {seconds['stock']:.1f} s | {seconds['fastgen']:.1f} s "
                f"| **{result['ratio']:.1f}×** | {memory} |"
            )
        yield "\n".join(lines) + "\n"


def constrained_section(measured: dict[str, Any]) -> str:
    title = f"## Constrained beam search, {cpu_name(measured)}\n"
    clock = "CPU time on a busy machine" if measured["cpu_time"] else "Time"
    seconds = f"{clock}, {measured['threads']} thread{'s' * (measured['threads'] > 1)}"
    text = CONSTRAINED_TEXT.format(seconds=seconds, repeats=measured["repeats"])
    return "\n".join([title, text, constrained_table(measured["results"]) + "\n"])


def constrained_table(results: list[dict[str, Any]]) -> str:
    """For Markdown: what bench_constrained.py measured."""
    lines = [CONSTRAINED_HEAD]
    for result in results:
        seconds, added = result["seconds"], result["added_mb"]
        lines.append(
            f"| {CONSTRAINED[result['case']]} | {seconds['stock']:.1f} s | {seconds['fastgen']:.1f} s "
            f"| **{result['ratios']['stock']:.1f}×** | {added['stock']:.0f} → {added['fastgen']:.0f} MB "
            f"| {result['tokens']} |"
        )
    return "\n".join(lines)


def seamless_results() -> list[Path]:
    return sorted(RESULTS.glob("seamless-*.json"))


def seamless_section(path: Path) -> str:
    """The stages of Seamless M4T on one CPU, and their picture."""
    measured = json.loads(path.read_text(encoding="utf-8"))
    picture = f"![Seconds of the stages]({path.stem}.png)\n"
    tables = [f"{show_seamless.table(result)}\n" for result in measured["results"]]
    return "\n".join([f"## Seamless M4T, {cpu_name(measured)}\n", SEAMLESS, picture, *tables])


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fastgen", "svg.fonttype": "none"}  # the same file from the same figures
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw(path: Path) -> None:
    """How many times as fast, a bar for each workload and CPU."""
    measured = read("generate")
    names = [name for name in GENERATE if any(name == result["case"] for one in measured for result in one["results"])]
    figure, panel = pyplot().subplots(figsize=(9, 0.45 * len(names) + 1))
    height = 0.8 / len(measured)
    for place, one in enumerate(measured):
        found = {result["case"]: result["ratios"]["stock"] for result in one["results"]}
        shown = [(line, found[name]) for line, name in enumerate(names) if name in found]
        places = [line + (place - (len(measured) - 1) / 2) * height for line, _ in shown]
        bars = panel.barh(places, [ratio for _, ratio in shown], height, label=cpu_name(one))
        panel.bar_label(bars, fmt="%.1f×", padding=3)
    panel.set_yticks(range(len(names)), [GENERATE[name] for name in names])
    panel.invert_yaxis()
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xlabel("times as fast as transformers alone, the same tokens")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="lower right")
    save(figure, path)


def main() -> int:
    (ROOT / "docs" / "benchmarks.md").write_text(tables(), encoding="utf-8")
    draw(ROOT / "docs" / "speed.svg")
    for path in seamless_results():
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        show_seamless.draw(results, str(ROOT / "docs" / f"{path.stem}.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
