"""Writes docs/papers.md: the tables of the four papers with what papers.py has measured beside them, and plots.

    python benchmarks/show_papers.py

Reads benchmarks/results/papers-MACHINE/PART.json, a folder for each machine. A part that is missing has no table.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import show_seamless
from paper_tables import MULTI_QUERY, SET_UPS, TABLE_1, TABLE_2, TABLE_4
from show_results import LEAST_MB, RESULTS, cpu_name, pyplot, save

DOCS = Path(__file__).parent.parent / "docs"

Parts = dict[str, dict[str, Any]]

TITLE = """# The papers' tables

Made by `make bench` (`benchmarks/papers.py`, `benchmarks/show_papers.py`) from `benchmarks/results/`. `make bench-gpu`
measures the same on a GPU; it has not yet run on one. What is missing has not been measured on that machine yet.
"""
COMPARISON = (
    "Ratios of a GPU do not carry over: there small operations cost launches, here time goes into arithmetic and "
    "reading weights. Stock is transformers 5 or fairseq 0.12, which have taken over a part of FastSeq: fairseq shares "
    "cross-attention, transformers blocks n-grams without a loop. Stock and fastgen run in turns in one process, "
    "figures are medians of the turns, and the JSON has every turn. The first call of each shape is a warm-up."
)

GROWTH = ("source", "beams", "batch", "output")  # cases of bench_growth.py, each a part
MULTIGEN = ("prompt", "samples", "new-tokens", "inputs")
QUIET = 0.05  # of the CPUs' time
COLORS = {"stock": "tab:gray", "fastgen": "tab:blue", "dense mask": "tab:orange"}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False) + "\n"


def results(parts: Parts, *names: str) -> list[dict[str, Any]]:
    return [result for name in names if name in parts for result in parts[name]["results"]]


def equal(result: dict[str, Any]) -> str:
    return "equal" if result["equal"] else "DIFFER"


def best_batches(parts: Parts) -> str:
    rows = []
    for name, paper in TABLE_1.items():
        for result in results(parts, f"table1-{name}"):
            ours = [f"{result['samples_per_second'][way]:.2f} ({result['batch'][way]})" for way in ("stock", "fastgen")]
            rows.append([*paper, *ours, f"**{result['ratio']:.1f}×**", equal(result)])
    head = ("model", "shape", "paper, samples/s", "faster", "stock, samples/s (batch)", "fastgen", "faster", "tokens")
    text = paragraph(
        "Samples per second, each way at its best batch, found by doubling until a call takes some seconds or samples "
        "per second grow by less than a twentieth. ProphetNet and Transformer run in fairseq, the others in "
        "transformers; beam 4; n-gram 3 in the summaries of transformers."
    )
    return f"### FastSeq, Table 1: seven models\n\n{text}\n{table(head, rows)}" if rows else ""


def ablation(parts: Parts) -> str:
    if not (found := results(parts, "table2")):
        return ""
    result, rows = found[0], []
    stock = result["inputs"] / result["seconds"]["stock"]
    for way, paper in TABLE_2.items():
        rate = result["inputs"] / result["seconds"][way]
        ours = [result["batch"][way], f"{result['cache_mb'][way]:.0f}", f"{result['added_mb'][way]:.0f}"]
        rows.append([*paper, "+ larger batch" if way == "fastgen" else way, *ours, f"{rate:.2f} ({rate / stock:.1f}×)"])
    head = ("paper", "batch", "cache, GB", "samples/s", "here", "batch", "cache, MB", "memory, MB", "samples/s")
    text = paragraph(
        f"BART-large, {result['inputs']} texts of {result['length']} tokens, beam 4, n-gram 3, {result['new_tokens']} "
        "new tokens. The bytes of the cache follow from its shape, as in the paper; memory is what a run adds at its "
        f"peak. Texts: {equal(result)}."
    )
    return f"### FastSeq, Table 2: one optimisation after the other\n\n{text}\n{table(head, rows)}{pipeline(parts)}"


def pipeline(parts: Parts) -> str:
    """What the pipeline gives where texts differ in length."""
    lines = []
    for result in results(parts, "table2-pipeline"):
        seconds = result["seconds"]
        lines.append(
            "\n"
            + paragraph(
                "The pipeline gains where tokenizing takes long beside the model, and by sorting: the demo model on "
                f"{result['lines']} lines of 4 to 122 tokens takes {seconds['stock']:.1f} s in the loop, "
                f"{seconds['loop with fastgen']:.1f} s in the loop with fastgen and {seconds['fastgen']:.1f} s in "
                f"`fastgen-generate-for-transformers` ({result['ratios']['stock']:.1f}×; {result['same']} of "
                f"{result['lines']} lines equal)."
            )
        )
    return "".join(lines)


def ngrams(parts: Parts) -> str:
    names = {
        "fairseq": "fairseq's loop",
        "transformers": "transformers",
        "fastgen torch": "fastgen, torch",
        "fastgen C++": "fastgen, C++",
        "fastgen CUDA": "fastgen, CUDA",
        "fastgen Triton": "fastgen, Triton",
    }
    cells = results(parts, "table3")
    rows = [
        [name, *(f"{cell['microseconds'][key]:,.0f} µs" for cell in cells)]
        for key, name in names.items()
        if cells and all(key in cell["microseconds"] for cell in cells)
    ]
    head = ("one step here, n 3", *(f"{cell['rows']} × {cell['length']} tokens" for cell in cells))
    text = "Paper, fairseq on a V100: baseline 4,477.1 ms, CPU kernel 584.9 ms, GPU kernel 7.8 ms (574×).\n"
    return f"### FastSeq, Table 3: n-gram blocking\n\n{text}\n{table(head, rows)}" if rows else ""


def quality(parts: Parts) -> str:
    def scores(found: dict[str, float]) -> str:
        return "/".join(f"{score:.2f}" for score in found.values())

    rows: list[Sequence[object]] = [(f"paper: {model}", *both, "–", "–") for model, *both in TABLE_4]
    for result in results(parts, "table4"):
        both = [scores(result["rouge"][way]) if result["rouge"] else "–" for way in ("stock", "fastgen")]
        right = f"{result['right']['stock']} → {result['right']['fastgen']}"
        same = f"{result['same']} of {result['lines']}"
        rows.append([f"here: the demo model, {result['case']}", *both, same, right])
    head = ("model, dtype", "baseline, R-1/R-2/R-L", "FastSeq, fastgen", "lines equal", "lines right, stock → fastgen")
    text = "The paper's models on CNN/DailyMail; here the demo model on the sample that comes with it, beam 4.\n"
    return f"### FastSeq, Table 4: quality\n\n{text}\n{table(head, rows)}" if "table4" in parts else ""


def stages(parts: Parts) -> str:
    if not (found := results(parts, "figure1")):
        return ""
    result, rows = found[0], []
    stock, fast = result["stages"]["stock"], result["stages"]["fastgen"]
    for stage in stock:
        shares = [f"{way[stage]:.2f} s ({way[stage] / way['end to end']:.0%})" for way in (stock, fast)]
        rows.append([stage, *shares])
    text = paragraph(
        f"BART-large as in Table 2, one batch of {result['batch']}. Paper, before → after: n-gram blocking 25% → 1%, "
        "post-process 38% → 1%; all that is no computation, over 80% before. A captured step writes keys where they "
        "stay, which counts as the decoder's."
    )
    picture = f"\n![Seconds of the stages]({picture_of(parts, 'stages')})\n"
    head = ("stage", "stock", "fastgen")
    return f"### FastSeq, Figure 1: where the time goes\n\n{text}\n{table(head, rows)}{picture}"


def growing(parts: Parts) -> dict[str, list[dict[str, Any]]]:
    """The results of both groups, with the name of their picture."""
    groups = {"growth": GROWTH, "multigen": MULTIGEN}
    return {name: results(parts, *(f"{name}-{size}" for size in sizes)) for name, sizes in groups.items()}


def growth(parts: Parts, name: str, title: str, text: str) -> str:
    found, rows = growing(parts)[name], []
    for result in found:
        slopes, last = result["slopes"], result["points"][-1]
        row = [f"{result['unit']} ({result['points'][0]['size']:,} to {last['size']:,})"]
        ways = [way for way in COLORS if way in slopes]
        row += [" / ".join(f"{slopes[way]['ms']:.2f}" for way in ways)]
        row += [" / ".join(f"{slopes[way]['mb']:.2f}" for way in ways)]
        row += [" / ".join(f"{last['seconds'][way]:.2f}" for way in ways)]
        row += [" / ".join(f"{last['added_mb'][way]:.0f}" for way in ways)]
        dense = [(point["dense_equal"], point["rows"]) for point in result["points"] if "dense_equal" in point]
        same = "; dense mask {} of {} rows".format(*map(sum, zip(*dense))) if dense else ""
        rows.append([*row, f"**{result['ratio']:.1f}×**", equal(result) + same])
    if not rows:
        return ""
    ways = " / ".join(way for way in COLORS if way in found[0]["slopes"])
    head = ("one more", f"ms, {ways}", "MB", "s at the last size", "MB there", "stock to fastgen", "tokens")
    picture = f"\n![Seconds and megabytes]({picture_of(parts, name)})\n"
    layers = " or ".join(map(str, sorted({result["layers"] for result in found})))
    return f"### {title}\n\n{paragraph(text.format(layers=layers))}\n{table(head, rows)}{picture}"


def multi_query(parts: Parts) -> str:
    rows = []
    for result in results(parts, "multi-query"):
        greedy_encoder, greedy, beam_encoder, beam = MULTI_QUERY[result["case"]]
        stock, fast = result["microseconds"]["stock"], result["microseconds"]["fastgen"]
        ours = [f"{stock[name]:,.0f} → {fast[name]:,.0f}" for name in ("encoder", "greedy", "beam 4")]
        paper = [f"{greedy_encoder} + {greedy}", f"{beam_encoder} + {beam}"]
        rows.append([result["case"], *paper, *ours, f"**{result['ratio']:.1f}×**"])
    head = ("attention", "paper, greedy", "paper, beam 4", "here: encoder", "greedy", "beam 4", "to multi-head")
    lengths = sorted({result["length"] for result in results(parts, "multi-query")})
    text = paragraph(
        f"Here sources and targets of {' or '.join(map(str, lengths))} tokens. Microseconds per token, of the encoder "
        "+ of the decoder; here stock → fastgen. Last column: multi-head attention in stock by this model in fastgen, "
        "beam 4."
    )
    return f"### Fast Transformer Decoding, Table 2\n\n{text}\n{table(head, rows)}" if rows else ""


def seamless(parts: Parts) -> str:
    tables = [show_seamless.table(result) for result in results(parts, "seamless")]
    text = paragraph(
        "Paper: the text decoder and the vocoder take 61% and 23% of the time and become 2 and 30 times as fast, all "
        "of it 2.7 times, with CUDA graphs and compiled kernels. A CPU has no launches to save."
    )
    return "\n".join([f"### Seamless M4T, Figures 2 and 16\n\n{text}", *tables]) + "\n" if tables else ""


def slower(parts: Parts) -> str:
    """What takes longer in fastgen than in stock or with the dense mask, or more memory: a list, which comes first."""
    found = []
    for name, told in parts.items():
        for result in told["results"]:
            if result.get("ratio", 1) < 1:
                found.append(f"{name}, {result['case']}: {result['ratio']:.2f} times as fast as stock")
            for point in result.get("points", ()):
                seconds = point["seconds"]
                found += [
                    f"{name}, {result['case']} {point['size']}: {seconds[way] / seconds['fastgen']:.2f} times as fast "
                    f"as {way}"
                    for way in seconds
                    if seconds[way] < seconds["fastgen"]
                ]
            for last in result.get("points", ())[-1:]:
                added = last["added_mb"]
                found += [
                    f"{name}, {result['case']} {last['size']}: {added['fastgen']:.0f} MB, {way} {added[way]:.0f} MB"
                    for way in added
                    if added[way] + LEAST_MB / 2 < added["fastgen"]
                ]
            for stage, ratio in result.get("ratios", {}).items():
                found += [f"{name}, {stage}: {ratio:.2f} times as fast as stock"] if ratio < 1 else []
            if isinstance(ways := result.get("microseconds", {}).get("stock"), dict):
                fast = result["microseconds"]["fastgen"]
                found += [
                    f"{name}, {result['case']}, {stage}: {ways[stage] / fast[stage]:.2f} times as fast as stock"
                    for stage in ways
                    if ways[stage] < fast[stage]
                ]
    lines = "\n".join(f"- {line}" for line in found)
    head = "Where fastgen takes longer, or more memory:"
    return f"{head}\n\n{lines}\n" if found else "fastgen takes more time or memory nowhere in these tables.\n"


def conditions(parts: Parts) -> str:
    commits: dict[str, list[str]] = {}
    for name, told in parts.items():
        commits.setdefault(told["commit"], []).append(name)
    one = next(iter(parts.values()))
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    measured = [f"commit {commit}" + f" ({', '.join(names)})" * (len(commits) > 1) for commit, names in commits.items()]
    minutes = sum(told["part_seconds"] for told in parts.values()) / 60
    busy = [f"{name} {told['others']:.0%}" for name, told in parts.items() if told["others"] > QUIET]
    quiet = f"Other programs took less than {QUIET:.0%} of the CPUs' time"
    quiet += f", but in {', '.join(busy)}: there seconds are too long and ratios uncertain." if busy else "."
    return paragraph(
        f"{one['threads']} threads, {versions}; {'; '.join(measured)}. {minutes:.0f} minutes in all. Threads spin as "
        f"briefly as in the commands. {quiet}"
    )


GROWTH_TEXT = (
    "BART-base, 2 sources of 256 tokens, beam 4, 16 new tokens, where nothing else grows. Slopes are least squares "
    "over the sizes. Memory is what the first call of a shape adds at its peak, with what it captures."
)
MULTIGEN_TEXT = (
    "Llama-like, {layers} layers, one prompt of 50 tokens, 50 samples, 16 new tokens, where nothing else grows. The "
    "dense mask is the paper's method 2: one row for each prompt, the samples' tokens next to each other in it, and a "
    "mask that hides them from each other. In the paper's curves MultiGen takes less time and memory than stock, and "
    "the dense mask as little memory but more time than both."
)
SECTIONS: tuple[Callable[[Parts], str], ...] = (
    best_batches,
    ablation,
    ngrams,
    quality,
    stages,
    lambda parts: growth(parts, "growth", "How time and memory grow", GROWTH_TEXT),
    lambda parts: growth(parts, "multigen", "MultiGen, Figure 2", MULTIGEN_TEXT),
    multi_query,
    seamless,
)


def read() -> dict[str, Parts]:
    """What was measured on each machine."""
    found = {}
    for folder in sorted(RESULTS.glob("papers-*")):
        parts = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
        if parts:
            found[folder.name] = {name: told | {"machine": folder.name} for name, told in parts.items()}
    return found


def picture_of(parts: Parts, name: str) -> str:
    return f"{next(iter(parts.values()))['machine']}-{name}.svg"


def page() -> str:
    texts = [TITLE, table(("paper", "its set-up", "here"), SET_UPS), paragraph(COMPARISON)]
    for parts in read().values():
        one = next(iter(parts.values()))
        texts += [f"## {one.get('gpu') or cpu_name(one)}\n", conditions(parts), slower(parts)]
        texts += filter(None, (section(parts) for section in SECTIONS))
    return "\n".join(texts)


def draw_growth(found: list[dict[str, Any]], path: Path) -> None:
    """Seconds above, megabytes below; a column for each size that grows."""
    figure, panels = pyplot().subplots(2, len(found), figsize=(3.2 * len(found), 5.5), squeeze=False)
    for column, result in zip(panels.T, found):
        sizes = [point["size"] for point in result["points"]]
        for way in (way for way in COLORS if way in result["slopes"]):
            for panel, kind in zip(column, ("seconds", "added_mb")):
                values = [point[kind][way] for point in result["points"]]
                panel.plot(sizes, values, marker="o", markersize=4, color=COLORS[way], label=way)
        column[1].set_xlabel(f"{result['unit']}s")
        for panel in column:
            panel.set_ylim(bottom=0)
            panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("seconds of a call")
    panels[1, 0].set_ylabel("memory that a call adds, MB")
    panels[0, 0].legend(frameon=False)
    save(figure, path)


def draw_stages(found: list[dict[str, Any]], path: Path) -> None:
    """A bar for stock and one for fastgen, of stages from left to right."""
    ways = found[0]["stages"]
    figure, panel = pyplot().subplots(figsize=(8, 2.4))
    done = [0.0] * len(ways)
    for stage in (name for name in ways["stock"] if name != "end to end"):
        widths = [seconds[stage] for seconds in ways.values()]
        panel.barh(list(ways), widths, left=done, label=stage)
        done = [before + width for before, width in zip(done, widths)]
    panel.invert_yaxis()
    panel.set_xlabel("seconds for 8 texts")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    save(figure, path)


def main() -> int:
    (DOCS / "papers.md").write_text(page(), encoding="utf-8")
    for parts in read().values():
        if found := results(parts, "figure1"):
            draw_stages(found, DOCS / picture_of(parts, "stages"))
        for name, found in growing(parts).items():
            if found:
                draw_growth(found, DOCS / picture_of(parts, name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
