"""What peers.py measured, as a section of docs/benchmarks.md: which peers are faster and how, seconds, and reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TEXT = """Stock, fastgen and the peers ran in turns, each workload in one run of `benchmarks/peers.py`: the same weights
and lengths, 2 threads, medians of 2 or 3 turns. In brackets: rows with stock's tokens, where nothing is sampled.
*Other numbers*: a dtype that changes what is generated. **Bold**: faster than fastgen in float32. Peers run in
processes of their own: {versions}.
"""
WORKLOADS = {
    "bart-beam4": "BART-base, 4 × 512 tokens, beam 4, n-gram 3",
    "t5-beam4": "T5-base, 8 × 128 tokens, beam 4",
    "whisper-beam5": "Whisper-tiny, 8 × 30 s, beam 5, 48 new tokens",
    "recordings": "Whisper-tiny, 2 recordings of 90 s, beam 5, up to 48 new tokens for each 30 s",
    "gpt2-beam4": "GPT-2-small, 4 × 512 tokens, beam 4",
    "gpt2-sample16": "GPT-2-small, 4 × 512 tokens, 16 samples each",
    "llama-sample16": "Llama-like, 4 × 512 tokens, 16 samples each",
    "prefix-greedy": "Llama-like, 8 × 1,056 tokens of which 1,024 are common, greedy, 16 new tokens",
    "prefix-sample4": "Llama-like, 8 × 1,056 tokens of which 1,024 are common, 4 samples each, 16 new tokens",
}
# How a peer does what it is faster at.
HOW = {
    "CTranslate2 int8, other numbers": "Weights are quantised to a quarter of the bytes.",
    "OpenVINO float32": "Each step is one compiled graph, with norms and activations in kernels made for this CPU.",
    "OpenVINO bfloat16, other numbers": "The same graph, with products in bfloat16 as in fastgen's bfloat16.",
}
OTHER = ", other numbers"
BFLOAT16 = "fastgen bfloat16, other numbers"


def section(measured: Mapping[str, Any], cpu: str) -> str:
    results = sorted(measured["results"], key=lambda result: [*WORKLOADS].index(result["case"]))
    versions = ", ".join(f"{name} {found}" for name, found in sorted(measured["peer_versions"].items()))
    text = TEXT.format(versions=versions)
    parts = [f"## Peers, {cpu}", "\n".join(faster(results)), text.rstrip(), "\n".join(table(results))]
    return "\n\n".join([*parts, "\n".join(reasons(results))]) + "\n"


def faster(results: list[dict[str, Any]]) -> Iterator[str]:
    """First: which peers are faster than fastgen, on what, and how."""
    peers = {way: None for result in results for way in result["seconds"] if is_peer(way)}
    found = {peer: [result for result in results if result["ratios"].get(peer, 1) < 1] for peer in peers}
    found = {peer: cases for peer, cases in found.items() if cases}
    if not found:
        yield "No peer is faster than fastgen."
        return
    yield "Peers that are faster than fastgen in float32:\n"
    for peer, cases in found.items():
        where = "; ".join(
            f"{WORKLOADS[one['case']]}: {one['seconds'][peer]:.2f} against {fastgen_seconds(one, peer)}"
            for one in cases
        )
        yield f"- {peer}. {where}. {HOW.get(peer, '')}".rstrip()


def fastgen_seconds(result: Mapping[str, Any], peer: str) -> str:
    """Beside a peer with other numbers also fastgen's with other numbers."""
    told = f"{result['seconds']['fastgen']:.2f} s"
    if peer.endswith(OTHER):
        told += f", fastgen in bfloat16 {result['seconds'][BFLOAT16]:.2f} s"
    return told


def is_peer(way: str) -> bool:
    return way != "stock" and not way.startswith("fastgen")


def ways_of(results: list[dict[str, Any]]) -> list[str]:
    found = {way: None for result in results for way in result["seconds"]}
    return sorted(found, key=lambda way: (way != "stock", is_peer(way)))


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    ways = ways_of(results)
    yield f"| workload | {' | '.join(ways)} |"
    yield "|---" * (len(ways) + 1) + "|"
    for result in results:
        yield f"| {WORKLOADS[result['case']]} | {' | '.join(cell(result, way) for way in ways)} |"


def cell(result: Mapping[str, Any], way: str) -> str:
    if way not in result["seconds"]:
        return "–"
    seconds = f"{result['seconds'][way]:.2f} s"
    if is_peer(way) and result["ratios"][way] < 1:
        seconds = f"**{seconds}**"
    told = [result["rows_equal"][way]] if way in result["rows_equal"] else []
    counts = result.get("new_tokens", {})
    if counts.get(way) != counts.get("stock"):
        told.append(f"{counts[way]} tokens instead of {counts['stock']}")
    return f"{seconds} ({', '.join(told)})" if told else seconds


def reasons(results: list[dict[str, Any]]) -> Iterator[str]:
    """Why a peer has no figure."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for peer, reason in result["reasons"].items():
            found.setdefault((peer, reason), []).append(WORKLOADS[result["case"]].split(",")[0])
    yield "| peer without a figure | workloads | reason |"
    yield "|---|---|---|"
    for (peer, reason), cases in found.items():
        yield f"| {peer} | {', '.join(dict.fromkeys(cases))} | {reason} |"
