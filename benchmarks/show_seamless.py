"""The results of bench_seamless.py as a table, and as bars of the stages, one for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STAGES = ("speech encoder", "text decoder", "text-to-unit", "vocoder")
REST = "rest"
END_TO_END = "end to end"

NAMES = {"v2": "Seamless M4T v2", "v1": "Seamless M4T v1"}
LARGE = 24  # layers of v1-large and v2-large

# Stages that fastgen works on. The speech encoder runs once instead of twice; v2's text-to-unit is the library's.
FASTER = {"v2": ("text decoder", "vocoder"), "v1": ("text decoder", "text-to-unit", "vocoder")}


def most(result: dict[str, Any]) -> float:
    """How many times as fast a call were, by Amdahl's law, if the stages that fastgen works on took no time."""
    stock = next(iter(result["seconds"].values()))
    saved = stock[STAGES[0]] / 2 + sum(stock[stage] for stage in FASTER[result["case"]])
    return stock[END_TO_END] / (stock[END_TO_END] - saved)


def table(result: dict[str, Any]) -> str:
    """For Markdown: seconds of each stage, with one step more from column to column."""
    seconds, ratios = result["seconds"], result["ratios"]
    stock = next(iter(seconds.values()))
    lines = [
        f"{title(result)}, {result['weights'] / 1e9:.2f} billion weights in {result['dtype']}, "
        f"{result['tokens']} tokens, {result['units']} units.",
        "",
        f"| stage | {' | '.join(seconds)} | faster | share of stock |",
        "|---" * (len(seconds) + 3) + "|",
    ]
    for stage in (*STAGES, REST, END_TO_END):
        cells = [f"{way[stage]:.2f} s" for way in seconds.values()]
        cells += [f"**{ratios[stage]:.2f}×**", f"{stock[stage] / stock[END_TO_END]:.0%}"]
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    equal = "Tokens, units and waveforms are equal." if result["equal"] else "Outputs DIFFER."
    captured = f"Decode steps are captured in: {', '.join(result['captured']) or 'none'}."
    none = ", ".join(FASTER[result["case"]])
    faster = f"If {none} took no time, with one run of the speech encoder: {most(result):.2f}× ({END_TO_END})."
    return "\n".join([*lines, "", equal, captured, faster])


def title(result: dict[str, Any]) -> str:
    """Which model it is."""
    large = "large" if result["layers"] >= LARGE else f"as large, but {result['layers']} layers at most"
    return f"{NAMES[result['case']]}, {large}"


def draw(results: Sequence[dict[str, Any]], path: str) -> None:
    """A bar for each step of each version, of its stages from left to right."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(results), figsize=(9, 2.6 * len(results)), squeeze=False)
    for panel, result in zip(panels[:, 0], results):
        ways, done = result["seconds"], [0.0] * len(result["seconds"])
        for stage in (*STAGES, REST):
            widths = [seconds[stage] for seconds in ways.values()]
            panel.barh(list(ways), widths, left=done, label=stage)
            done = [before + width for before, width in zip(done, widths)]
        stock = done[0]
        for line, end in enumerate(done):
            panel.annotate(f" {stock / end:.2f}×", (end, line), va="center")
        panel.invert_yaxis()
        panel.margins(x=0.1)
        panel.set(title=title(result), xlabel="seconds of a call")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.15), ncols=len(STAGES) + 1, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
