"""The tables of docs/benchmarks.md and of the papers' pages, and docs/speed.svg, from all files of benchmarks/results.

KIND-MACHINE.json holds what `bench.py run --json` has written of cases of a kind, peers-MACHINE.json the same with
`--against`, papers-MACHINE/PART.json what `bench.py papers` has. A file or part that is missing has no table. The texts
around the tables are the pages' own; only what stands between the markers is replaced.
"""

from __future__ import annotations

import importlib
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DOCS, RESULTS = Path(__file__).parent.parent / "docs", Path(__file__).parent / "results"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
LEAST_MB = 50  # of memory; less is chance
QUIET = 0.05  # of the CPUs' time
OTHER_NUMBERS = ", other numbers"  # how ways end whose dtype changes what is generated

Result = Mapping[str, Any]
Parts = dict[str, dict[str, Any]]

SEAMLESS_NAMES, LARGE = {"v2": "Seamless M4T v2", "v1": "Seamless M4T v1"}, 24  # layers
# As the papers print them. Table 1: shape, samples per second without and with FastSeq, how many times as fast.
TABLE_1 = {
    "bart": ("BART", "12L-12L-1024", "2.4 → 18.4", "7.7×"),
    "distilbart": ("DistilBART", "12L-6L-1024", "3.4 → 18.5", "5.4×"),
    "prophetnet": ("ProphetNet", "12L-12L-1024", "2.8 → 10.7", "3.8×"),
    "t5": ("T5", "12L-12L-768", "8.7 → 31.3", "4.3× (by its figures 3.6×)"),
    "wmt": ("Transformer", "6L-6L-1024", "96.0 → 417.0", "4.3×"),
    "gpt2": ("GPT-2", "0L-12L-768", "3.0 → 16.7", "5.5×"),
    "unilm": ("UniLM", "12L-0L-768", "1.7 → 16.4", "9.6×"),
}
COLORS = ("#3f51b5", "#ef8a17", "#2a9d6f")  # of machines
LOOPS = {"stock": "the loop", "loop with fastgen": "the loop with fastgen", "fastgen": "the command"}
MULTI_QUERY = {  # microseconds: greedy encoder and decoder, beam-4 encoder and decoder
    "multi-head": (1.7, 46, 2.0, 203),
    "multi-query": (1.5, 3.8, 1.6, 32),
    "multi-head local": (1.7, 23, 1.9, 47),
    "multi-query local": (1.5, 3.3, 1.6, 16),
}


