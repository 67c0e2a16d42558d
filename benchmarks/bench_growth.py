"""How time and memory of a call grow with one size after the other, without fastgen and with it.

    python benchmarks/bench_growth.py [CASE …] [--repeats 3] [--floors FILE] [--json FILE]

| cases | model and what stays |
|---|---|
| source, beams, batch, output | BART-base: 2 sources of 256 tokens, beam 4, 16 new tokens |
| prompt, samples, new-tokens, inputs | Llama-like, 4 layers: 1 prompt of 50 tokens, 50 samples, 16 new tokens |

Weights are random. The second row is Figure 2 of MultiGen, with the dense mask beside (its method 2): one row for each
prompt, the samples of a step next to each other in it, and a mask that hides the samples from each other.

All ways run in turns, directly after each other. Before these, each is called once, which warms it up; the memory is
what that call adds at its peak. Slopes are least squares over the sizes, of the medians. The ratio of a case is that of
its last size. The status is 1 where it is below its floor, or where tokens of stock and fastgen differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from clock import in_turns, medians, times_as_fast
from generate_cases import bart_base, llama_like
from harness import missed_by, parse_flags, parser_of, run_cases, with_and_without
from machine import print_head
from memory import peak_mb
from transformers import DynamicCache, PreTrainedModel


class Case(NamedTuple):
    """Which size takes which values, and what one more of it is called."""

    size: str
    values: tuple[int, ...]
    unit: str
    is_multigen: bool = False


CASES = {
    "source": Case("source", (128, 512, 1024), "source token"),
    "beams": Case("beams", (1, 4, 8), "beam"),
    "batch": Case("batch", (1, 4, 8), "input"),
    "output": Case("output", (8, 32, 64), "new token"),
    "prompt": Case("source", (1, 100, 200), "prompt token", True),
    "samples": Case("samples", (1, 40, 80), "sample", True),
    "new-tokens": Case("output", (4, 16, 32), "new token", True),
    "inputs": Case("batch", (1, 2, 4), "input", True),
}
BEAM_SEARCH = {"source": 256, "beams": 4, "batch": 2, "output": 16}
MULTIGEN = {"source": 50, "samples": 50, "batch": 1, "output": 16}
MULTIGEN_LAYERS = 3
FIRST_WORD = 10

Ways = dict[str, Callable[[], torch.Tensor]]


def drawn(model: PreTrainedModel, sizes: dict[str, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (sizes["batch"], sizes["source"])
    return torch.randint(FIRST_WORD, model.config.vocab_size, shape, generator=generator).to(model.device)


def beam_search(model: PreTrainedModel, sizes: dict[str, int]) -> Ways:
    input_ids = drawn(model, sizes)
    arguments = {"num_beams": sizes["beams"], "max_new_tokens": sizes["output"], "eos_token_id": None}
    return with_and_without(lambda: model.generate(input_ids, do_sample=False, **arguments).cpu())


def multigen(model: PreTrainedModel, sizes: dict[str, int]) -> Ways:
    input_ids = drawn(model, sizes)
    samples, new_tokens = sizes["samples"], sizes["output"]
    arguments = {"max_new_tokens": new_tokens, "num_return_sequences": samples, "eos_token_id": None, "top_k": 0}

    def generate() -> torch.Tensor:
        torch.manual_seed(0)
        mask = torch.ones_like(input_ids)
        return model.generate(input_ids, attention_mask=mask, do_sample=True, **arguments).cpu()

    def dense() -> torch.Tensor:
        torch.manual_seed(0)
        return dense_mask(model, input_ids, samples, new_tokens).cpu()

    return with_and_without(generate) | {"dense mask": dense}


@torch.no_grad()
def dense_mask(model: PreTrainedModel, prompts: torch.Tensor, samples: int, new_tokens: int) -> torch.Tensor:
    """Samples `[inputs * samples, new_tokens]` of the model's distribution, from one row for each prompt.

    The keys of a row are those of its prompt, then of the first token of each sample, of the second token of each, …
    """
    inputs, length = prompts.shape
    cache = DynamicCache(config=model.config)
    logits = model(prompts, past_key_values=cache).logits[:, -1:].expand(-1, samples, -1)  # [inputs, samples, V]
    own = torch.eye(samples, dtype=torch.bool, device=prompts.device)  # a sample sees its own tokens
    mask = torch.ones(samples, length, dtype=torch.bool, device=prompts.device)
    found = []
    for step in range(new_tokens):
        probabilities = logits.flatten(0, 1).float().softmax(-1)
        found.append(torch.multinomial(probabilities, num_samples=1).view(inputs, samples))
        if step + 1 < new_tokens:
            mask = torch.cat([mask, own], dim=1)  # [samples, length + (step + 1) * samples]
            positions = torch.full_like(found[-1], length + step)
            everyone = mask.expand(inputs, 1, -1, -1)
            logits = model(found[-1], attention_mask=everyone, position_ids=positions, past_key_values=cache).logits
    return torch.stack(found, dim=2).flatten(0, 1)


def measure(name: str, model: PreTrainedModel, repeats: int, device: str) -> dict[str, Any]:
    case, points = CASES[name], []
    for value in case.values:
        fixed = MULTIGEN if case.is_multigen else BEAM_SEARCH
        ways = (multigen if case.is_multigen else beam_search)(model, fixed | {case.size: value})
        added = {way: peak_mb(call, device) for way, call in ways.items()}
        turns, equal = [], True
        for seconds, returned in in_turns(ways, repeats):
            turns.append(seconds)
            equal = equal and torch.equal(returned["stock"], returned["fastgen"])
        point = {"size": value, "seconds": medians(turns), "turns": turns, "added_mb": added, "equal": equal}
        if "dense mask" in ways:
            new = returned["stock"][:, -returned["dense mask"].shape[1] :]
            point["dense_equal"] = int((new == returned["dense mask"]).all(1).sum())
            point["rows"] = len(new)
        points.append(point)
    return {
        "case": name,
        "unit": case.unit,
        "layers": model.config.num_hidden_layers,
        "points": points,
        "slopes": {way: slopes(points, way) for way in points[0]["seconds"]},
        "ratio": times_as_fast(points[-1]["turns"]),
        "equal": all(point["equal"] for point in points),
    }


def slopes(points: list[dict[str, Any]], way: str) -> dict[str, float]:
    """Milliseconds and megabytes of one more of what grows."""
    sizes = [point["size"] for point in points]
    seconds, added = ([point[kind][way] for point in points] for kind in ("seconds", "added_mb"))
    return {
        "ms": statistics.linear_regression(sizes, seconds).slope * 1e3,
        "mb": statistics.linear_regression(sizes, added).slope,
    }


def told(result: Mapping[str, Any]) -> str:
    lines = []
    for point in result["points"]:
        seconds = (f"{way} {one:.2f} s, {point['added_mb'][way]:.0f} MB" for way, one in point["seconds"].items())
        lines.append(f"{result['case']} {point['size']}: {'; '.join(seconds)}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse_flags(parser_of(__doc__, CASES, has_devices=True), argv, "growth", CASES)
    print_head()
    made: dict[bool, PreTrainedModel] = {}

    def measured(name: str) -> dict[str, Any]:
        is_multigen = CASES[name].is_multigen
        if is_multigen not in made:
            torch.manual_seed(0)
            model = (llama_like(MULTIGEN_LAYERS) if is_multigen else bart_base())[0]
            made[is_multigen] = model.to(device=args.device, dtype=getattr(torch, args.dtype)).eval()
        return measure(name, made[is_multigen], args.repeats, args.device)

    return run_cases(args, measured, told, lambda result: missed_by(result, args.floors))


if __name__ == "__main__":
    raise SystemExit(main())
