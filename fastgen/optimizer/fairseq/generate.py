"""`SequenceGenerator._generate`: decides whether fastgen's loop and caches fit, and records what was done.

Tests: tests/optimizer/fairseq/test_fairseq_generate.py, tests/optimizer/fairseq/test_fairseq_limits.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.sequence_generator import EnsembleModel, EnsembleModelWithAlignment, SequenceGenerator
from torch import Tensor

from fastgen.optimizer import PATCH_SET
from fastgen.optimizer.decoding.call import GenerateCall, generate_call
from fastgen.optimizer.decoding.faster_forwards import faster_forwards, linears
from fastgen.optimizer.decoding.model_facts import ModelFacts, size_of
from fastgen.optimizer.decoding.reasons import LOOP, Reason
from fastgen.optimizer.decoding.report import Report
from fastgen.optimizer.fairseq import prompt as prompts
from fastgen.optimizer.fairseq import recordable
from fastgen.optimizer.fairseq.decode_step import FairseqDecodeStep
from fastgen.optimizer.fairseq.encoding import EncoderOutputs
from fastgen.optimizer.fairseq.loop import Loop, Sentences, forces_as_upstream
from fastgen.optimizer.fairseq.plan import KNOWN, ModelPlan, plan
from fastgen.optimizer.fairseq.states import DecodingState
from fastgen.origin import comes_with, is_from_elsewhere

_SOURCES = ("src_tokens", "source", "features")


def generate(
    original: Callable,
    self: SequenceGenerator,
    sample: dict[str, Any],
    prefix_tokens: Tensor | None = None,
    constraints: Tensor | None = None,
    bos_token: int | None = None,
) -> list[list[dict[str, Tensor]]]:
    with generate_call(type(self.model.single_model).__name__) as call:
        facts = [call.facts_of(model, KNOWN) for model in self.model.models]
        plans = [plan(model, one) for model, one in zip(self.model.models, facts)]
        reasons = unsupported_reasons(self, sample, constraints, bos_token, plans, facts)
        reasons += prefix_reasons_sync(self, prefix_tokens)
        if reasons:
            call.report.add_reasons(LOOP, reasons)
            return original(self, sample, prefix_tokens, constraints, bos_token)
        inputs = source_of(sample["net_input"]).shape[0]
        call.set_rows(inputs, inputs * self.beam_size)
        call.is_accelerated = True
        _describe(call.report, plans)
        models = [model for model in (*self.model.models, self.lm_model) if model is not None]
        large = [model for model in models if call.costs.should_swap_forwards(size_of(model))]
        modules = {model: call.facts_of(model, KNOWN).modules.values() for model in large}
        with faster_forwards(modules, linears(), call.report.usages), _undone(self, call):
            self.search.init_constraints(constraints, self.beam_size)
            return start(self, sample, prefix_tokens, bos_token, plans, call).run()


@contextmanager
def _undone(generator: SequenceGenerator, call: GenerateCall) -> Iterator[None]:
    """After an error of fastgen's own fairseq does the work again, from the same random numbers on; it is said so."""
    devices = {device for facts in call.facts.values() for device in facts.devices}
    gpus = [device for device in devices if device.type == "cuda"]
    before = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in gpus]
    try:
        yield
    except Exception as error:
        if not is_from_elsewhere(error, "fairseq"):
            torch.set_rng_state(before[0])
            for device, state in zip(gpus, before[1]):
                torch.cuda.set_rng_state(state, device)
            call.is_accelerated = False
            call.report.shared.clear()
            call.report.add_reasons(LOOP, [Reason("ERROR", f"{type(error).__name__}: {error}")])
        raise


def start(
    generator: SequenceGenerator,
    sample: dict[str, Any],
    prefix_tokens: Tensor | None,
    bos_token: int | None,
    plans: list[ModelPlan],
    call: GenerateCall,
) -> Loop:
    """Encodes the sources, and makes ready the loop that decodes them."""
    net_input = sample["net_input"]
    source = source_of(net_input)
    inputs, device = source.shape[0], source.device
    rows = inputs * generator.beam_size
    max_len = max_len_sync(generator, net_input)
    captures = recordable.can_capture(call, generator, plans, rows, max_len)
    input_of_row = torch.arange(inputs, device=device).repeat_interleave(generator.beam_size)
    outputs = EncoderOutputs(generator.model, plans, net_input, input_of_row)
    tokens = torch.full((rows, max_len + 2), generator.pad, dtype=torch.int64, device=device)
    tokens[:, 0] = generator.eos if bos_token is None else bos_token
    ids = sample.get("id")
    sentences = Sentences(
        numbers=list(range(inputs)),
        ids=ids if isinstance(ids, Tensor) else torch.arange(inputs, device=device),
        tokens=tokens,
        scores=torch.zeros((rows, max_len + 1), device=device),
        ignored=torch.zeros((inputs, generator.beam_size), dtype=torch.bool, device=device),
        source_lengths=source_lengths(generator, net_input),
        prefixes=prefix_tokens,
    )
    states = [DecodingState(one, inputs, generator.beam_size, max_len + 1) for one in plans]
    prompt = prompt_sync(generator, sentences, states, plans, max_len)
    if prompt is not None:
        call.report.shared.append(f"the first {prompt.length} tokens of the prompt: once per input, in one pass")
    step = FairseqDecodeStep(call, generator, outputs, states, max_len, captures)
    return Loop(generator, sentences, step, max_len, prompt)


