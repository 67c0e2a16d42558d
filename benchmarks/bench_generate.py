"""Stock transformers and fastgen, and CTranslate2 on request, in turns in one process, on random weights of real size.

    python benchmarks/bench_generate.py [CASE …] [--peers] [--floors FILE] [--repeats 3] [--json FILE]

For each case: median seconds of each, the medians of the ratios to fastgen, how far fastgen is from the machine's limit
(limits.py), the memory that one call adds at its peak, and whether fastgen's outputs are those of stock. Each repeat
runs all of them directly after each other; the order rotates from repeat to repeat.

--peers runs CTranslate2 too, where peers.py has installed it, and tells how many of its rows are those of stock; its
sums are in another order, and its samples have their own random numbers. peers.py measures the other peers.
--floors takes a file of the ratios to reach (floors.json); the status is 1 where one is missed, or an output differs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import transformers
from generate_cases import CASES, Inputs
from harness import Floors, below, finish, parse_flags, parser_of
from limits import Rates, Size, limit, measure_rates
from machine import describe_cpu
from memory import added_mb
from peer_process import PeerError, Tokens, write_task
from peers import CTRANSLATE2_FLOAT32, arguments_of

import fastgen

STAYING = "fastgen with inputs that stay"


@dataclass
class Result:
    """Medians of one case. seconds, turns and added_mb: of each way to run it; ratios: others to fastgen.

    equal: fastgen's outputs are those of stock. peer_equal: how many of CTranslate2's are, where they are comparable.
    """

    case: str
    seconds: dict[str, float]
    turns: dict[str, list[float]]
    ratios: dict[str, float]
    limit_seconds: float
    times_limit: float
    added_mb: dict[str, float]
    equal: bool
    peer_equal: str | None


def timed(call: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def new_tokens(output: torch.Tensor, arguments: dict, pad: int) -> Tokens:
    """What each row generated, without the end token and what pads it."""
    rows = output[:, -arguments["max_new_tokens"] :].tolist()
    end = arguments["eos_token_id"]
    return rows if end is None else [[token for token in row if token not in (end, pad)] for row in rows]


def prompt_lengths(inputs: Inputs) -> list[int]:
    """Positions of each input that are no padding; Whisper's encoder halves its features."""
    if "input_features" in inputs:
        features = inputs["input_features"]
        return [features.shape[-1] // 2] * len(features)
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).sum(1).tolist()


def limit_seconds(model: torch.nn.Module, inputs: Inputs, arguments: dict, rows: Tokens, rates: Rates) -> float:
    prompts = prompt_lengths(inputs)
    returned = len(rows) // len(prompts)
    ends = arguments["eos_token_id"] is not None  # the end token is generated too
    new = [len(row) + ends for row in rows[::returned]]
    rows_per_input = arguments.get("num_beams", 1) * returned
    return limit(Size.of(model), prompts, new, rows_per_input, rates, model.dtype.itemsize)


