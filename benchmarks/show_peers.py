"""What peers.py measured, as a section of docs/benchmarks.md: which peers are faster and how, seconds, and reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TEXT = """Stock, fastgen and the peers ran in turns, each workload in one run of `benchmarks/peers.py`: the same weights
and lengths, 2 threads, medians of {turns} turns. In brackets: rows with stock's tokens, where nothing is sampled.
*Other numbers*: a dtype that changes what is generated. **Bold**: faster than fastgen in float32. Peers run in
processes of their own: {versions}.
"""
# How a peer does what it is faster at.
HOW = {
    "CTranslate2 int8, other numbers": "Weights are quantised to a quarter of the bytes.",
    "CTranslate2 float32": "Its encoder multiplies by MKL, and there is no Python between its kernels.",
    "CTranslate2 in AVX2 float32": "MKL's products for AVX2 are faster on this CPU than those for AVX-512.",
    "vLLM float32": "Weights are packed for oneDNN's products when they are loaded.",
    "OpenVINO float32": "Each step is one compiled graph, with norms and activations in kernels made for this CPU.",
    "OpenVINO bfloat16, other numbers": "The same graph, with products in bfloat16 as in fastgen's bfloat16.",
}
OTHER_NUMBERS = ", other numbers"  # of a dtype that changes what is generated
FASTGEN_BFLOAT16 = f"fastgen bfloat16{OTHER_NUMBERS}"


def section(measured: Mapping[str, Any], cpu: str, workloads: Mapping[str, str]) -> str:
    """workloads: cases in words, in the order of the table."""
    results = [result | {"workload": workloads[result["case"]]} for result in measured["results"]]
    results.sort(key=lambda result: [*workloads].index(result["case"]))
    versions = ", ".join(f"{name} {found}" for name, found in sorted(measured["peer_versions"].items()))
    counts = sorted(len(result["turns"]["fastgen"]) for result in results)
    text = TEXT.format(versions=versions, turns=" to ".join(dict.fromkeys(map(str, (counts[0], counts[-1])))))
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
            f"{one['workload']}: {one['seconds'][peer]:.2f} against {fastgen_seconds(one, peer)}" for one in cases
        )
        yield f"- {peer}. {where}. {HOW.get(peer, '')}".rstrip()


def fastgen_seconds(result: Mapping[str, Any], peer: str) -> str:
    """Beside a peer with other numbers also fastgen's with other numbers."""
    told = f"{result['seconds']['fastgen']:.2f} s"
    if peer.endswith(OTHER_NUMBERS):
        told += f", fastgen in bfloat16 {result['seconds'][FASTGEN_BFLOAT16]:.2f} s"
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
        yield f"| {result['workload']} | {' | '.join(cell(result, way) for way in ways)} |"


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
            found.setdefault((peer, reason), []).append(result["workload"].split(",")[0])
    yield "| peer without a figure | workloads | reason |"
    yield "|---|---|---|"
    for (peer, reason), cases in found.items():
        yield f"| {peer} | {', '.join(dict.fromkeys(cases))} | {reason} |"
