"""No-repeat-n-gram as in table 3 of FastSeq: fairseq's loop, transformers' processors, and each implementation here.

    python benchmarks/bench_ngram.py [--rows 128 --lengths 128 1024 --ngram_sizes 3] [--floors FILE] [--json F --plot F]

For each cell, microseconds of one step (medians; all methods take turns), and how many times faster fastgen's own are
than fairseq's loop (/fs) and transformers' processor (/tf). fastgen's form is the one of the decoding loop, in place.
The second form is that of the encoder: a processor is made and called once, as it collects its n-grams when it is made.

--floors takes a file of the ratios to reach (floors.json), of the implementation that fastgen chooses; the status is 1
where one is missed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import torch
from harness import below, finish, parse_flags, parser_of
from machine import print_head
from torch import Tensor
from transformers import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

import fastgen
from fastgen.ops import no_repeat_ngram as op
from fastgen.ops.no_repeat_ngram.kernels import KERNELS

VOCABULARY = 50265
FORMS, ROWS, LENGTHS, NGRAM_SIZES = ("own", "encoder"), (4, 128, 512), (32, 128, 1024), (2, 3, 4)
STOCKS = ("fairseq", "transformers")
SECONDS_PER_TURN, SECONDS_PER_CELL = 0.005, 10.0
MIN_REPEATS = 3

Methods = dict[str, tuple[Callable[[], object], Callable[[], AbstractContextManager]]]


def make_tokens(rows: int, length: int, ngram_size: int, device: str) -> Tensor:
    """Random tokens; in every second row the end has been there before, so that there is something to ban."""
    tokens = torch.randint(4, VOCABULARY, (rows, length), device=device)
    tokens[::2, length - ngram_size + 1 :] = tokens[::2, 3 : 2 + ngram_size]
    return tokens


def implementations(call: Callable[[], object], device: str) -> Methods:
    """The same call of the op with each implementation that this machine can use, instead of the chosen one."""
    methods: Methods = {}
    for kernel in KERNELS:
        if kernel.device in ("", device) and not kernel.unsupported_reasons():
            choice = functools.partial(mock.patch.object, op, "kernel_for", lambda device_type, kernel=kernel: kernel)
            methods[f"fastgen {kernel.name}"] = (call, choice)
    return methods


def own_methods(tokens: Tensor, scores: Tensor, ngram_size: int) -> Methods:
    """Bans n-grams of the row itself."""
    processor = NoRepeatNGramLogitsProcessor(ngram_size)
    methods: Methods = {"transformers": (lambda: processor(tokens, scores), fastgen.disabled)}
    try:
        from fairseq.ngram_repeat_block import NGramRepeatBlock
    except ImportError as error:
        print(f"fairseq's loop is left out: {error}")
    else:
        block, rows, step = NGramRepeatBlock(ngram_size, use_extension=False), tokens.shape[0], tokens.shape[1] - 1
        methods["fairseq"] = (lambda: block._no_repeat_ngram(tokens, scores, rows, 1, step), fastgen.disabled)
    return methods | implementations(lambda: op.no_repeat_ngram_(tokens, scores, ngram_size), scores.device.type)


def encoder_methods(tokens: Tensor, scores: Tensor, ngram_size: int) -> Methods:
    """Bans n-grams of the encoder's input, which has the same tokens here; one row for each input."""

    def upstream() -> object:
        return EncoderNoRepeatNGramLogitsProcessor(ngram_size, tokens)(tokens, scores)

    def ours() -> object:
        return op.no_repeat_ngram_(tokens, scores, ngram_size, encoder_tokens=tokens)

    methods: Methods = {"transformers": (upstream, fastgen.disabled)}
    return methods | implementations(ours, scores.device.type)


def microseconds(call: Callable[[], object], device: str) -> float:
    """Of one call, of as many in a row as take `SECONDS_PER_TURN`; on a GPU the host does not wait for each."""
    calls, start, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < SECONDS_PER_TURN:
        call()
        calls += 1
        elapsed = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    return elapsed / calls * 1e6


def take_turns(methods: Methods, repeats: int, device: str) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in methods}
    for call, context in methods.values():
        with context():
            call()
    start = time.perf_counter()
    for repeat in range(repeats):
        for name, (call, context) in methods.items():
            with context():
                times[name].append(microseconds(call, device))
        if repeat + 1 >= MIN_REPEATS and time.perf_counter() - start > SECONDS_PER_CELL:
            break
    return times


