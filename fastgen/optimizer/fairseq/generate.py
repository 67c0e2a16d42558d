"""`SequenceGenerator._generate`: runs fastgen's loop and caches if possible; and the call for `fastgen.verify`.

Tests: tests/optimizer/fairseq/test_fairseq_generate.py, tests/optimizer/fairseq/test_fairseq_foreign_code.py,
tests/optimizer/test_verify.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastgen.ops.kernel import tolerance
from fastgen.optimizer import trust
from fastgen.optimizer.decoding.call import generate_call, undo_of_random_numbers
from fastgen.optimizer.decoding.captures import can_capture
from fastgen.optimizer.decoding.cost_model import size_of
from fastgen.optimizer.decoding.faster_forwards import faster_forwards, linears, should_swap
from fastgen.optimizer.decoding.report import LOOP, Report
from fastgen.optimizer.decoding.verify import ABSENT, Difference, first_token_difference
from fastgen.optimizer.fairseq.checks import KNOWN, SOURCES, CallChecks, ModelPlan
from fastgen.optimizer.fairseq.decode_step import DecodingState, FairseqDecodeStep
from fastgen.optimizer.fairseq.loop import Hypothesis, Loop, prefill_sync

# fairseq's files that fastgen repeats or relies on.
SOURCE_FILES = (
    "fairseq.sequence_generator", "fairseq.search", "fairseq.ngram_repeat_block", "fairseq.incremental_decoding_utils",
    "fairseq.modules.multihead_attention", "fairseq.modules.transformer_layer",
    "fairseq.modules.learned_positional_embedding", "fairseq.modules.sinusoidal_positional_embedding",
    "fairseq.models.transformer.transformer_decoder", "fairseq.models.fairseq_incremental_decoder",
)  # fmt: skip


def generate(
    original: Callable,
    self: SequenceGenerator,
    sample: dict[str, Any],
    prefix_tokens: Tensor | None = None,
    constraints: Tensor | None = None,
    bos_token: int | None = None,
) -> list[list[Hypothesis]]:
    """Replaces `SequenceGenerator._generate`: returns the hypotheses of each sentence, the best first."""
    net_input = sample["net_input"]
    first_token = self.eos if bos_token is None else bos_token
    with generate_call(type(self.model.single_model).__name__) as call:
        source_and_lengths = source_of_sync(self, net_input)
        limit = None if source_and_lengths is None else source_and_lengths[-1]
        checks = CallChecks(call, self, limit, first_token, prefix_tokens, constraints)
        if source_and_lengths is None or checks.loop:
            call.report.add_reasons(LOOP, checks.loop)
            return original(self, sample, prefix_tokens, constraints, bos_token)
        source, lengths, _ = source_and_lengths
        ours = partial(_accelerated, checks, net_input, source, lengths, sample.get("id"))
        theirs = partial(original, self, sample, prefix_tokens, constraints, bos_token)
        compare = FairseqCall(self, sample, {}).difference
        kind = type(self.model.single_model).__qualname__
        unknown = trust.unknown_sources(name for name in SOURCE_FILES if name in sys.modules)
        weight = next(self.model.parameters(), source)
        parts = kind, self.beam_size, type(self.search).__qualname__, weight.dtype, weight.device.type
        return trust.ours_or_theirs(unknown, parts, ours, theirs, compare, f"fairseq's {kind}")


def _accelerated(
    checks: CallChecks, net_input: dict[str, Any], source: Tensor, lengths: Tensor, ids: Any
) -> list[list[Hypothesis]]:
    """Returns the hypotheses of fastgen's loop. ids: the numbers of the sentences, if the batch has any."""
    call, generator = checks.call, checks.generator
    inputs = source.shape[0]
    device = source.device
    call.set_rows(inputs, inputs * generator.beam_size)
    call.is_accelerated = True
    _describe(call.report, checks.plans)
    models = [model for model in (*generator.model.models, generator.lm_model) if model is not None]
    large = [model for model in models if should_swap(call.costs, size_of(model, KNOWN))]
    modules = {model: call.facts_of(model, KNOWN).modules.values() for model in large}
    fallback = call.fallback(LOOP, "fairseq", restore=undo_of_random_numbers())
    with faster_forwards(call, modules, linears()), fallback:
        generator.search.init_constraints(checks.constraints, generator.beam_size)
        row_inputs = torch.arange(inputs, device=device).repeat_interleave(generator.beam_size)
        captures = can_capture(checks, call.rows, checks.max_len)
        states = [DecodingState(plan, inputs, generator.beam_size, checks.max_len + 1) for plan in checks.plans]
        outputs = generator.model.forward_encoder(net_input)
        for model, state, output in zip(generator.model.models, states, outputs or ()):
            state.set_encoder_out(model.encoder, output, row_inputs)
        step = FairseqDecodeStep(checks, states, captures)
        prompt = prefill_sync(checks, states)
        if prompt is not None:
            text = f"the first {prompt.length} tokens of the prompt: once per input, in one pass"
            call.report.shared.append(text)
        ids = ids if isinstance(ids, Tensor) else torch.arange(inputs, device=device)
        return Loop(step, ids, lengths, prompt).run()


