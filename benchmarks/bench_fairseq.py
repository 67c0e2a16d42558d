"""Stock fairseq and fastgen, alternately in one process, on random weights of real size.

    python benchmarks/bench_fairseq.py [CASE …] [--floors FILE] [--repeats 3] [--device cpu] [--json FILE]

For each case: median seconds of both, the median of their ratios, and how many hypotheses have equal tokens; the scores
of all must agree to 1e-4, so that others are ties. Each repeat runs stock and fastgen directly after each other; the
order changes from repeat to repeat. --floors takes a file of the ratios to reach (floors.json); the status is 1
where one is missed.

Stock fairseq's n-gram blocking blocks nothing on a CPU (it compares with the end of the padded buffer), so that the
outputs of the cases with "ngram3" are not comparable there: their times are, and the cases without it compare tokens.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import fairseq
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from harness import Floors, below, finish, parse_flags, parser_of
from machine import describe_cpu

import fastgen


@dataclass
class Case:
    """A task and its model, inputs of [inputs, length] words, and flags of `fairseq-generate`.

    comparable: whether stock does on this machine what it is asked.
    """

    make: Callable[[], tuple[Any, torch.nn.Module]]
    inputs: tuple[int, int]
    flags: dict[str, Any] = field(default_factory=dict)
    prefix: bool = False

    def comparable(self, device: str) -> bool:
        return device == "cuda" or not self.flags.get("no_repeat_ngram_size")


def _dictionary(size: int) -> Dictionary:
    words = Dictionary()
    for number in range(size - len(words)):
        words.add_symbol(f"w{number}")
    return words


def _model(task: Any, arch: str, **settings: Any) -> torch.nn.Module:
    args = Namespace(arch=arch, **settings)
    ARCH_CONFIG_REGISTRY[arch](args)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task).eval()
    with torch.no_grad():  # equal words give equal scores otherwise, and rounding would decide between them
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


def bart_base() -> tuple[Any, torch.nn.Module]:
    words = _dictionary(50265)
    task = TranslationTask(TranslationConfig(), words, words)
    return task, _model(task, "bart_base", max_source_positions=1024, max_target_positions=1024)


def transformer_base(arch: str = "transformer_wmt_en_de") -> tuple[Any, torch.nn.Module]:
    words = _dictionary(32768)
    task = TranslationTask(TranslationConfig(), words, words)
    return task, _model(task, arch, share_all_embeddings=True)


def transformer_big() -> tuple[Any, torch.nn.Module]:
    return transformer_base("transformer_vaswani_wmt_en_de_big")


def gpt2_small() -> tuple[Any, torch.nn.Module]:
    task = LanguageModelingTask(LanguageModelingConfig(), _dictionary(50257))
    settings = vars(fairseq.models.transformer_lm.TransformerLanguageModelConfig()).copy()
    settings |= {"decoder_embed_dim": 768, "decoder_ffn_embed_dim": 3072, "decoder_layers": 12}
    settings |= {"decoder_attention_heads": 12, "share_decoder_input_output_embed": True, "activation_fn": "gelu"}
    settings |= {"decoder_learned_pos": True, "tokens_per_sample": 1024, "max_target_positions": 1024}
    settings |= {"decoder_normalize_before": True, "decoder_input_dim": 768, "decoder_output_dim": 768}
    return task, _model(task, "transformer_lm", **settings)


def prophetnet_large() -> tuple[Any, torch.nn.Module]:
    words = _dictionary(30522)
    task = TranslationTask(TranslationConfig(), words, words)
    return task, _model(task, "ngram_transformer_prophet_large")


NGRAM = {"no_repeat_ngram_size": 3}
CASES = {
    "bart-beam4": Case(bart_base, (4, 512), {"beam": 4}),
    "bart-beam4-ngram3": Case(bart_base, (4, 512), {"beam": 4, **NGRAM}),
    "bart-batch1": Case(bart_base, (1, 512), {"beam": 4}),
    "bart-greedy-short": Case(bart_base, (1, 16), {"beam": 1}),
    "lm-beam4": Case(gpt2_small, (4, 512), {"beam": 4}, prefix=True),
    "wmt-beam5": Case(transformer_base, (16, 32), {"beam": 5}),
    "prophetnet-beam5": Case(prophetnet_large, (2, 256), {"beam": 5}),
}


@dataclass
class Result:
    case: str
    stock_seconds: float
    fastgen_seconds: float
    ratio: float
    equal: str
    turns: dict[str, list[float]]


def sample_of(case: Case, task: Any, device: str) -> dict[str, Any]:
    inputs, length = case.inputs
    words = torch.randint(10, len(task.target_dictionary), (inputs, length))
    words[:, 0 if case.prefix else -1] = task.target_dictionary.eos()
    net_input = {"src_tokens": words.to(device), "src_lengths": torch.full((inputs,), length, device=device)}
    return {"id": torch.arange(inputs, device=device), "net_input": net_input}


def run(name: str, repeats: int, device: str, dtype: torch.dtype, new_tokens: int) -> Result:
    case = CASES[name]
    torch.manual_seed(0)
    task, model = case.make()
    model = model.to(device=device, dtype=dtype)
    sample = sample_of(case, task, device)
    length = new_tokens + (case.inputs[1] if case.prefix else 0)  # random weights never end before they have to
    flags = {"max_len_a": 0, "max_len_b": length, "min_len": length, **case.flags}
    generator = task.build_generator([model], Namespace(**flags))

    def generate() -> tuple[float, list]:
        start = time.perf_counter()
        hypotheses = task.inference_step(generator, [model], sample)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, hypotheses

    def stock() -> tuple[float, list]:
        with fastgen.disabled():
            return generate()

    short = task.build_generator([model], Namespace(**flags | {"max_len_b": 8, "min_len": 1}))
    few_words = sample_of(replace(case, inputs=(case.inputs[0], 4)), task, device)
    task.inference_step(short, [model], few_words)
    with fastgen.disabled():
        task.inference_step(short, [model], few_words)
    seconds: dict[str, list[float]] = {"stock": [], "fastgen": []}
    outputs: dict[str, list] = {}
    for repeat in range(repeats):
        order = [("stock", stock), ("fastgen", generate)]
        for kind, call in order if repeat % 2 == 0 else order[::-1]:
            elapsed, outputs[kind] = call()
            seconds[kind].append(elapsed)
    ratio = statistics.median(a / b for a, b in zip(seconds["stock"], seconds["fastgen"]))
    hypotheses = sum(len(sentence) for sentence in outputs["stock"])
    equal = "not comparable"
    if case.comparable(device):
        equal = f"{count_equal(outputs['stock'], outputs['fastgen'])} of {hypotheses}"
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return Result(name, medians["stock"], medians["fastgen"], ratio, equal, seconds)


def count_equal(stock: list, fast: list) -> int:
    """Hypotheses with the same tokens. Raises ValueError where others are no ties: scores differ by more than 1e-4."""
    pairs = [pair for one, other in zip(stock, fast, strict=True) for pair in zip(one, other, strict=True)]
    for ours, theirs in pairs:
        if not torch.allclose(ours["score"], theirs["score"], atol=1e-4, rtol=1e-4):
            raise ValueError(f"scores {ours['score']:.6f} and {theirs['score']:.6f} of hypotheses in the same place")
    return sum(torch.equal(ours["tokens"], theirs["tokens"]) for ours, theirs in pairs)


def row(result: Result, floors: Floors) -> str:
    floor = floors.get(result.case, {}).get("stock")
    wanted = "-" if floor is None else f"{floor:.2f}x"
    seconds = f"{result.stock_seconds:9.3f} {result.fastgen_seconds:9.3f}"
    return f"{result.case:20} {seconds} {result.ratio:6.2f}x {wanted:>6} {result.equal}"


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES, "pairs of runs", has_devices=True)
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens that each hypothesis has (default 32)")
    args = parse_flags(parser, argv, "fairseq", CASES)
    print(f"torch {torch.__version__}, fairseq {fairseq.__version__}, {torch.get_num_threads()} threads")
    print(describe_cpu())
    print("{:20} {:>9} {:>9} {:>7} {:>6} {}".format("case", "stock s", "fastgen s", "ratio", "floor", "equal"))
    results = []
    for name in args.cases:
        repeats = args.repeats if CASES[name].inputs[0] > 1 else 4 * args.repeats
        results.append(run(name, repeats, args.device, getattr(torch, args.dtype), args.new_tokens))
        print(row(results[-1], args.floors), flush=True)
    told = [asdict(result) for result in results]
    missed = [sentence for result in results for sentence in below(result.case, {"stock": result.ratio}, args.floors)]
    return finish(args, told, missed)


if __name__ == "__main__":
    raise SystemExit(main())
