"""`HFLM._loglikelihood_tokens`: multiple-choice questions of lm-evaluation-harness, by `fastgen.log_likelihoods`.

The harness computes each context once for each of its continuations; fastgen computes it once. Answers, their order,
the progress bar and the cache of answers are the same. Left to the harness: rolling log-likelihoods, encoder-decoders,
autocast, texts that are too long for the model, methods of a subclass, and requests without repeated contexts.

Tests: tests/test_lm_eval.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from fastgen.optimizer.decoding.report import PREFILL, Reason, that_hold
from fastgen.optimizer.transformers.checks import generate_call
from fastgen.optimizer.transformers.log_likelihoods import TOKENS_PER_BATCH, Scorer, base_of
from fastgen.optimizer.transformers.prefix_groups import Pair, contexts_of
from fastgen.optimizer.transformers.sources import shared_scores
from fastgen.provenance import comes_with

Request = tuple[tuple[str, str] | None, list[int], list[int]]

# Methods that the harness's method calls, and fastgen's does not.
METHODS = ("_model_call", "_select_cont_toks")
SOURCES = [f"lm_eval.models.huggingface:HFLM.{name}" for name in ("_loglikelihood_tokens", *METHODS)]


def log_likelihoods(
    original: Callable, self: HFLM, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
) -> list[tuple[float, bool]]:
    """Replaces `HFLM._loglikelihood_tokens`: returns sums of log-probabilities, and whether each is the greedy one."""
    theirs = partial(original, self, requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
    pairs = [(tuple(context), tuple(continuation)) for _, context, continuation in requests]
    with generate_call(self.model, has_steps=False) as call, torch.no_grad():
        reasons = unsupported_reasons(self, requests)
        call.report.add_reasons(PREFILL, reasons)
        if not reasons:
            scorer = Scorer(call, base_of(self.model), tokens_per_batch(self, pairs), self.softmax_dtype)
            if groups := scorer.groups(contexts_of(pairs)):
                shared = lambda: _answers(self, requests, pairs, scorer.shared(groups), disable_tqdm)  # noqa: E731
                return shared_scores([scorer.model], shared, theirs, SOURCES)
    return theirs()


def unsupported_reasons(harness: HFLM, requests: list[Request]) -> list[Reason]:
    """Returns why the harness must answer these requests itself; empty if fastgen can."""
    has_encoder = harness.backend != "causal" or harness.mixed_precision_dtype is not None
    replaced = [name for name in METHODS if not comes_with(getattr(harness, name), HFLM)]
    lengths = [(len(context), len(continuation)) for _, context, continuation in requests]
    fit = all(min(both) and sum(both) <= harness.max_length + 1 for both in lengths) and bool(lengths)
    return that_hold(
        ("HARNESS", "the model has an encoder, or runs under autocast", has_encoder),
        ("METHOD_REPLACED", "{} is not that of HFLM", replaced[:1]),
        ("HARNESS", "rolling log-likelihoods are the harness's", any(text is None for text, _, _ in requests)),
        ("HARNESS", "a text is empty or too long for the model", not fit),
    )


def tokens_per_batch(harness: HFLM, pairs: list[Pair]) -> int:
    """Returns the number of tokens in the harness's own batches."""
    if not isinstance(harness.batch_size, int):
        return TOKENS_PER_BATCH
    return harness.batch_size * max(len(context) + len(continuation) for context, continuation in pairs)


def _answers(
    harness: HFLM, requests: list[Request], pairs: list[Pair], answers_by_pair: Any, disable_tqdm: bool
) -> list[tuple[float, bool]]:
    """Returns the answers in the order of requests. answers_by_pair: yields each different pair and its answer."""
    indices: dict[Pair, list[int]] = {}
    for index, pair in enumerate(pairs):
        indices.setdefault(pair, []).append(index)
    answers: dict[int, tuple[float, bool]] = {}
    hidden = disable_tqdm or harness.rank != 0
    with tqdm(total=len(requests), disable=hidden, desc="Running loglikelihood requests") as bar:
        for pair, answer in answers_by_pair:
            for index in indices[pair]:
                answers[index] = answer
                harness.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
            bar.update(len(indices[pair]))
    return [answers[index] for index in range(len(requests))]
