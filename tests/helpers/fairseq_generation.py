"""Calls of fairseq like those of `fairseq-generate`, and their comparison without fastgen (see parity.py)."""

import copy
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import parity
import torch
from fairseq import sequence_generator
from fairseq_models import Case
from ngram_definition import banned
from parity import Both, assert_equal_outputs
from torch import Tensor, nn

import fastgen
from fastgen.optimizer.decoding.report import LOOP, Report

BEAMS = {"beam": 3, "max_len_b": 15}
TOLERANCE = 1e-4

Hypotheses = list[list[dict[str, Any]]]


class BlockingFromDefinition(nn.Module):
    """Blocks n-grams by the definition: none twice in an output, including the token that it begins with.

    Upstream's CUDA kernel does that. Its Python form compares with the end of the padded buffer instead of the last
    tokens, so that it cannot be the reference.
    """

    def __init__(self, no_repeat_ngram_size: int) -> None:
        super().__init__()
        self.no_repeat_ngram_size = no_repeat_ngram_size

    def forward(self, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
        for row, written in enumerate(tokens[:, : step + 1].tolist()):
            lprobs[row, list(banned(written, self.no_repeat_ngram_size))] = -torch.inf
        return lprobs


@contextmanager
def corrected_blocking() -> Iterator[None]:
    """Makes generators that are built inside block n-grams by the definition."""
    with mock.patch.object(sequence_generator, "NGramRepeatBlock", BlockingFromDefinition):
        yield


@contextmanager
def unpatched() -> Iterator[None]:
    """Switches fastgen off, and mends the library's defect in the blocking of n-grams."""
    with fastgen.disabled(), corrected_blocking():
        yield


def generate(case: Case, sample: dict[str, Any] | None = None, **options: Any) -> Hypotheses:
    """Runs one batch through the task, like `fairseq-generate`; options are its flags."""
    inference = case.inference | options.pop("inference", {})
    allowed = options.pop("prefix_allowed_tokens_fn", None)
    extra = {"prefix_allowed_tokens_fn": allowed} if allowed else {}
    generator = case.task.build_generator(case.models, Namespace(**BEAMS | options), **extra)
    return case.task.inference_step(generator, case.models, case.sample if sample is None else sample, **inference)


def run_both(call: Callable[[], Any], *, accelerated: bool | None = None) -> Both:
    """Calls both like `parity.run_both`.

    accelerated: as for `assert_accelerated`, of the last batch; None: not checked.
    """
    both = parity.run_both(call, unpatched, must_report=False)
    if accelerated is not None:
        assert_accelerated(both.report, accelerated)
    return both


def compare(
    case: Case,
    sample: dict[str, Any] | None = None,
    *,
    accelerated: bool | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> Both:
    """Generates with and without fastgen and compares all that is returned, and what became of the sample.

    accelerated: as for `assert_accelerated`; None: as the case says, unless a prefix ends its sentence.
    """
    sample = case.sample if sample is None else sample
    samples: list[dict[str, Any]] = []

    def call() -> Hypotheses:
        samples.append(copy.deepcopy(sample))
        return generate(case, samples[-1], **options)

    both = run_both(call)
    assert_same_hypotheses(both.stock, both.fast, tolerance)
    assert_equal_outputs(samples[0], samples[1], 0.0, "sample")
    by_case = case.accelerated and not ends_in_prefix(case, **options)
    assert_accelerated(both.report, by_case if accelerated is None else accelerated)
    return both


def ends_in_prefix(case: Case, inference: dict[str, Any] | None = None, **unused: Any) -> bool:
    """Returns whether the prefix of a sentence holds its end: fastgen leaves such a batch to fairseq."""
    prefixes = (case.inference | (inference or {})).get("prefix_tokens")
    return prefixes is not None and bool(prefixes.eq(case.task.target_dictionary.eos()).any())


def assert_accelerated(report: Report | None, accelerated: bool) -> None:
    """Asserts that fastgen reports that it did the whole work; or, if not `accelerated`, that it did nothing, and why.

    Without it, a comparison of the unpatched library with itself would pass.
    """
    assert report is not None, "fastgen was not asked"
    assert bool(report.shared) == accelerated, report
    assert bool(report.codes(LOOP)) != accelerated, report
    if accelerated:  # after an error of its own, fastgen leaves that batch and all others to fairseq
        states = {patch.name: patch.state for patch in fastgen.status() if patch.group == "fairseq.generation"}
        assert set(states.values()) == {"applied"}, states


def assert_same_hypotheses(stock: Hypotheses, fast: Hypotheses, tolerance: float = TOLERANCE) -> None:
    """Asserts the same sentences with the same hypotheses in the same order, whatever a hypothesis holds."""
    assert len(stock) == len(fast), f"{len(stock)} and {len(fast)} sentences"
    for sentence, (expected, output) in enumerate(zip(stock, fast)):
        tokens = token_lists([expected, output])
        assert tokens[0] == tokens[1], f"sentence {sentence}: {tokens[0]} and {tokens[1]}"
        assert_equal_outputs(expected, output, tolerance, f"sentence {sentence}")


def lengths(hypotheses: Hypotheses) -> list[list[int]]:
    """Numbers of tokens, for each sentence and hypothesis."""
    return [[len(hypothesis["tokens"]) for hypothesis in sentence] for sentence in hypotheses]


def token_lists(hypotheses: Hypotheses) -> list[list[list[int]]]:
    """Tokens, for each sentence and hypothesis."""
    return [[hypothesis["tokens"].tolist() for hypothesis in sentence] for sentence in hypotheses]