def read(kind: str) -> list[dict[str, Any]]:
    """Returns the files of a kind, one for each machine."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]


def workloads(kind: str) -> dict[str, str]:
    """Returns the cases of a kind in words, in their order."""
    module = {
        "fairseq": "fairseq_cases",
        "lm_eval": "lm_eval_cases",
        "trainer": "trainer_cases",
        "drafts": "drafts",
    }.get(kind, "calls")
    return {name: case.workload for name, case in importlib.import_module(module).CASES[kind].items()}


def cpu_name(measured: Mapping[str, Any]) -> str:
    facts = measured["cpu"]
    return f"{facts['name']} (family {facts.get('family', '?')}, model {facts.get('model', '?')})"


def dtype_name(measured: Mapping[str, Any]) -> str:
    """Returns the dtype of the results for a title, if it is not float32."""
    dtype = measured["results"][0].get("dtype", "float32")
    return "" if dtype == "float32" else f", {dtype}"


def stock_ratio(result: Result) -> float:
    """Returns the ratio to stock; older files have one ratio only."""
    return result["ratio"] if "ratio" in result else result["ratios"]["stock"]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False) + "\n"


def memory(result: Result) -> str:
    added = result.get("added_mb") or {"stock": 0}
    return f"{added['stock']:.0f} → {added['fastgen']:.0f} MB" if added["stock"] >= LEAST_MB else "–"


def speed_cells(result: Result) -> list[str]:
    seconds = result.get("seconds") or {way: result[f"{way}_seconds"] for way in ("stock", "fastgen")}
    return [f"{seconds['stock']:.1f} s", f"{seconds['fastgen']:.1f} s", f"**{stock_ratio(result):.1f}×**"]


def question(title: str, kind: str, text: str) -> Iterator[str]:
    """Yields the section of a kind: its text, and a heading and tables for each machine; nothing without results."""
    files = read(kind)
    tables = ANSWERS.get(kind) or partial(workload_table, kind)
    if files:
        yield f"## {title}\n\n{paragraph(text)}"
    for measured in files:
        yield f"### {cpu_name(measured)}{dtype_name(measured)}\n\n{tables(measured)}"


def workload_table(kind: str, measured: Mapping[str, Any]) -> str:
    """Returns the table of a machine for the cases of a kind, with the columns that any result fills."""
    words = workloads(kind)
    head = ("workload", "stock", "fastgen", "faster", "CTranslate2", "memory, stock → fastgen", "equal")
    rows = []
    for result in measured["results"]:
        peers = result.get("seconds", {})
        peer = peers.get("ctranslate2", peers.get("CTranslate2 float32"))
        cells = ["–" if peer is None else f"{peer:.1f} s", memory(result)]
        tokens = result.get("tokens", "–" if result.get("equal", True) else "no")
        rows.append([words[result["case"]], *speed_cells(result), *cells, tokens])
    columns = [column for column in range(len(head)) if any(row[column] != "–" for row in rows)]
    lines = [[row[column] for column in columns] for row in (head, *rows)]
    return table(lines[0], lines[1:])


def drafts_table(measured: Mapping[str, Any]) -> str:
    words, ways = workloads("drafts"), ("stock", "prompt lookup", "fastgen without drafts", "fastgen")
    rows = []
    for result in measured["results"]:
        seconds, alone = result["seconds"], result["ratios"]["fastgen without drafts"]
        cells = [f"{seconds[way]:.2f} s" if way in seconds else "–" for way in ways]
        rows.append([words[result["case"]], *cells, f"**{alone:.2f}×**", f"{result['ratios']['stock']:.2f}×"])
    return table(("workload", *ways, "over fastgen without drafts", "over stock"), rows)


def reach_table(measured: Mapping[str, Any]) -> str:
    cases = {result["case"]: result for result in measured["results"]}
    rows = []
    for result in (cases[name] for name in importlib.import_module("reach").CASES["reach"] if name in cases):
        seconds, reason = result["seconds"], result["reason"]
        cells = [f"{seconds[way]:.2f} s" for way in ("stock", "fastgen")]
        why = f"`{reason['code']}`, {reason['part']}" if reason else "–"
        same = "equal" if result["equal"] else "DIFFERS"
        rows.append([result["workload"], *cells, f"**{stock_ratio(result):.2f}×**", same, why])
    return table(("call", "stock", "fastgen", "faster", "output", "why not more"), rows)


def mqa_table(measured: Mapping[str, Any]) -> str:
    results = measured["results"]
    rows = [[result["case"], *stage_cells(result), to_multi_head(result, results)] for result in results]
    head = ("attention", *results[0]["microseconds"]["stock"], "beam 4, faster than multi-head in stock")
    return f"{results[0]['batch']} inputs of 128 tokens, 128 new tokens.\n\n{table(head, rows)}"


def stage_cells(result: Result) -> list[str]:
    stock, fast = result["microseconds"]["stock"], result["microseconds"]["fastgen"]
    return [f"{stock[name]:,.0f} → {fast[name]:,.0f}" for name in stock]


def to_multi_head(result: Result, results: Iterable[Result]) -> str:
    """Returns stock's microseconds of multi-head attention, beam 4, by fastgen's of this result."""
    name = "lm multi-head" if result["case"].startswith("lm ") else "multi-head"
    stock = [other["microseconds"]["stock"]["beam 4"] for other in results if other["case"] == name]
    return f"**{stock[0] / result['microseconds']['fastgen']['beam 4']:.2f}×**" if stock else "–"


def seamless_table(result: Result) -> str:
    """Returns the seconds of each stage; older files have ways between stock and fastgen."""
    seconds, ratios = result["seconds"], result["ratios"]
    stock = seconds["stock"]
    size = "large" if result["layers"] >= LARGE else f"as large, but {result['layers']} layers at most"
    rows = []
    for stage in [name for name in ratios if name != "end to end"] + ["end to end"]:
        cells = [f"{way[stage]:.2f} s" for way in seconds.values()]
        rows.append([stage, *cells, f"**{ratios[stage]:.2f}×**", f"{stock[stage] / stock['end to end']:.0%}"])
    same = "Tokens, units and waveforms are equal." if result["equal"] else "Outputs DIFFER."
    text = paragraph(
        f"{SEAMLESS_NAMES[result['case']]}, {size}, {result['weights'] / 1e9:.2f} billion weights in "
        f"{result['dtype']}, {result['tokens']} tokens, {result['units']} units. {same}"
    )
    return f"{text}\n{table(('stage', *seconds, 'faster', 'share of stock'), rows)}"


def seamless_tables(measured: Mapping[str, Any]) -> str:
    return "\n".join(map(seamless_table, measured["results"]))


def is_peer(way: str) -> bool:
    return way != "stock" and not way.startswith("fastgen")


def peers_tables(measured: Mapping[str, Any]) -> str:
    """Returns the seconds of each way, and why some have no figure."""
    words = workloads("generate")
    results = sorted(measured["results"], key=lambda result: [*words].index(result["case"]))
    versions, reasons = dict(measured.get("peer_versions", {})), {}
    for result in results:
        versions |= result.get("peer_versions", {})
        for reason in result["reasons"].items():
            reasons.setdefault(reason, {})[words[result["case"]].split(",")[0]] = None
    turns = sorted(len(result["turns"]["fastgen"]) for result in results)
    numbers = " to ".join(map(str, sorted({turns[0], turns[-1]})))
    text = paragraph(
        f"All engines of a workload were measured in one run, with 2 threads; times are medians of {numbers} turns. "
        f"Versions: {', '.join(f'{name} {number}' for name, number in sorted(versions.items()))}."
    )
    ways = dict.fromkeys(way for result in results for way in result["seconds"])
    columns = sorted(ways, key=lambda way: (way != "stock", is_peer(way)))
    same = [way for way in columns if not way.endswith(OTHER_NUMBERS)]
    others = [way for way in columns if way.endswith(OTHER_NUMBERS)]
    missing: dict[tuple[str, str], list[str]] = {}
    for (peer, reason), cases in reasons.items():
        missing.setdefault((", ".join(cases), reason), []).append(peer.removesuffix(OTHER_NUMBERS))
    rows = [[", ".join(peers), cases, reason] for (cases, reason), peers in missing.items()]
    return "\n".join(
        [
            text,
            "In float32:\n",
            peer_table(results, words, same),
            "In dtypes that change what is generated:\n",
            peer_table(results, words, others),
            table(("peer without a figure", "workloads", "reason"), rows),
        ]
    )


def peer_table(results: Iterable[Result], words: Mapping[str, str], ways: Sequence[str]) -> str:
    names = [way.removesuffix(OTHER_NUMBERS).removesuffix(" float32") for way in ways]
    rows = [[words[result["case"]], *(peer_cell(result, way) for way in ways)] for result in results]
    return table(("workload", *names), [row for row in rows if set(row[1:]) != {"–"}])


def peer_cell(result: Result, way: str) -> str:
    if way not in result["seconds"]:
        return "–"
    seconds = f"{result['seconds'][way]:.2f} s"
    if is_peer(way) and result["ratios"][way] < 1:
        seconds = f"**{seconds}**"
    notes = [result["rows_equal"][way]] if way in result["rows_equal"] else []
    counts = result.get("new_tokens", {})
    if counts.get(way) != counts.get("stock"):
        notes.append(f"{counts[way]} tokens instead of {counts['stock']}")
    return f"{seconds} ({', '.join(notes)})" if notes else seconds


# The sections of docs/benchmarks.md: title, kind of results, text.
QUESTIONS = (
    (
        "Models that people run",
        "models",
        "Models at the depth and width of their published weights; 32 new tokens unless another number is named. "
        "transformers runs with its default settings: on a CPU it does not compile a model for a static cache. On one "
        "machine, a static cache took 1–7 % less time than the default cache with a Llama-like model and 4 beams. "
        "*memory*: what a call adds to the memory of the model. *equal*: in bfloat16 results may differ by rounding, "
        "and those of models with random weights do.",
    ),
    (
        "Calls of `generate`",
        "generate",
        "Beam search, sampling and greedy decoding in transformers. *CTranslate2*: the same call in that engine, in "
        "float32.",
    ),
    (
        "Find your call",
        "reach",
        "Calls as programs make them: one prompt of 256 tokens (a chat: 512), 32 new tokens, a Llama-like model of 6 "
        "layers × 512 unless another is named; CPU time of one thread, without drafts. *output*: tokens, and scores to "
        "1e-4 where they are returned. *why not more*: the first [reason](reasons.md), and the part of the call that "
        "it affects; decisions (to do it would not save time, or a switch forbids it) are left out.",
    ),
    (
        "Common prefixes",
        "prefix",
        "Prompts that share their first tokens ([rollouts.md](rollouts.md#calls-with-a-common-prefix)); tokens are "
        "equal.",
    ),
    (
        "Repeated prompts",
        "rollouts",
        "Prompts that the caller repeats ([rollouts.md](rollouts.md)); 32 new tokens; completions are equal.",
    ),
    (
        "Training steps",
        "trainer",
        "Log-probabilities of completions ([rollouts.md](rollouts.md#a-training-step)); results and gradients agree.",
    ),
    (
        "lm-evaluation-harness",
        "lm_eval",
        "Tasks with shared examples, options or samples ([rollouts.md](rollouts.md#lm-evaluation-harness)); answers "
        "are equal.",
    ),
    (
        "Drafts",
        "drafts",
        "Outputs that copy parts of their input ([how-it-works.md](how-it-works.md#drafts)). A logits processor forces "
        "the text of GPT-2 and Llama: runs of 4 to 40 tokens of the prompt, and other tokens. Tokens are equal. "
        "*prompt lookup* is transformers' own. Last columns: fastgen's speedup over fastgen without drafts, and over "
        "stock.",
    ),
    (
        "Constrained beam search",
        "constrained",
        "Each output is one of 100,000 sequences ([constrained.md](constrained.md)). transformers uses a trie of "
        "dictionaries, fastgen a `PrefixTrie`. One input (Qwen-like: 300 tokens, T5: 256); all beams are returned. CPU "
        "time, one thread. *equal*: rows with stock's tokens. Scores agree to 1e-4; beams whose scores are closer than "
        "that may swap.",
    ),
    ("fairseq", "fairseq", "Calls of fairseq's generator ([fairseq.md](fairseq.md)); tokens are equal."),
    (
        "Multi-query Transformers",
        "mqa",
        "Microseconds per token, without fastgen → with it ([models.md](models.md#multi-query-transformer)). Last "
        "column: how much faster the model is with fastgen than multi-head attention without it.",
    ),
    (
        "Seamless M4T",
        "seamless",
        "Speech to speech, one input of 10 s, beam 5 ([speech.md](speech.md#seamless-m4t)).",
    ),
    (
        "Other engines",
        "peers",
        "Other engines, called *peers*, run with the same weights, lengths and threads, and take turns with stock "
        "and fastgen in the same measurement. In brackets: rows with stock's tokens, if nothing is sampled. **Bold**: "
        "faster than fastgen in float32. [Compared with](compared-with.md) says when to use them instead.",
    ),
)
# Tables of kinds whose results are not those of a workload.
ANSWERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "reach": reach_table,
    "drafts": drafts_table,
    "mqa": mqa_table,
    "seamless": seamless_tables,
    "peers": peers_tables,
}


def benchmark_tables() -> str:
    return "\n".join(text for texts in QUESTIONS for text in question(*texts))


def results_of(parts: Parts, *names: str) -> list[dict[str, Any]]:
    return [result for name in names if name in parts for result in parts[name]["results"]]


def models(parts: Parts) -> str:
    rows = []
    for name, paper in TABLE_1.items():
        for result in results_of(parts, f"table1-{name}"):
            # Older files have a best batch for each way.
            batches = result.get("batch") or dict.fromkeys(("stock", "fastgen"), result["inputs"])
            rates = result.get("samples_per_second") or {
                way: result["inputs"] / seconds for way, seconds in result["seconds"].items()
            }
            ours = [f"{rates[way]:.2f} ({batches[way]})" for way in ("stock", "fastgen")]
            rows.append([*paper, *ours, f"**{stock_ratio(result):.1f}×**", "equal" if result["equal"] else "DIFFER"])
    head = ("model", "shape", "paper, samples/s", "faster", "stock, samples/s (batch)", "fastgen", "faster", "tokens")
    text = paragraph(
        "ProphetNet and Transformer run in fairseq, the others in transformers; beam 4; n-gram 3 in the summaries of "
        "transformers. If the batches of stock and fastgen differ, each is the one that suits it best."
    )
    return f"### FastSeq, Table 1: seven models\n\n{text}\n{table(head, rows)}" if rows else ""


def pipeline(parts: Parts) -> str:
    rows = [
        [result["lines"], *(f"{result['seconds'][way]:.1f} s" for way in LOOPS), f"**{stock_ratio(result):.1f}×**"]
        for result in results_of(parts, "table2-pipeline")
    ]
    head = ("lines of 4 to 122 tokens, the demo model", *LOOPS.values(), "faster")
    return f"### FastSeq, Table 2: the asynchronous pipeline\n\n{table(head, rows)}" if rows else ""


def ngrams(parts: Parts) -> str:
    cells = results_of(parts, "table3")
    ways = [way for way in (cells[0]["microseconds"] if cells else ()) if all(way in x["microseconds"] for x in cells)]
    rows = [[way, *(f"{cell['microseconds'][way]:,.0f} µs" for cell in cells)] for way in ways]
    head = ("one step here, n 3", *(f"{cell['rows']} × {cell['length']} tokens" for cell in cells))
    text = "Paper, fairseq on a V100: baseline 4,477.1 ms, CPU kernel 584.9 ms, GPU kernel 7.8 ms (574×).\n"
    return f"### FastSeq, Table 3: n-gram blocking\n\n{text}\n{table(head, rows)}" if rows else ""


def multi_query(parts: Parts) -> str:
    rows, results = [], results_of(parts, "multi-query")
    for result in results:
        greedy_encoder, greedy, beam_encoder, beam = MULTI_QUERY[result["case"]]
        paper = [f"{greedy_encoder} + {greedy}", f"{beam_encoder} + {beam}"]
        rows.append([result["case"], *paper, *stage_cells(result), to_multi_head(result, results)])
    head = ("attention", "paper, greedy", "paper, beam 4", "here: encoder", "greedy", "beam 4", "to multi-head")
    lengths = " or ".join(map(str, sorted({result["length"] for result in results})))
    text = paragraph(
        f"Here sources and targets have {lengths} tokens. Microseconds per token, of the encoder + of the decoder; "
        "here stock → fastgen. Last column: the time of multi-head attention in stock divided by that of this model "
        "in fastgen, beam 4."
    )
    return f"### Fast Transformer Decoding, Table 2\n\n{text}\n{table(head, rows)}" if rows else ""


def seamless(parts: Parts) -> str:
    tables = [seamless_table(result) for result in results_of(parts, "seamless")]
    text = paragraph(
        "Paper: the text decoder and the vocoder take 61% and 23% of the time. With CUDA graphs and compiled kernels "
        "they become 2 and 30 times as fast, and the whole call 2.7 times. A CPU has no launches to save."
    )
    return "\n".join([f"### Seamless M4T, Figures 2 and 16\n\n{text}", *tables]) if tables else ""


def conditions(parts: Parts) -> str:
    commits: dict[str, list[str]] = {}
    for name, part in parts.items():
        commits.setdefault(part["commit"], []).append(name)
    first = next(iter(parts.values()))
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    measured = [f"commit {commit}" + f" ({', '.join(names)})" * (len(commits) > 1) for commit, names in commits.items()]
    minutes = sum(part["part_seconds"] for part in parts.values()) / 60
    busy = [f"{name} {part['others']:.0%}" for name, part in parts.items() if part["others"] > QUIET]
    quiet = f"Other programs took less than {QUIET:.0%} of the CPUs' time"
    quiet += f", but in {', '.join(busy)}: there seconds are too long and ratios uncertain." if busy else "."
    return paragraph(
        f"{first['threads']} threads, {versions}; {'; '.join(measured)}. {minutes:.0f} minutes in all. Threads spin as "
        f"briefly as in the commands. {quiet}"
    )


SECTIONS: tuple[Callable[[Parts], str], ...] = (
    *(conditions, models, pipeline, ngrams),
    *(multi_query, seamless),
)


def paper_tables(machines: slice = slice(1)) -> str:
    """Returns the tables of the first machine, or of others."""
    texts = []
    for folder in sorted(RESULTS.glob("papers-*"))[machines]:
        parts = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
        if parts:
            first = next(iter(parts.values()))
            texts.append(f"## {first.get('gpu') or cpu_name(first)}\n")
            texts += filter(None, (section(parts) for section in SECTIONS))
    return "\n".join(texts)


PAGES: dict[str, Callable[[], str]] = {
    "benchmarks.md": benchmark_tables,
    "papers.md": paper_tables,
    "dev/papers-other-machines.md": partial(paper_tables, slice(1, None)),
}


def page(name: str) -> str:
    """Returns the page, with its tables written from the results."""
    text = (DOCS / name).read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{PAGES[name]()}\n{END}{after}"


def draw(path: Path) -> None:
    """Draws how many times as fast, a bar for each workload and CPU; the figure is narrow, for it is read on phones."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fastgen", "svg.fonttype": "none", "font.size": 11}
    matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans", "Arial"]
    from matplotlib import pyplot

    machines, words = read("generate"), workloads("generate")
    names = [
        name for name in words if any(name == result["case"] for machine in machines for result in machine["results"])
    ]
    thickness, heading, gap = 0.17, 0.24, 0.09  # inches: of a bar, of the text above the bars of a workload, below them
    step = heading + len(machines) * thickness + gap
    figure, panel = pyplot.subplots(figsize=(5.2, step * len(names) + 1.2), layout="constrained")
    panel.axvline(1, color="0.75", linewidth=0.8, zorder=0)
    for number, machine in enumerate(machines):
        ratios = {result["case"]: stock_ratio(result) for result in machine["results"]}
        lines = [line for line, name in enumerate(names) if name in ratios]
        heights = [line * step + heading + (number + 0.5) * thickness for line in lines]
        values = [ratios[names[line]] for line in lines]
        style = {"color": COLORS[number % len(COLORS)], "label": cpu_name(machine)}
        bars = panel.barh(heights, values, 0.9 * thickness, **style)
        panel.bar_label(bars, fmt="%.1f×", padding=3, fontsize=10)
    for line, name in enumerate(names):
        panel.text(0, line * step + heading - 0.04, words[name], verticalalignment="bottom")
    panel.set_ylim(step * len(names), 0)
    panel.set_yticks([])
    panel.margins(x=0.12)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlabel("times as fast as transformers alone, the same tokens")
    figure.legend(loc="outside upper left", frameon=False)
    figure.savefig(path, metadata={"Date": None})


def write() -> None:
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
    if find_spec("matplotlib"):
        draw(DOCS / "speed.svg")
    else:
        print("docs/speed.svg is as before: pip install matplotlib")
