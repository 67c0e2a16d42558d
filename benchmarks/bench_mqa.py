"""Multi-head, grouped, multi-query and local attention: microseconds per token, without and with fastgen.

    python benchmarks/bench_mqa.py [CASE ...] [--batch 4] [--length 128] [--repeats 3] [--floors FILE] [--json FILE]

Table 2 of "Fast Transformer Decoding: One Write-Head is All You Need" for the models of its Tables 1 (translation) and
3 (language models), with random weights of full size: sources and targets of as many tokens, greedy and beam 4. The
batch is what keeps 2 cores busy; the paper's was 1024. An encoder's microseconds are per source token, a decoder's per
target token of an input, as in the paper; a language model's prompt counts as its encoder.

Each turn runs all cases without and with fastgen directly after each other; microseconds are medians. What counts
against a floor is the median of the turns' ratios of multi-head without fastgen to the case with it, beam 4. The status
is 1 where one is missed, or an output differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import transformers
from clock import Clock, Seconds, medians
from harness import below, finish, parse_flags, parser_of
from machine import print_head
from show_results import mqa_table

import fastgen
from fastgen.models.mqa import (
    MQATransformerConfig,
    MQATransformerForCausalLM,
    MQATransformerForConditionalGeneration,
)
from fastgen.models.mqa.stack import MQATransformerDecoder, MQATransformerEncoder

WINDOW = 32
SIZES: dict[str, int] = {}  # other than the paper's
WARM_UP = 20  # new tokens, enough for a recording
ENCODER, DECODER, TOTAL = "encoder", "decoder", "total"
WAYS = {"stock": fastgen.disabled, "fastgen": nullcontext}
SEARCHES = {"greedy": {"num_beams": 1}, "beam 4": {"num_beams": 4}}


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of Table 1, or of Table 3 (`is_lm`), all of the same number of parameters."""

    key_value_heads: int
    d_ff: int
    local_window: int | None = None
    is_lm: bool = False

    def make(self) -> transformers.PreTrainedModel:
        config = MQATransformerConfig(
            num_key_value_heads=self.key_value_heads,
            d_ff=self.d_ff,
            local_window=self.local_window,
            is_encoder_decoder=not self.is_lm,
            eos_token_id=None,
            **SIZES,
        )
        torch.manual_seed(0)
        model = (MQATransformerForCausalLM if self.is_lm else MQATransformerForConditionalGeneration)(config)
        return model.eval()

    @property
    def baseline(self) -> str:
        return "lm multi-head" if self.is_lm else "multi-head"


CASES = {
    "multi-head": Case(8, 4096),
    "grouped": Case(2, 5248),
    "multi-query": Case(1, 5440),
    "multi-head local": Case(8, 4096, WINDOW),
    "multi-query local": Case(1, 5440, WINDOW),
    "lm multi-head": Case(8, 8192, is_lm=True),
    "lm multi-query": Case(1, 9088, is_lm=True),
}


class Timed:
    """One case: its model, the seconds of its stages, and whether outputs were equal so far."""

    def __init__(self, case: Case, batch: int, length: int, device: str, dtype: torch.dtype) -> None:
        self.case, self.batch, self.length, self.equal = case, batch, length, True
        self.model = case.make().to(device=device, dtype=dtype)
        generator = torch.Generator().manual_seed(1)
        self.input_ids = torch.randint(3, self.model.config.vocab_size, (batch, length), generator=generator).to(device)
        self.clock = Clock(device, rest=DECODER)

    def microseconds(self, new_tokens: int) -> dict[str, Seconds]:
        """For each way, microseconds per token of the encoder and of each search's decoder."""
        found: dict[str, Seconds] = {way: {} for way in WAYS}
        for search, arguments in SEARCHES.items():
            outputs = []
            for way in WAYS:
                with WAYS[way](), self._timed_encoder():
                    self.clock.start()
                    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
                    outputs.append(self.model.generate(self.input_ids, do_sample=False, **lengths, **arguments))
                    seconds = self.clock.stop(TOTAL)
                found[way][ENCODER] = seconds[ENCODER] / (self.batch * self.length) * 1e6
                found[way][search] = seconds[DECODER] / (self.batch * new_tokens) * 1e6
            self.equal &= all(torch.equal(outputs[0], output) for output in outputs)
        return found

    @contextmanager
    def _timed_encoder(self) -> Iterator[None]:
        """Python's own decorator around the encoder; a language model's first forward, that of the prompt, is one."""
        kind = MQATransformerDecoder if self.case.is_lm else MQATransformerEncoder
        original, length = kind.forward, self.length
        timed = self.clock.stage(ENCODER)(original)

        def only_prompt(self, input_ids, *args, **kwargs):  # type: ignore[no-untyped-def]
            return (timed if input_ids.shape[1] == length else original)(self, input_ids, *args, **kwargs)

        with mock.patch.object(kind, "forward", only_prompt if self.case.is_lm else timed):
            yield


@dataclasses.dataclass
class Result:
    """Medians of one case. microseconds: of each way, per token; ratio: of the baseline's beam 4 without fastgen."""

    case: str
    batch: int
    length: int
    dtype: str
    parameters: int
    microseconds: dict[str, Seconds]
    turns: list[dict[str, Seconds]]
    ratio: float
    equal: bool


def run(names: list[str], batch: int, length: int, repeats: int, device: str, dtype: torch.dtype) -> list[Result]:
    cases = {name: Timed(CASES[name], batch, length, device, dtype) for name in names}
    for timed in cases.values():
        timed.microseconds(WARM_UP)
    turns = [{name: timed.microseconds(length) for name, timed in cases.items()} for _ in range(repeats)]
    return [
        Result(
            case=name,
            batch=batch,
            length=length,
            dtype=str(dtype).removeprefix("torch."),
            parameters=sum(weight.numel() for weight in timed.model.parameters()),
            microseconds={way: medians([turn[name][way] for turn in turns]) for way in WAYS},
            turns=[turn[name] for turn in turns],
            ratio=statistics.median(
                turn[timed.case.baseline]["stock"]["beam 4"] / turn[name]["fastgen"]["beam 4"] for turn in turns
            ),
            equal=timed.equal,
        )
        for name, timed in cases.items()
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, CASES, has_devices=True)
    parser.add_argument("--batch", type=int, default=4, help="inputs (default 4)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a source and of a target (default 128)")
    args = parse_flags(parser, argv, "mqa", CASES)
    args.cases = [name for name in CASES if name in {*args.cases, *(CASES[one].baseline for one in args.cases)}]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    print_head()
    results = run(args.cases, args.batch, args.length, args.repeats, args.device, getattr(torch, args.dtype))
    told = [dataclasses.asdict(result) for result in results]
    print(mqa_table(told))
    missed = [sentence for result in results for sentence in below(result.case, {"stock": result.ratio}, args.floors)]
    missed += [f"{result.case}: tokens differ" for result in results if not result.equal]
    return finish(args, told, missed)


if __name__ == "__main__":
    raise SystemExit(main())