def source_of_sync(generator: SequenceGenerator, net_input: dict[str, Any]) -> tuple[Tensor, Tensor, int] | None:
    """Returns the encoder's input, its lengths `[inputs]`, and the most tokens before an output's end.

    Lengths do not count padding, nor the end of a sentence of tokens, unless the caller passes lengths. Reads the
    device only with `match_source_len`. Returns None for a source with an unknown name.
    """
    name = next((name for name in SOURCES if name in net_input), None)
    if name is None:
        return None
    source = net_input[name]  # tokens, frames or samples, [inputs, source_length, …]
    if name == "src_tokens":
        lengths = net_input.get("src_lengths")
        if lengths is None:
            lengths = (source.ne(generator.eos) & source.ne(generator.pad)).long().sum(dim=1)
    elif (padding := net_input["padding_mask"]) is None:
        lengths = torch.full((source.shape[0],), source.shape[1], device=source.device)
    else:
        lengths = padding.shape[-1] - padding.sum(-1)
    max_len = min(int(generator.max_len_a * source.shape[1] + generator.max_len_b), generator.max_len - 1)
    max_len = int(lengths.max()) if generator.match_source_len else max_len
    return source, lengths, max_len


def _describe(report: Report, plans: list[ModelPlan]) -> None:
    report.shared.append("beams: the device is read once in a step, and where hypotheses end")
    if layers := sum(len(plan.self_attention) for plan in plans):
        report.shared.append(f"self-attention: written in place, moved once for all layers, {layers} layers")
    if layers := sum(len(plan.cross_attention) for plan in plans):
        report.shared.append(f"cross-attention keys and values: once per input, {layers} layers")
    if any(plan.by_input for plan in plans):
        report.shared.append("encoder output: never repeated")


# `fastgen.verify`.


@dataclass
class FairseqCall:
    """A call `generator.generate(models, sample, **kwargs)`, which returns hypotheses per sentence, the best first."""

    generator: SequenceGenerator
    sample: dict[str, Any]
    kwargs: dict[str, Any]
    host: str = "fairseq"

    def run(self) -> list[list[dict[str, Any]]]:
        return self.generator.generate(list(self.generator.model.models), self.sample, **self.kwargs)

    def rows_of(self, output: list[list[dict[str, Any]]]) -> int:
        return sum(map(len, output))

    def difference(self, ours: list[list[dict[str, Any]]], theirs: list[list[dict[str, Any]]]) -> Difference | None:
        """Returns the first difference of two outputs, in tokens or else in scores, with the hypotheses' scores."""
        if list(map(len, ours)) != list(map(len, theirs)):
            return Difference(f"{list(map(len, ours))} hypotheses instead of {list(map(len, theirs))}")
        rows = [list(chain.from_iterable(hypotheses)) for hypotheses in (ours, theirs)]
        tokens = [pad_sequence([row["tokens"] for row in hypotheses], True, ABSENT) for hypotheses in rows]
        difference = first_token_difference(tokens[0], tokens[1], 0)
        if difference is None:
            by_step = [pad_sequence([row["positional_scores"] for row in hypotheses], True) for hypotheses in rows]
            atol = tolerance("score", by_step[0].dtype)
            steps = ((by_step[0] - by_step[1]).abs() > atol).t().nonzero()  # the earliest step first
            if not len(steps):
                return None
            step, row = steps[0].tolist()
            difference = Difference(f"step {step} of row {row} gives other scores", step, row)
        scores = [float(hypotheses[difference.row or 0]["score"]) for hypotheses in rows]
        return replace(difference, ours=scores[0], theirs=scores[1])