def prompt_sync(
    generator: SequenceGenerator,
    sentences: Sentences,
    states: list[DecodingState],
    plans: list[ModelPlan],
    max_len: int,
) -> prompts.Prompt | None:
    """What all sentences begin with, computed at once; None if there is no such thing, or it has to be fed by steps."""
    if sentences.prefixes is None or prompts.unsupported_reasons(generator, plans) or not forces_as_upstream(generator):
        return None
    length = prompts.common_length_sync(sentences.prefixes, generator.eos, generator.pad, max_len)
    if length == 0:
        return None
    first = sentences.tokens[:: generator.beam_size, :1]
    tokens = torch.cat([first, sentences.prefixes[:, :length]], dim=1)
    return prompts.prefill(generator, tokens, states)


def source_of(net_input: dict[str, Any]) -> Tensor | None:
    """What is given to the encoder: tokens, frames or samples, `[inputs, source_length, …]`."""
    return next((net_input[name] for name in _SOURCES if name in net_input), None)


def source_lengths(generator: SequenceGenerator, net_input: dict[str, Any]) -> Tensor:
    """Lengths of the sources without padding; of tokens without the end of the sentence, unless they are given."""
    source = source_of(net_input)
    if "src_tokens" in net_input:
        given = net_input.get("src_lengths")
        return (source.ne(generator.eos) & source.ne(generator.pad)).long().sum(dim=1) if given is None else given
    padding = net_input["padding_mask"]
    if padding is None:
        return torch.full((source.shape[0],), source.shape[1], device=source.device)
    return padding.shape[-1] - padding.sum(-1)


def max_len_sync(generator: SequenceGenerator, net_input: dict[str, Any]) -> int:
    """The largest number of tokens before the end; reads the device only if outputs are as long as their sources."""
    if generator.match_source_len:
        return int(source_lengths(generator, net_input).max())
    asked = int(generator.max_len_a * source_of(net_input).shape[1] + generator.max_len_b)
    return min(asked, generator.max_len - 1)


def unsupported_reasons(
    generator: SequenceGenerator,
    sample: dict[str, Any],
    constraints: Tensor | None,
    bos_token: int | None,
    plans: list[ModelPlan],
    facts: list[ModelFacts],
) -> list[Reason]:
    """Why this call is left to fairseq; empty if fastgen's loop gives the same. May read the device."""
    reasons: list[Reason] = []
    if PATCH_SET.newer_than_tested("fairseq"):
        reasons.append(Reason("UNTESTED", "this version of fairseq is newer than those that fastgen was tested with"))
    if not comes_with(generator.finalize_hypos, SequenceGenerator):
        text = f"{type(generator).__name__}.finalize_hypos is not that of SequenceGenerator"
        reasons.append(Reason("METHOD_REPLACED", text))
    for name in ("reorder_incremental_state", "reorder_encoder_out"):
        if not comes_with(getattr(generator.model, name), SequenceGenerator):
            reasons.append(Reason("METHOD_REPLACED", f"{name} of the ensemble is not that of fairseq"))
    if type(generator.model) not in (EnsembleModel, EnsembleModelWithAlignment):
        text = f"models in a {type(generator.model).__name__} (supported: EnsembleModel)"
        reasons.append(Reason("ENSEMBLE_TYPE", text))
    if torch.is_grad_enabled():
        reasons.append(Reason("GRADIENTS", "autograd records, but caches are written in place"))
    if bos_token == generator.pad or (bos_token is None and generator.eos == generator.pad):
        reasons.append(Reason("STARTS_WITH_PADDING", "the first token is padding"))
    reasons += dict.fromkeys(reason for one in plans for reason in one.reasons)
    reasons += _training_reasons(generator, facts)
    net_input = sample["net_input"]
    if source_of(net_input) is None:
        text = f"net_input without a source (accepted: {', '.join(_SOURCES)})"
        reasons.append(Reason("NO_SOURCE", text))
    elif not reasons and max_len_sync(generator, net_input) < generator.min_len:
        text = f"min_len {generator.min_len} is above the longest output"
        reasons.append(Reason("MIN_LEN", text))
    if constraints is not None and not generator.search.supports_constraints:
        text = f"constraints, which {type(generator.search).__name__} does not support"
        reasons.append(Reason("CONSTRAINTS", text))
    return reasons


def _training_reasons(generator: SequenceGenerator, facts: list[ModelFacts]) -> list[Reason]:
    for module in (module for one in facts for module in one.modules.values()):
        if isinstance(module, FairseqDropout) and module.p > 0 and module.apply_during_inference:
            return [Reason("TRAINING", "dropout stays on during inference")]
    training = generator.model.training or any(one.in_training for one in facts)
    return [Reason("TRAINING", "a model, or a module of one, is in training mode")] if training else []


def prefix_reasons_sync(generator: SequenceGenerator, prefix_tokens: Tensor | None) -> list[Reason]:
    """fairseq brings beams back that had ended where a prefix ends its sentence; their caches hold padding."""
    if prefix_tokens is not None and bool(prefix_tokens.eq(generator.eos).any()):
        return [Reason("PREFIX_ENDS", "a prefix holds the end of the sentence")]
    return []


def _describe(record: Report, plans: list[ModelPlan]) -> None:
    record.shared.append("beams: one read of the device in each step")
    own = sum(len(one.self_attention) for one in plans)
    cross = sum(len(one.cross_attention) for one in plans)
    if own:
        record.shared.append(f"self-attention: written in place, moved once for all layers, {own} layers")
    if cross:
        record.shared.append(f"cross-attention keys and values: once per input, {cross} layers")
    if any(one.by_input for one in plans):
        record.shared.append("encoder output: never repeated")
