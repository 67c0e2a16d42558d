"""Seamless M4T from speech to speech, one input: seconds of each stage in transformers and in fastgen, step by step.

    python benchmarks/bench_seamless.py [v2] [v1] [--layers 24] [--floors FILE] [--json FILE] [--plot FILE]

Figures 2 and 16 of "Seamless M4T, fast" (Lee et al., 2024) for models with random weights (seamless_cases.py). They
have all their layers where twice their weights fit in the memory, and fewer otherwise, which is said.

Each turn runs all ways directly after each other, each of which adds a step to the one before; the order rotates.
Seconds are medians, ratios medians of those of a turn. A stage's seconds are without those of stages inside of it. The
library runs the speech encoder twice in a call: both count; in the last way it runs once. `rest` is what lies between
stages, for the most part the library's pass of the text decoder over its own output.

Two steps of the paper have no line of their own, because no switch takes them apart. A static cache is what a step is
recorded with. Rows are put in another order where keys and values lie: by the loop at first, then in the static cache.

--floors takes a file of the ratios to reach; the status is 1 where one is missed, or an output differs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from unittest import mock

import psutil
import torch
import transformers
from clock import Clock, Seconds, medians
from harness import below, finish, parse_flags, parser_of
from machine import describe_cpu
from seamless_cases import CASES, LANGUAGE, LAYERS, Case
from show_seamless import END_TO_END, REST, STAGES, draw, table

import fastgen
from fastgen.config import CONFIG
from fastgen.optimizer.decoding.report import Report
from fastgen.optimizer.transformers.models import seamless

TOLERANCES = {torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.05}  # of waveforms


@contextmanager
def timed_stages(model: transformers.PreTrainedModel, unit_method: str, clock: Clock) -> Iterator[None]:
    """Inside, the model's stages are timed: where the library calls them, whoever does the work."""
    kinds = (type(model.speech_encoder), type(model).__base__, type(model.t2u_model), type(model.vocoder))
    methods = list(zip(kinds, ("forward", "generate", unit_method, "forward")))
    functions = [getattr(kind, method, transformers.GenerationMixin.generate) for kind, method in methods]
    with ExitStack() as stack:
        for stage, (kind, method), function in zip(STAGES, methods, functions):
            stack.enter_context(mock.patch.object(kind, method, clock.stage(stage)(function), create=True))
        yield


@contextmanager
def without_capture() -> Iterator[None]:
    with mock.patch.object(CONFIG, "cuda_graphs", "off"):
        yield


@contextmanager
def without_vocoder() -> Iterator[None]:
    with mock.patch.object(seamless, "faster_waveform", lambda forward, *_: forward()):
        yield


@contextmanager
def encoding_twice() -> Iterator[None]:
    with mock.patch.object(seamless, "_is_repeatable", lambda _: False):
        yield


def without(*steps: Callable[[], AbstractContextManager]) -> Callable[[], AbstractContextManager]:
    @contextmanager
    def way() -> Iterator[None]:
        with ExitStack() as stack:
            for step in steps:
                stack.enter_context(step())
            yield

    return way


WAYS: dict[str, Callable[[], AbstractContextManager]] = {
    "stock": fastgen.disabled,
    "+ caches and loop": without(encoding_twice, without_vocoder, without_capture),
    "+ captured steps": without(encoding_twice, without_vocoder),
    "+ vocoder": without(encoding_twice),
    "+ encoder once": nullcontext,
}
STOCK, *_, FASTGEN = WAYS


@dataclasses.dataclass
class Result:
    """Medians of one version. seconds: of each way and stage, and from end to end; ratios: of stock to fastgen.

    captured: the calls of `generate` whose decode steps are captured. equal: tokens, units and waveforms are those
    of stock in all ways.
    """

    case: str
    layers: int
    weights: int
    dtype: str
    tokens: int
    units: int
    seconds: dict[str, Seconds]
    turns: list[dict[str, Seconds]]
    ratios: Seconds
    captured: list[str]
    equal: bool


