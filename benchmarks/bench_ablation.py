"""BART-large in FastSeq's steps: what each optimisation adds, and where the time goes without fastgen and with it.

    python benchmarks/bench_ablation.py [steps] [stages] [--repeats 3] [--floors FILE] [--json FILE]

Random weights; INPUTS texts of LENGTH words, beam 4, n-gram 3, NEW_TOKENS new tokens, in transformers.

steps: Table 2 of FastSeq (Yan et al., 2021). Each way adds one thing to the way before it: the KV cache, the pipeline
    of the command (`fastgen.TextGenerator`), the n-gram op, shared caches, captured steps (which FastSeq does not
    have), a larger batch. The bytes of the cache follow from its shape, as in the paper; memory is what a run adds.
stages: Figure 1. Seconds of tokenizer, encoder, decoder, upkeep of the cache, n-gram blocking and the rest of the
    search. A captured step writes keys where they stay, so that its upkeep counts as the decoder's.

Each way is called once with its first batch, which warms it up; then all run in turns, directly after each other. Of
the one without a cache that first call counts, times the batches: a batch takes half a minute. Seconds are medians,
ratios medians of those of a turn. The status is 1 where the ratio of the last way is below its floor, or where tokens
differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from bench_best_batch import BLOCKING, bart
from clock import Clock, Seconds, in_turns, medians, times_as_fast
from harness import missed_by, parse_flags, parser_of, run_cases
from machine import print_head
from memory import peak_mb
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import NoRepeatNGramLogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.bart.modeling_bart import BartEncoder, BartForConditionalGeneration

import fastgen
from fastgen.config import CONFIG
from fastgen.ops import no_repeat_ngram as op
from fastgen.optimizer.decoding.graphs import CapturedGraph
from fastgen.optimizer.decoding.kv_cache import KVCache
from fastgen.optimizer.decoding.static_kv_cache import StaticKVCache

CASES = ("steps", "stages")
INPUTS, LENGTH, NEW_TOKENS, BATCH, LARGER_BATCH = 4, 256, 16, 2, 4
STAGES = TOKENIZER, ENCODER, DECODER, CACHE, NGRAMS, REST = (
    *("tokenizer", "encoder", "decoder"),
    *("upkeep of the cache", "n-gram blocking", "rest of the search"),
)
TOTAL, NO_CACHE = "end to end", "no cache"

Texts = list[str]
Way = Callable[[Texts], Texts]


class Job:
    """The model, its tokenizer and the texts."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model: PreTrainedModel = bart().to(device=device, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None  # every text gets all new tokens
        self.arguments = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **BLOCKING}
        special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        words = [*special.values(), *(f"w{number}" for number in range(len(special), self.model.config.vocab_size))]
        vocabulary = {word: number for number, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        drawn = torch.randint(10, len(words), (INPUTS, LENGTH), generator=torch.Generator().manual_seed(1))
        self.texts: Texts = [" ".join(f"w{word}" for word in row) for row in drawn.tolist()]

    def loop(self, texts: Texts, batch: int, **arguments: Any) -> Texts:
        """What a user would write."""
        found: Texts = []
        for start in range(0, len(texts), batch):
            inputs = self.tokenizer(texts[start : start + batch], return_tensors="pt").to(self.model.device)
            sequences = self.model.generate(
                inputs.input_ids, attention_mask=inputs.attention_mask, **self.arguments, **arguments
            )
            found += self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        return found

    def pipeline(self, texts: Texts, batch: int) -> Texts:
        generator = fastgen.TextGenerator(self.model, tokenizer=self.tokenizer, bs=batch, **self.arguments)
        return [record["outputs"][0]["text"] for record in generator(texts)]

    def cache_mb(self, batch: int, is_shared: bool) -> float:
        """Of the encoder's keys and values, once per input if shared, and those of all new tokens of all beams."""
        config, beams = self.model.config, BLOCKING["num_beams"]
        positions = LENGTH * (1 if is_shared else beams) + NEW_TOKENS * beams
        return batch * positions * 2 * config.d_model * config.decoder_layers * self.model.dtype.itemsize / 1e6


@contextmanager
def only_ngram_op() -> Iterator[None]:
    """The library with fastgen's n-gram blocking in the place of its own."""

    def block(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return op.no_repeat_ngram(input_ids, scores, self.ngram_size)

    with fastgen.disabled(), mock.patch.object(NoRepeatNGramLogitsProcessor, "__call__", block):
        yield


def without_capture() -> AbstractContextManager:
    return mock.patch.object(CONFIG, "cuda_graphs", "off")


def in_context(context: Callable[[], AbstractContextManager], call: Callable[[Texts], Texts]) -> Way:
    def way(texts: Texts) -> Texts:
        with context():
            return call(texts)

    return way


def steps(job: Job, repeats: int, device: str) -> dict[str, Any]:
    def pipeline(context: Callable[[], AbstractContextManager], batch: int = BATCH) -> Way:
        return in_context(context, lambda texts: job.pipeline(texts, batch))

    ways: dict[str, Way] = {
        NO_CACHE: in_context(fastgen.disabled, lambda texts: job.loop(texts, BATCH, use_cache=False)),
        "stock": in_context(fastgen.disabled, lambda texts: job.loop(texts, BATCH)),
        "+ pipeline": pipeline(fastgen.disabled),
        "+ n-gram op": pipeline(only_ngram_op),
        "+ shared caches": pipeline(without_capture),
        "+ captured steps": pipeline(nullcontext),
        "fastgen": pipeline(nullcontext, LARGER_BATCH),
    }
    names = list(ways)
    batches = {way: LARGER_BATCH if way == "fastgen" else BATCH for way in names}
    first: dict[str, float] = {}  # seconds of the calls that warm all up
    added: dict[str, float] = {}
    texts: dict[str, Texts] = {}
    for way, call in ways.items():
        begun = time.perf_counter()
        added[way] = peak_mb(lambda way=way, call=call: texts.update({way: call(job.texts[: batches[way]])}), device)
        first[way] = time.perf_counter() - begun
    no_cache = {NO_CACHE: first[NO_CACHE] * INPUTS / BATCH}
    equal = all(found[:BATCH] == texts["stock"] for found in texts.values())
    del ways[NO_CACHE]
    turns = []
    for seconds, returned in in_turns({way: partial(call, job.texts) for way, call in ways.items()}, repeats):
        turns.append(no_cache | seconds)
        equal = equal and all(found == returned["stock"] for found in returned.values())
    shared = names[names.index("+ shared caches") :]
    cache = {way: job.cache_mb(batches[way], way in shared) for way in names[1:]}
    return {
        "case": "steps",
        "inputs": INPUTS,
        "batch": batches,
        "seconds": medians(turns),
        "turns": turns,
        "ratio": times_as_fast(turns),
        "cache_mb": {NO_CACHE: 0.0, **cache},
        "added_mb": added,
        "equal": equal,
    }


@contextmanager
def timed(clock: Clock, job: Job, way: str) -> Iterator[None]:
    """Inside, the stages are timed where they are called, in the library and in fastgen."""
    targets: list[tuple[Any, str, str]] = [
        (BartEncoder, "forward", ENCODER),
        (BartForConditionalGeneration, "forward", DECODER),
        (PreTrainedTokenizerFast, "__call__", TOKENIZER),
        (PreTrainedTokenizerFast, "batch_decode", TOKENIZER),
    ]
    if way == "stock":
        targets += [
            (DynamicLayer, "update", CACHE),
            (Cache, "reorder_cache", CACHE),
            (NoRepeatNGramLogitsProcessor, "__call__", NGRAMS),
        ]
    else:
        targets += [
            (KVCache, "append", CACHE),
            (KVCache, "reorder", CACHE),
            (StaticKVCache, "reorder", CACHE),
            (op, "no_repeat_ngram_", NGRAMS),
            (CapturedGraph, "replay", DECODER),
        ]
    with ExitStack() as stack:
        for owner, name, stage in targets:
            stack.enter_context(mock.patch.object(owner, name, clock.stage(stage)(getattr(owner, name))))
        yield


def stages(job: Job, repeats: int, device: str) -> dict[str, Any]:
    clock = Clock(device, rest=REST)
    contexts: Mapping[str, Callable[[], AbstractContextManager]] = {"stock": fastgen.disabled, "fastgen": nullcontext}

    def call(way: str) -> tuple[Seconds, Texts]:
        with contexts[way](), timed(clock, job, way):
            clock.start()
            texts = job.loop(job.texts, LARGER_BATCH)
            return dict.fromkeys(STAGES, 0.0) | clock.stop(TOTAL), texts

    for way in contexts:
        call(way)
    turns, equal = [], True
    for _ in range(repeats):
        found = {way: call(way) for way in contexts}
        turns.append({way: seconds for way, (seconds, _) in found.items()})
        equal = equal and found["stock"][1] == found["fastgen"][1]
    return {
        "case": "stages",
        "inputs": INPUTS,
        "batch": LARGER_BATCH,
        "stages": {way: medians([turn[way] for turn in turns]) for way in contexts},
        "turns": turns,
        "ratio": times_as_fast([{way: turn[way][TOTAL] for way in contexts} for turn in turns]),
        "equal": equal,
    }


def told(result: Mapping[str, Any]) -> str:
    ways = [f"  {way}: {found}" for way, found in (result.get("seconds") or result["stages"]).items()]
    return "\n".join([f"{result['case']}: {result['ratio']:.2f} times as fast", *ways])


def main(argv: list[str] | None = None) -> int:
    args = parse_flags(parser_of(__doc__, CASES, has_devices=True), argv, "ablation", CASES)
    print_head()
    job = Job(args.device, getattr(torch, args.dtype))

    def measured(name: str) -> dict[str, Any]:
        result = (steps if name == "steps" else stages)(job, args.repeats, args.device)
        return result | {"dtype": args.dtype, "length": LENGTH, "new_tokens": NEW_TOKENS}

    return run_cases(args, measured, told, lambda result: missed_by(result, args.floors, "texts"))


if __name__ == "__main__":
    raise SystemExit(main())