class Comparison:
    """One case on its model: the ways to run it, which return seconds, and what they gave."""

    def __init__(self, name: str, device: str, dtype: torch.dtype) -> None:
        self.name, self.device, case = name, device, CASES[name]
        torch.manual_seed(0)
        model, inputs = case.make()
        self.model = model.to(device=device, dtype=dtype).eval()
        kinds = {key: dtype if value.is_floating_point() else None for key, value in inputs.items()}
        self.inputs = {key: value.to(device, kinds[key]) for key, value in inputs.items()}
        self.arguments = arguments_of(case)
        self.outputs: dict[str, torch.Tensor] = {}
        self.peer_tokens: Tokens = []
        self.calls = {"fastgen": self.fastgen, "stock": self.stock}
        if case.leave:
            self.calls[STAYING] = self.staying
        self.ways = {way: partial(timed, call, device) for way, call in self.calls.items()}

    def add_peer(self, stack: ExitStack) -> None:
        """CTranslate2, until the stack is closed. Where it cannot do the case, its reason is printed."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_task(folder, self.model, self.inputs, self.arguments)
        try:
            process = stack.enter_context(CTRANSLATE2_FLOAT32.start(self.name, folder))
        except PeerError as error:
            print(f"{self.name}: {CTRANSLATE2_FLOAT32.title}: {error}")
            return

        def peer() -> float:
            seconds, self.peer_tokens = process.generate()
            return seconds

        peer()
        self.ways["ctranslate2"] = peer

    def fastgen(self) -> None:
        self.outputs["fastgen"] = self.model.generate(**self.inputs, **self.arguments)

    def stock(self) -> None:
        with fastgen.disabled():
            self.outputs["stock"] = self.model.generate(**self.inputs, **self.arguments)

    def staying(self) -> None:
        with mock.patch(
            "fastgen.optimizer.transformers.decode_step.TransformersDecodeStep.should_compact", lambda *_: False
        ):
            self.model.generate(**self.inputs, **self.arguments)

    def run(self, repeats: int, rates: Rates) -> Result:
        added = {way: added_mb(call, self.device) for way, call in self.calls.items()}  # warms all up
        seconds: dict[str, list[float]] = {way: [] for way in self.ways}
        equal = True
        for repeat in range(repeats * self._more_repeats()):
            first = repeat % len(self.ways)
            for way, call in [*self.ways.items()][first:] + [*self.ways.items()][:first]:
                torch.manual_seed(repeat)
                seconds[way].append(call())
            equal = equal and torch.equal(self.outputs["stock"], self.outputs["fastgen"])
        return self._result(seconds, added, equal, rates)

    def _result(self, seconds: dict[str, list[float]], added: dict[str, float], equal: bool, rates: Rates) -> Result:
        medians = {way: statistics.median(values) for way, values in seconds.items()}
        others = {way: values for way, values in seconds.items() if way != "fastgen"}
        ratios = {
            way: statistics.median(a / b for a, b in zip(values, seconds["fastgen"])) for way, values in others.items()
        }
        tokens = new_tokens(self.outputs["stock"], self.arguments, self.model.config.pad_token_id)
        least = limit_seconds(self.model, self.inputs, self.arguments, tokens, rates)
        times = medians["fastgen"] / least
        return Result(self.name, medians, seconds, ratios, least, times, added, equal, self._peer_equal(tokens))

    def _more_repeats(self) -> int:
        """Calls of one row are short, and their times noisy."""
        return 4 if len(prompt_lengths(self.inputs)) == 1 else 1

    def _peer_equal(self, stock: Tokens) -> str | None:
        if not self.peer_tokens or self.arguments["do_sample"]:
            return None
        equal = sum(theirs == tokens for theirs, tokens in zip(self.peer_tokens, stock, strict=True))
        return f"{equal} of {len(stock)}"


COLUMNS = (
    ("stock s", 7),
    ("CT2 s", 7),
    ("fastgen s", 9),
    ("x limit", 7),
    ("vs stock", 8),
    ("floor", 5),
    ("vs CT2", 6),
    ("floor", 5),
    ("stock MB", 8),
    ("fastgen MB", 10),
    ("equal", 5),
    ("CT2 equal", 9),
)


def line(case: str, cells: Iterable[object]) -> str:
    return " ".join([f"{case:19}", *(f"{cell!s:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))])


def row(result: Result, floors: Floors) -> str:
    """A line of the table; "-" where there is no figure."""

    def figure(values: Mapping[str, float], of: str, digits: int) -> str:
        return f"{values[of]:.{digits}f}" if of in values else "-"

    wanted = floors.get(result.case, {})
    seconds = [figure(result.seconds, way, 3) for way in ("stock", "ctranslate2", "fastgen")]
    ratios = [figure(values, way, 2) for way in ("stock", "ctranslate2") for values in (result.ratios, wanted)]
    added = [figure(result.added_mb, way, 0) for way in ("stock", "fastgen")]
    return line(
        result.case, [*seconds, f"{result.times_limit:.2f}", *ratios, *added, result.equal, result.peer_equal or "-"]
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, CASES, "turns, times four of one row", has_devices=True)
    parser.add_argument("--peers", action="store_true", help="also run CTranslate2, on the CPU in float32")
    args = parse_flags(parser, argv, "generate", CASES)
    if args.peers and (args.device, args.dtype) != ("cpu", "float32"):
        parser.error(f"--peers: with --device cpu and --dtype float32 only, not {args.device} and {args.dtype}")
    return args


def print_head(rates: Rates) -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"{describe_cpu()}; limit: {rates.flops / 1e9:.0f} GFLOP/s, {rates.bytes / 1e9:.1f} GB/s")
    print(line("case", (name for name, _ in COLUMNS)))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype)
    rates = measure_rates(args.device, dtype)
    print_head(rates)
    results = []
    for name in args.cases:
        comparison = Comparison(name, args.device, dtype)
        with ExitStack() as stack:
            if args.peers:
                comparison.add_peer(stack)
            results.append(comparison.run(args.repeats, rates))
        print(row(results[-1], args.floors), flush=True)
        if STAYING in results[-1].ratios:
            print(f"{name}: {results[-1].ratios[STAYING]:.2f} times as fast as {STAYING}")
    missed = [sentence for result in results for sentence in below(result.case, result.ratios, args.floors)]
    missed += [f"{result.case}: outputs differ" for result in results if not result.equal]
    return finish(args, [asdict(result) for result in results], missed, rates=asdict(rates))


if __name__ == "__main__":
    raise SystemExit(main())
