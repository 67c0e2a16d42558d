"""Samples per second of seven models, without fastgen and with it, each at the batch that suits it best.

    python benchmarks/bench_best_batch.py [CASE …] [--repeats 3] [--floors FILE] [--json FILE]

Table 1 of FastSeq (Yan et al., 2021) for the same shapes with random weights. The batch is doubled until samples per
second grow by less than a twentieth, a call takes LIMIT seconds, or the batch is MOST. What counts are then turns of
stock and fastgen, each at its best batch; the ratio is the median of those of the turns. Tokens are compared at the
batches that both have run. Sources and outputs are shorter than the paper's, which took up to 1,024 tokens on a GPU.

bart, distilbart, t5, gpt2 and unilm run in transformers, prophetnet and wmt in fairseq, whose n-gram blocking does
nothing on a CPU, so that prophetnet has none. --floors takes a file of the ratios to reach (floors.json); the status is
1 where one is missed, or where tokens differ.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from clock import in_turns
from generate_cases import gpt2_small, t5_base
from harness import missed_by, parse_flags, parser_of, run_cases, with_and_without
from machine import print_head
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel

from fastgen.models.unilm import UniLMConfig, UniLMForConditionalGeneration

MOST, LIMIT, GROWTH, CALLS = 32, 2.5, 1.05, 2
FIRST_WORD = 10  # of the vocabulary; special tokens come before

Generate = Callable[[int], torch.Tensor]


class Case(NamedTuple):
    """A model, which host runs it, the tokens of each source and output, and flags of the host's generation."""

    make: Callable[[], Any]
    host: str
    length: int
    new_tokens: int
    flags: dict[str, Any]


def bart(decoder_layers: int = 12) -> PreTrainedModel:
    """The defaults are those of bart-large; the decoder begins with padding, so that random weights repeat no end."""
    config = BartConfig(decoder_layers=decoder_layers, decoder_start_token_id=1, forced_eos_token_id=None)
    return BartForConditionalGeneration(config)


def unilm_base() -> PreTrainedModel:
    return UniLMForConditionalGeneration(UniLMConfig())


def prophetnet_large() -> Any:
    import bench_fairseq

    return bench_fairseq.prophetnet_large()


def transformer_big() -> Any:
    import bench_fairseq

    return bench_fairseq.transformer_big()


BLOCKING = {"num_beams": 4, "no_repeat_ngram_size": 3}
CASES = {
    "bart": Case(bart, "transformers", 256, 16, BLOCKING),
    "distilbart": Case(lambda: bart(6), "transformers", 256, 16, BLOCKING),
    "prophetnet": Case(prophetnet_large, "fairseq", 256, 16, {"beam": 4}),
    "t5": Case(lambda: t5_base()[0], "transformers", 32, 24, {"num_beams": 4}),
    "wmt": Case(transformer_big, "fairseq", 32, 24, {"beam": 4}),
    "gpt2": Case(lambda: gpt2_small()[0], "transformers", 256, 16, BLOCKING),
    "unilm": Case(unilm_base, "transformers", 256, 16, BLOCKING),
}


def of_transformers(case: Case, device: str, dtype: torch.dtype) -> Generate:
    model = case.make().to(device=device, dtype=dtype).eval()
    sources = torch.randint(FIRST_WORD, model.config.vocab_size, (MOST, case.length), device=device)
    arguments = {"max_new_tokens": case.new_tokens, "eos_token_id": None, "do_sample": False, **case.flags}

    def generate(batch: int) -> torch.Tensor:
        return model.generate(sources[:batch], attention_mask=torch.ones_like(sources[:batch]), **arguments)

    return generate


def of_fairseq(case: Case, device: str, dtype: torch.dtype) -> Generate:
    task, model = case.make()
    model = model.to(device=device, dtype=dtype)
    sources = torch.randint(FIRST_WORD, len(task.target_dictionary), (MOST, case.length), device=device)
    sources[:, -1] = task.target_dictionary.eos()
    length = {"max_len_a": 0, "max_len_b": case.new_tokens, "min_len": case.new_tokens}
    generator = task.build_generator([model], Namespace(**length, **case.flags))

    def generate(batch: int) -> torch.Tensor:
        lengths = torch.full((batch,), case.length, device=device)
        net_input = {"src_tokens": sources[:batch], "src_lengths": lengths}
        sample = {"id": torch.arange(batch, device=device), "net_input": net_input}
        hypotheses = task.inference_step(generator, [model], sample)
        return torch.stack([best["tokens"] for best, *_ in hypotheses])

    return generate


HOSTS = {"transformers": of_transformers, "fairseq": of_fairseq}


class Doubling:
    """The batches that one way has tried. trials: each with the seconds of its calls, of which the fastest counts."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self.trials: list[dict[str, Any]] = []
        self.outputs: dict[int, torch.Tensor] = {}

    def run(self) -> int:
        """The best batch."""
        batch, rates = 1, [0.0]
        while batch <= MOST:
            seconds = []
            for _ in range(CALLS):
                begun = time.perf_counter()
                self.outputs[batch] = self.generate(batch).cpu()
                seconds.append(time.perf_counter() - begun)
            self.trials.append({"batch": batch, "seconds": seconds})
            rates.append(batch / min(seconds))
            if rates[-1] < GROWTH * rates[-2] or min(seconds) > LIMIT:
                break
            batch *= 2
        return 2 ** max(range(len(self.trials)), key=lambda trial: rates[trial + 1])


def measure(name: str, repeats: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    case = CASES[name]
    torch.manual_seed(0)
    generate = HOSTS[case.host](case, device, dtype)
    found, batches = {}, {}
    for way, call in with_and_without(generate).items():
        found[way] = Doubling(call)
        batches[way] = found[way].run()
    ways = {way: lambda way=way: found[way].generate(batches[way]).cpu() for way in found}
    turns = [seconds for seconds, _ in in_turns(ways, repeats)]
    rates = [{way: batches[way] / seconds for way, seconds in turn.items()} for turn in turns]
    stock, fast = (found[way].outputs for way in ("stock", "fastgen"))
    return {
        "case": name,
        "host": case.host,
        "length": case.length,
        "new_tokens": case.new_tokens,
        "flags": case.flags,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batches,
        "trials": {way: doubling.trials for way, doubling in found.items()},
        "turns": turns,
        "samples_per_second": {way: statistics.median(rate[way] for rate in rates) for way in ways},
        "ratio": statistics.median(rate["fastgen"] / rate["stock"] for rate in rates),
        "equal": all(torch.equal(stock[batch], fast[batch]) for batch in stock.keys() & fast.keys()),
    }


def told(result: Mapping[str, Any]) -> str:
    rates = (f"{way} {rate:.2f} at {result['batch'][way]}" for way, rate in result["samples_per_second"].items())
    return f"{result['case']}: samples per second {', '.join(rates)}, {result['ratio']:.2f} times as fast"


def main(argv: list[str] | None = None) -> int:
    args = parse_flags(parser_of(__doc__, CASES, has_devices=True), argv, "best_batch", CASES)
    print_head()
    for name in [name for name in args.cases if find_spec(CASES[name].host) is None]:
        print(f"{name}: left out, {CASES[name].host} is not installed")
        args.cases.remove(name)
    measured = partial(measure, repeats=args.repeats, device=args.device, dtype=getattr(torch, args.dtype))
    return run_cases(args, measured, told, lambda result: missed_by(result, args.floors))


if __name__ == "__main__":
    raise SystemExit(main())