def run_cell(form: str, rows: int, length: int, ngram_size: int, args: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    tokens = make_tokens(rows, length, ngram_size, args.device)
    scores = torch.randn(rows, VOCABULARY, device=args.device).to(getattr(torch, args.dtype))
    methods = (own_methods if form == "own" else encoder_methods)(tokens, scores, ngram_size)
    times = take_turns(methods, args.repeats, args.device)
    cell = {"case": case(form, rows, length, ngram_size), "form": form}
    cell |= {"rows": rows, "length": length, "ngram_size": ngram_size, "turns": times}
    cell["microseconds"] = {name: statistics.median(values) for name, values in times.items()}
    cell["faster"] = {
        f"{name} than {stock}": statistics.median(a / b for a, b in zip(times[stock], times[name]))
        for stock, name in itertools.product(STOCKS, times)
        if stock in times and name.startswith("fastgen")
    }
    chosen = next(name for name in times if name.startswith("fastgen"))  # they are in the order of choice
    cell["ratios"] = {
        stock: cell["faster"][f"{chosen} than {stock}"]
        for stock in STOCKS
        if f"{chosen} than {stock}" in cell["faster"]
    }
    return cell


def case(form: str, rows: int, length: int, ngram_size: int) -> str:
    """What a cell is called in the file of floors, such as "own-128x1024-3"."""
    return f"{form}-{rows}x{length}-{ngram_size}"


def show(cell: dict) -> None:
    words = [f"{name} {value:.0f}" for name, value in cell["microseconds"].items() if not name.startswith("fastgen")]
    for name, value in cell["microseconds"].items():
        if name.startswith("fastgen"):
            faster = [cell["faster"].get(f"{name} than {stock}") for stock in STOCKS]
            ratios = [f"{ratio:.1f}x/{tag}" for ratio, tag in zip(faster, ("fs", "tf")) if ratio is not None]
            words.append(f"{name} {value:.0f} ({', '.join(ratios)})")
    print(f"{cell['form']:8}{cell['rows']:5}{cell['length']:6}{cell['ngram_size']:3}  {'  '.join(words)}", flush=True)


def plot(cells: list[dict], path: str) -> None:
    """Microseconds over lengths, a panel for each number of rows, n 3 (or the first that was measured)."""
    from matplotlib import pyplot

    own = [cell for cell in cells if cell["form"] == "own"]
    sizes = sorted({cell["ngram_size"] for cell in own})
    shown = [cell for cell in own if cell["ngram_size"] == (3 if 3 in sizes else sizes[0])]
    rows = sorted({cell["rows"] for cell in shown})
    figure, panels = pyplot.subplots(1, len(rows), figsize=(5 * len(rows), 4), sharey=True, squeeze=False)
    for panel, count in zip(panels[0], rows):
        here = sorted((cell for cell in shown if cell["rows"] == count), key=lambda cell: cell["length"])
        for name in here[0]["microseconds"]:
            lengths = [cell["length"] for cell in here]
            panel.loglog(lengths, [cell["microseconds"][name] for cell in here], marker="o", label=name)
        panel.set(title=f"{count} rows, n = {here[0]['ngram_size']}", xlabel="tokens in a row")
    panels[0][0].set_ylabel("microseconds of a step")
    panels[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, repeats="turns of each cell, fewer after 10 s", has_devices=True)
    parser.set_defaults(repeats=21)
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--ngram_sizes", type=int, nargs="+", default=NGRAM_SIZES)
    parser.add_argument("--plot", metavar="FILE", help="also draw them here (.png, .svg)")
    names = [case(*shape) for shape in itertools.product(FORMS, ROWS, LENGTHS, NGRAM_SIZES)]
    return parse_flags(parser, argv, "ngram", (), names)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print_head()
    for kernel in KERNELS:
        print(f"fastgen {kernel}")
    print("form     rows length n  microseconds of a step")
    cells = []
    for shape in itertools.product(args.forms, args.rows, args.lengths, args.ngram_sizes):
        cells.append(run_cell(*shape, args))
        show(cells[-1])
    if args.plot:
        plot(cells, args.plot)
    missed = [sentence for cell in cells for sentence in below(cell["case"], cell["ratios"], args.floors)]
    return finish(args, cells, missed)


if __name__ == "__main__":
    raise SystemExit(main())