class Comparison:
    """One version, and what its ways took and gave."""

    def __init__(self, name: str, layers: int, device: str, dtype: torch.dtype) -> None:
        self.name, self.layers, self.case = name, layers, CASES[name]
        self.model = self.case.make(layers).to(device=device, dtype=dtype)
        self.arguments = {**self.case.inputs(self.model), **self.case.arguments, "tgt_lang": LANGUAGE}
        self.clock = Clock(device, rest=REST)

    def run(self, repeats: int) -> Result:
        outputs = {way: self._call(way)[1] for way in WAYS}  # warms all up
        captured = captured_calls(fastgen.explain())
        with timed_stages(self.model, self.case.unit_method, self.clock):
            turns = [self._turn(first % len(WAYS)) for first in range(repeats)]
        stock = outputs[STOCK]
        return Result(
            case=self.name,
            layers=self.layers,
            weights=sum(weight.numel() for weight in self.model.parameters()),
            dtype=str(self.model.dtype).removeprefix("torch."),
            tokens=stock.sequences.shape[1],
            units=stock.unit_sequences.shape[1],
            seconds={way: medians([turn[way] for turn in turns]) for way in WAYS},
            turns=turns,
            ratios=medians([_ratios(turn[STOCK], turn[FASTGEN]) for turn in turns]),
            captured=captured,
            equal=all(self._is_equal(stock, output) for output in outputs.values()),
        )

    def _turn(self, first: int) -> dict[str, Seconds]:
        return {way: self._call(way)[0] for way in [*WAYS][first:] + [*WAYS][:first]}

    def _call(self, way: str) -> tuple[Seconds, transformers.utils.ModelOutput]:
        with WAYS[way]():
            self.clock.start()
            output = self.model.generate(**self.arguments, return_intermediate_token_ids=True)
            return self.clock.stop(END_TO_END), output

    def _is_equal(self, stock: transformers.utils.ModelOutput, output: transformers.utils.ModelOutput) -> bool:
        if not all(torch.equal(stock[name], output[name]) for name in ("sequences", "unit_sequences")):
            return False
        return torch.allclose(stock.waveform, output.waveform, rtol=0, atol=TOLERANCES[self.model.dtype])


def captured_calls(report: Report) -> list[str]:
    """The stages that are calls of `generate` in which a step was replayed."""
    calls = {stage.name: stage.report.kernels for stage in report.stages if stage.report is not None}
    return [name for name, kernels in calls.items() if any(kernel.startswith("decode step") for kernel in kernels)]


def _ratios(stock: Seconds, ours: Seconds) -> Seconds:
    return {name: stock[name] / ours[name] for name in stock}


def most_layers(case: Case, device: str, itemsize: int) -> int:
    """The most layers with which twice the weights fit in the memory that is free."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    return next((layers for layers in LAYERS if 2 * case.weights(layers) * itemsize <= free), LAYERS[-1])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, CASES, has_devices=True)
    parser.add_argument("--layers", type=int, help=f"of each encoder and decoder at most (default: up to {LAYERS[0]})")
    parser.add_argument("--plot", metavar="FILE", help="also draw them here (.png, .svg)")
    return parse_flags(parser, argv, "seamless", CASES, floor_names())


def floor_names() -> list[str]:
    """Such as "v2 text decoder"."""
    return [f"{case} {stage}" for case in CASES for stage in (*STAGES, END_TO_END)]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    transformers.utils.logging.set_verbosity_error()
    dtype = getattr(torch, args.dtype)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(describe_cpu())
    results = []
    for name in args.cases:
        layers = args.layers or most_layers(CASES[name], args.device, dtype.itemsize)
        results.append(dataclasses.asdict(Comparison(name, layers, args.device, dtype).run(args.repeats)))
        print(f"\n{table(results[-1])}", flush=True)
    if args.plot:
        draw(results, args.plot)
    missed = [
        sentence
        for result in results
        for stage, ratio in result["ratios"].items()
        for sentence in below(f"{result['case']} {stage}", {STOCK: ratio}, args.floors)
    ]
    missed += [f"{result['case']}: outputs differ" for result in results if not result["equal"]]
    return finish(args, results, missed)


if __name__ == "__main__":
    raise SystemExit(main())
